"""Resume, recovery, replicas and torchrun under the schedules: the bits are those of one stage.

Each test has one schedule, or all with ``SCHEDULES=all``. In the ordinary run, test_planned loses a
worker under ``--schedule auto``, and test_modules resumes from zbv, in place of the slow ones here.
"""

from __future__ import annotations

import os

import pytest

from pipeworker.plan.orders import ORDERS
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference, Run
from support.real_jobs.sources import VARIED, VARIED_WORDS
from support.real_jobs.torchrun import Torchrun
from support.slow import slow

DIES = VARIED.replace(
    """        def forward(self, x):
            pipeworker.stash""",
    """        def forward(self, x):
            path = Path(__file__).with_name("died")
            done = [state["step"] for one in MADE for state in one.state.values()]
            if sys.argv[1:] and 2 in done and not path.exists():
                path.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            pipeworker.stash""",
).replace(
    "        return torch.optim.AdamW(params, lr=0.01)",
    "        MADE.append(torch.optim.AdamW(params, lr=0.01))\n        return MADE[-1]",
)
DIES = f"    import os, signal, sys\n    from pathlib import Path\n    MADE = []\n{DIES}"
"""With an argument, the worker with the second layer is killed once, in its third step."""


def schedules(ordinary: str) -> list[str]:
    """Return the schedule of the ordinary run, or all schedules."""
    return sorted(ORDERS) if os.environ.get("SCHEDULES") == "all" else [ordinary]


@pytest.fixture
def one(reference: Reference) -> Record:
    """A run of one stage that nothing has disturbed."""
    return reference("--stages", "1", *VARIED_WORDS, source=VARIED)


@slow
@pytest.mark.parametrize("schedule", schedules("interleaved-1f1b"))
def test_a_run_is_resumed_under_another_schedule(jobs: Jobs, one: Run, schedule: str) -> None:
    first = jobs.train(
        *("--stages", "3", "--schedule", schedule, "--steps", "3", "--recompute", "never"),
        *VARIED_WORDS,
        source=VARIED,
    )
    names = [*sorted(ORDERS), *sorted(ORDERS)]
    other = names[names.index(schedule) + 1]
    words = ("--stages", "2", "--schedule", other, "--epochs", "1", "--recompute", "except_first")
    resumed = jobs.pipeworker("launch", "--resume", str(first.path), *words)
    assert resumed.returncode == 0, resumed.stderr
    run = Record(first.path)
    assert run.plan["schedule"] == other
    assert_same(one, run)


@slow
@pytest.mark.parametrize("schedule", schedules("zbv"))
def test_a_lost_worker_is_replaced(jobs: Jobs, one: Run, schedule: str) -> None:
    words = ("--stages", "2", "--schedule", schedule, *VARIED_WORDS)
    run = jobs.train(*words, "--", "dies", source=DIES)
    assert (jobs.folder / "died").exists()
    assert run.summary["restarts"] == 1
    assert_same(one, run)


@slow
@pytest.mark.parametrize("schedule", schedules("v-min"))
def test_replicas_that_share_the_optimizer_state(
    jobs: Jobs, reference: Reference, schedule: str
) -> None:
    """Sums of replicas are those of their number, whatever runs in each."""
    words = ("--replicas", "2", "--shard-optimizer", *VARIED_WORDS)
    plain = reference("--stages", "1", *words, source=VARIED)
    run = jobs.train("--stages", "2", "--schedule", schedule, *words, source=VARIED)
    assert_same(plain, run)


@slow
@pytest.mark.parametrize("schedule", schedules("dualpipev"))
def test_ranks_of_torchrun(torchrun: Torchrun, one: Run, schedule: str) -> None:
    run = torchrun("--schedule", schedule, *VARIED_WORDS, source=VARIED).end()
    assert run.status == 0, run.stderr
    assert run.plan["schedule"] == schedule
    assert_same(one, run)
