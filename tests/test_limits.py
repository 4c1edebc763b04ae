"""Jobs under a limit of the system, on one host: of memory, of processes and threads."""

from __future__ import annotations

from support.jobs import Jobs, processes_of, until
from support.limits import cgroup
from support.sources import JOB, gated

LARGE = JOB.replace(
    "nn.Linear(16, 16)",
    "nn.Linear(16, 3200), nn.Linear(3200, 3200), nn.Linear(3200, 3200), nn.Linear(3200, 16)",
)
"""Two layers of 41 MB, one on each of two stages."""


def test_a_job_under_a_memory_limit_trains_on_without_snapshots(jobs: Jobs) -> None:
    """The limit is of a cgroup below the root; two snapshots of each stage would exceed it."""
    with cgroup("memory") as limited:
        limited.limit(280 << 20)
        words = ("--stages", "2", "--balance", "4,4", "--microbatches", "1", "--steps", "4")
        process, path = jobs.start(*words, source=gated(LARGE, when="_ == 1"))
        until((path / "plan.json").exists)
        limited.add(processes_of(jobs.folder))
        (jobs.folder / "go").touch()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert "restart" not in stderr
    assert stderr.count("warning: snapshots: too little memory") == 1
