"""Tests with several agents of torchrun on one machine, which are lost and added."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from pipeworker.wire.keys import TOKEN_VARIABLE
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference, steps_of, until
from support.real_jobs.sources import CALM, DROPOUT_JOB, JOB
from support.real_jobs.torchrun import Started, Torchrun
from support.slow import slow

LOCAL = ("--microbatches", "4", "--steps", "4", "--clip-grad-norm", "0.5")
PLACED = """
    import os
    from pathlib import Path

    where = {name: os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK")}
    Path(f"at-{os.environ['RANK']}").write_text("{GROUP_RANK} {LOCAL_RANK}".format(**where))
"""
"""The end of a job file in which each rank writes its node, and its local rank."""
HOLDS = CALM.replace("sleep(0.05)", "sleep(0.01 if Path('go').exists() else 0.5)").replace(
    "import time", "import time\n    from pathlib import Path", 1
)
"""A slow job until the file ``go`` exists, so that there is time to change its nodes."""


def c10d(port: str, nodes: str, *also: str) -> tuple[str, ...]:
    conf = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=6"
    place = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "x")
    return ("--nnodes", nodes, *place, "--rdzv-conf", conf, "--local-addr", "127.0.0.1", *also)


@slow
def test_two_nodes_of_one_machine_are_one_host(
    jobs: Jobs, reference: Reference, torchrun: Torchrun
) -> None:
    """This is the first thing that users try."""
    both = torchrun.nodes(*LOCAL, source=DROPOUT_JOB + PLACED)
    head, other = (started.end() for started in both)
    assert head.status == other.status == 0, head.stderr + other.stderr
    assert_same(head, reference("--stages", "4", *LOCAL, source=DROPOUT_JOB))
    assert "bound to tcp://127.0.0.1:" in head.log("coordinator")
    assert "step" not in other.stdout
    assert at(jobs.folder) == ["0 0", "0 1", "1 0", "1 1"]


@slow
def test_neighbouring_ranks_share_a_node_in_any_order(jobs: Jobs, torchrun: Torchrun) -> None:
    options = c10d(torchrun.port(), "2")
    both = [torchrun(*LOCAL, source=JOB + PLACED, options=options) for _ in range(2)]
    runs = [started.end() for started in both]
    assert [run.status for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert_same(runs[0], jobs.train("--stages", "4", *LOCAL))
    assert at(jobs.folder) == ["0 0", "0 1", "1 0", "1 1"]


def at(folder: Path) -> list[str]:
    """Return the node and the local rank of each rank."""
    return [path.read_text() for path in sorted(folder.glob("at-*"))]


@slow
def test_added_and_lost_nodes_change_no_bit(
    jobs: Jobs, torchrun: Torchrun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job has one rank, then two when a node is added, then one when that is lost."""
    # Without it, agents of torch 2.13 do not meet again after a node was added.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    words = ("--microbatches", "4", "--checkpoint-every", "4", "--checkpoint-busy", "wait")
    options = c10d(torchrun.port(), "1:2", "--max-restarts", "2")

    def node() -> Started:
        return torchrun(*words, "--steps", "120", source=HOLDS, options=options, ranks=1)

    first = node()
    first.training()
    second = node()
    until(lambda: len(plan(first.path)) == 2)
    before = steps_of(first.path)
    until(lambda: steps_of(first.path) > before + 2)
    lost = plan(first.path)[1]["pid"]
    second.process.kill()
    os.kill(lost, signal.SIGKILL)
    second.end()
    (jobs.folder / "go").touch()
    run = first.end(90)
    assert run.status == 0, run.stderr
    assert len(plan(first.path)) == 1
    assert_same(run, jobs.train(*words, "--steps", "120", "--stages", "1", source=HOLDS))
    assert len(json.loads((run.path / "run.json").read_text())["resumed"]) >= 2


def plan(run_dir: Path) -> list[dict[str, Any]]:
    """Return the stages of the running job."""
    found: list[dict[str, Any]] = Record(run_dir).plan["stages"]
    return found


def test_the_failed_rank_writes_its_error_for_torchrun(
    torchrun: Torchrun, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The starter of torchrun reads the same error, and its output shows it once."""
    reply = jobs.folder / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    monkeypatch.setenv(TOKEN_VARIABLE, "a secret of the test")
    run = torchrun(ranks=2, source=JOB.replace("Linear(16, 3)", "Linear(15, 3)")).end()
    assert run.status == 1
    cause = run.stderr.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank      : 1 \(local_rank: 1\)\n  exitcode  : 1 ", cause), run.stderr
    error = json.loads(reply.read_text())["message"]
    assert error["message"].startswith("layer 4 (Linear) raised RuntimeError: ")
    assert error["errorCode"] == 1
    assert int(error["extraInfo"]["timestamp"]) > 1_600_000_000
    shown = error["extraInfo"]["py_callstack"]
    assert "in forward: stage 1, layer 4 (Linear), micro-batch 0, step 1" in shown
    assert "Traceback" in shown
    assert "pipeworker/worker" not in shown
    assert shown.replace("\n", "\n  ") in cause
    assert TOKEN_VARIABLE not in run.stderr
    assert len(re.findall("^error: ", run.stderr, re.MULTILINE)) == 1
    assert re.search(
        r"^error: layer 4 \(Linear\) raised RuntimeError: .*\n"
        r"  in forward: stage 1, layer 4 \(Linear\), micro-batch 0, step 1$",
        run.stderr,
        re.MULTILINE,
    )
    assert run.summary["status"] == "failed"


@pytest.mark.parametrize("token", [True, pytest.param(False, marks=slow)])
def test_nodes_that_were_started_otherwise_are_named_at_once(
    jobs: Jobs, torchrun: Torchrun, token: bool
) -> None:
    """The first node would be silent for minutes, or use its own options for all."""
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", torchrun.port())
    words = () if token else ("--", "small", "x")
    envs = ({TOKEN_VARIABLE: "a" * 32}, {TOKEN_VARIABLE: "b" * 32}) if token else ({}, {})
    error = r"the words after --: rank 1 on \S+ was started with small x, rank 0 on \S+ without"
    if token:
        error = (
            r"PIPEWORKER_TOKEN: rank 1 on \S+ has another value than rank 0 on \S+; set the same"
        )
    nodes = [
        torchrun(
            *LOCAL, *more, ranks=1, options=(*place, "--node-rank", str(number)), env=envs[number]
        )
        for number, more in enumerate(((), words))
    ]
    for run in [node.end() for node in nodes]:
        assert run.status == 1
        assert re.search(error, run.stderr), run.stderr
    assert not nodes[0].path.exists()


def test_the_first_node_reports_a_mistake_of_another_one(jobs: Jobs, torchrun: Torchrun) -> None:
    """The ranks of both nodes would wait for each other otherwise."""
    place = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", torchrun.port())
    head = torchrun(*LOCAL, ranks=1, options=(*place, "--node-rank", "0"))
    other = torchrun(
        *LOCAL, "--keep", "0", ranks=1, options=(*place, "--node-rank", "1"), job="other.py"
    )
    runs = [head.end(), other.end()]
    for run in runs:
        assert run.status == 1
        assert run.stderr.count("--keep 0: must be 1 or more") >= 1, run.stderr
    assert re.search("^error: rank 1 on .*: --keep 0: must be", runs[0].stderr, re.MULTILINE)
    assert not head.path.exists()
