"""Jobs on a Ray cluster of several nodes, which are processes of this machine."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Reference, ended, steps_of, until
from support.real_jobs.sources import JOB
from support.slow import slow

SLOW = JOB.replace("            x =", "            time.sleep(0.2)\n            x =").replace(
    "import torch\n", "import time\n    import torch\n", 1
)
pytestmark = [slow, pytest.mark.timeout(300)]
SPLIT = ("--microbatches", "4")
FAST = {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
"""Settings by which Ray notices the loss of a node within seconds."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster with a head, and two nodes with two CPUs each."""
    utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name, value in FAST.items():
        monkeypatch.setenv(name, value)
    found = utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            found.add_node(num_cpus=2)
        found.wait_for_nodes()
        yield found
    finally:
        found.shutdown()


def words(cluster: Any, *more: str) -> list[str]:
    on = ["--on", "ray", "--nodes", "2", "--stages", "2", "--set", f"address={cluster.address}"]
    return [*on, *SPLIT, *more]


def agents() -> list[int]:
    """Return the processes of agents that Ray's workers have started, and of their workers."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 (polled)
        try:
            line = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:
            continue
        if b"pipeworker.host.agent" in line and b"PIPEWORKER_RAY_CALLER" in line:
            found.append(int(entry))
    return [pid for pid in found if b"ray_pipe" not in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_job_on_two_nodes_has_the_numbers_of_one(
    cluster: Any, jobs: Jobs, reference: Reference
) -> None:
    run = jobs.train(*words(cluster), cold=True)
    assert_same(run, reference("--stages", "1", *SPLIT))
    assert f"--on ray --nodes 2 --set address={cluster.address}" in run.stdout
    assert len([*(run.path / "logs").glob("host-bundle-*.log")]) == 2
    until(lambda: not agents())


def test_a_lost_node_is_replaced(cluster: Any, jobs: Jobs, reference: Reference) -> None:
    options = ("--steps", "40", "--worker-timeout", "10")
    process, run_dir = jobs.start(*words(cluster, *options), source=SLOW, cold=True)
    until(lambda: steps_of(run_dir) >= 3)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    time.sleep(25)  # longer than a worker may be silent
    assert process.poll() is None
    cluster.add_node(num_cpus=2)
    run = ended(process, run_dir, seconds=120)
    assert "host bundle-" in run.stderr
    assert "waits: Ray has no room for a lost bundle of 1 CPU" in run.stderr
    assert "resumed after step" in run.stderr
    assert "done: 40 steps" in run.stdout
    quiet = reference("--stages", "1", *SPLIT, "--steps", "40")
    assert_same(run, quiet)


def test_no_room_ends_the_command(cluster: Any, jobs: Jobs) -> None:
    run = jobs.run(*words(cluster, "--threads", "3", "--set", "patience=5"), cold=True)
    assert run.status == 1
    assert "error: --on ray: Ray has no room for 2 bundles" in run.stderr
    assert "of 3 CPU (its nodes: 2 × 2 CPU; 1 × 0 CPU), for 5 s" in run.stderr
    assert not run.path.exists()


def test_a_node_that_is_not_replaced(cluster: Any, jobs: Jobs) -> None:
    """The state that its neighbour holds is saved before the job ends."""
    options = ("--steps", "400", "--set", "patience=5", "--checkpoint-every", "end")
    process, run_dir = jobs.start(*words(cluster, *options), source=SLOW, cold=True)
    until(lambda: steps_of(run_dir) >= 5)
    before = steps_of(run_dir)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    run = ended(process, run_dir, 1, seconds=200)
    found = re.search(r"; step (\d+) is saved before it ends", run.stderr)
    assert found, run.stderr
    (saved,) = (run_dir / "checkpoints").glob("step-*")
    # The steps that run until the node is gone need not have reached the neighbour.
    assert int(saved.name.rpartition("-")[2]) == int(found[1]) >= before - 1


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_launcher(cluster: Any, jobs: Jobs, kill: int) -> None:
    process, run_dir = jobs.start(*words(cluster, "--steps", "400"), source=SLOW, cold=True)
    until(lambda: steps_of(run_dir) >= 2)
    assert len(agents()) >= 2
    os.kill(process.pid, kill)
    process.communicate(timeout=60)
    until(lambda: not agents(), 60)
    assert jobs.train(*words(cluster), cold=True).status == 0  # the bundles are free


def test_a_cluster_that_is_gone(cluster: Any, jobs: Jobs) -> None:
    options = ("--steps", "4000", "--set", "patience=5")
    process, run_dir = jobs.start(*words(cluster, *options), source=SLOW, cold=True)
    until(lambda: steps_of(run_dir) >= 2)
    cluster.shutdown()
    run = ended(process, run_dir, 1, seconds=180)
    assert "error: " in run.stderr
    until(lambda: not agents())
