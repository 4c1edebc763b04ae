"""Jobs under a limit of the system, on one host: of memory, of processes and threads."""

from __future__ import annotations

import pytest

from support.processes.limits import cgroup
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Reference, ended, processes_of, until
from support.real_jobs.sources import JOB, gated
from support.slow import slow

LARGE = JOB.replace(
    "nn.Linear(16, 16)",
    "nn.Linear(16, 3200), nn.Linear(3200, 3200), nn.Linear(3200, 3200), nn.Linear(3200, 16)",
)
"""Two layers of 41 MB, one on each of two stages."""


@slow
@pytest.mark.root
def test_a_job_under_a_memory_limit_trains_on_without_snapshots(jobs: Jobs) -> None:
    """The limit is of a cgroup below the root; two snapshots of each stage would exceed it."""
    with cgroup("memory") as limited:
        limited.limit(280 << 20)
        words = ("--stages", "2", "--balance", "4,4", "--microbatches", "1", "--steps", "4")
        process, path = jobs.start(*words, source=gated(LARGE, when="_ == 1"))
        until((path / "plan.json").exists)
        limited.add(processes_of(jobs.folder))
        (jobs.folder / "go").touch()
        run = ended(process, path)
    assert "restart" not in run.stderr
    assert run.stderr.count("warning: snapshots: too little memory") == 1


REFUSED = JOB.replace("import torch", "import pathlib, threading\n    import torch", 1).replace(
    "        return nn.functional",
    """        CALLS.append(1)
        if len(CALLS) == 7 and not pathlib.Path("refused").exists():
            pathlib.Path("refused").touch()
            threading.Thread.start = refuse
        return nn.functional""",
)
REFUSED += """
    CALLS = []

    def refuse(thread):
        raise RuntimeError("can't start new thread")
"""
"""From its fourth step on, the worker of the loss gets no more threads."""
STARTING = REFUSED.replace(
    "threading.Thread.start = refuse\n",
    "threading.Thread.start = refuse\n            threading.Thread(target=print).start()\n",
)
"""Its loss starts one there."""
WORDS = ("--stages", "2", "--microbatches", "2", "--snapshot-every", "5")


def test_a_worker_starts_no_thread_after_its_first_steps(jobs: Jobs, reference: Reference) -> None:
    """The first snapshot is of step 5."""
    run = jobs.train(*WORDS, source=REFUSED)
    assert (jobs.folder / "refused").exists()
    assert run.summary["restarts"] == 0
    assert_same(run, reference(*WORDS))


def test_a_worker_that_gets_no_thread_in_a_step_is_replaced(
    jobs: Jobs, reference: Reference
) -> None:
    run = jobs.train(*WORDS, source=STARTING)
    assert (jobs.folder / "refused").exists()
    (cause,) = run.summary["causes"]
    assert "can't start new thread" in cause
    assert "the system grants no more threads or processes" in cause
    assert "defect" not in run.stderr
    assert_same(run, reference(*WORDS))
