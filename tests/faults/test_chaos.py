"""Faults at every failpoint: ``make chaos`` injects hundreds, a test run one of each kind.

The job recovers from each, and its weights equal those of a run without faults. The faults and
their places are drawn from a seed; each one is checked to have occurred.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeworker.plan.actions import Action, Kind
from pipeworker.record.checkpoint.manifest import file_names
from support.faults.fault_injection import (
    AT_START,
    IN_COMMIT,
    IN_RECOVERY,
    KILLED,
    Fault,
    FaultInjector,
)
from support.faults.observed_job import ObservedJob
from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs
from support.slow import slow

FAULTS = int(os.environ.get("CHAOS_FAULTS", 0))
SEED = int(os.environ.get("CHAOS_SEED", 0))
STAGES = 4
PAUSE = 0.5 if FAULTS else 0.0
BITS = ("--microbatches", "6", "--clip-grad-norm", "1")
WORDS = (
    *("--stages", f"{STAGES}", "--balance", "4,4,4,4", "--recompute", "except_first"),
    *("--steps", "1000000", "--max-restarts", "1000000"),
    *("--checkpoint-every", "50" if FAULTS else "10"),
)

SOURCE = """
    import os
    import random
    import subprocess
    import time

    import torch
    from torch import nn

    import pipeworker

    PAUSE = float(os.environ.get("PAUSE", 0))
    transient = (ConnectionError,)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(61, 64) * 0.1)

    class Embedding(Table):
        def forward(self, ids):
            return nn.functional.embedding(ids, self.table)

    class Head(Table):
        def forward(self, x):
            return x @ self.table.t()

    class Aside(nn.Module):
        def forward(self, x):
            pipeworker.stash("x", x)
            return torch.tanh(x)

    class Back(nn.Module):
        def forward(self, x):
            return x + pipeworker.pop("x")

    class Parent(nn.Module):
        child = None

        def forward(self, x):
            self.child = self.child or subprocess.Popen(["sleep", "1000"])
            return x

    def model():
        embedding, head = Embedding(), Head()
        head.table = embedding.table
        part = lambda *more: [nn.Linear(64, 64), nn.Dropout(0.1), *more]
        return nn.Sequential(
            embedding, Aside(), *part(), *part(nn.Tanh(), Parent()),
            *part(nn.ReLU(), nn.Linear(64, 64)), *part(Back(), head),
        )

    def loss(output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def optimizer(params):
        return torch.optim.AdamW(params, lr=1e-3)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)

    def data():
        for _ in range(64):
            time.sleep(PAUSE)
            ids = torch.randint(61, (12, random.randint(4, 8)))
            yield ids, ids.roll(1, 1)
"""
"""A job with a tie and a skip from end to end, a child process, randomness and changing sizes."""


_LOSSES = {
    "kill": KILLED,
    "exit": "os._exit of a worker",
    "terminate": "SIGTERM of a worker",
    "stop": "SIGSTOP of a worker",
}
_WEIGHTS = (6, 2, 1, 1)
_STARTING = ("loading", "building", "restoring", "connecting")
_WHILE_SENDING = ("send StepResult", "send Snapshot", "send KeepAlive", "sent Advance")
_AGENT = (("kill", "any time"), ("kill", "fork 2"), ("stop", "any time"))
_IN_EACH_RUN = (
    *("SIGKILL in a snapshot", "SIGKILL in a recovery", "data connections cut", "disk full"),
    *("writer killed", "worker killed while its part is written"),
    *("coordinator killed in a commit", "coordinator killed in a recovery"),
)
"""The kinds that each test run injects once: found without a timeout, and by no faster test."""


def one_per_kind_and_stage(actions: Sequence[Action], chance: random.Random) -> list[Action]:
    """Return one action of each kind at each stage."""
    places: dict[tuple[int, Kind], list[Action]] = {}
    for action in actions:
        places.setdefault((action.stage, action.kind), []).append(action)
    return [chance.choice(some) for some in places.values()]


def fault_at(action: Action, chance: random.Random) -> Fault:
    (how,) = chance.choices(list(_LOSSES), _WEIGHTS)
    return Fault(_LOSSES[how], how, str(action))


def worker_faults(actions: Sequence[Action], chance: random.Random) -> Iterator[Fault]:
    """Yield faults of workers that are not at actions, for each stage."""
    for stage in range(STAGES):
        yield Fault("os._exit in a layer", "exit", f"layer@{stage}")
        yield Fault("transient exception in a layer", "raise", f"layer@{stage}")
        yield Fault("SIGKILL before an update", "kill", f"update@{stage}")
        yield Fault("SIGKILL in a snapshot", "kill", f"copying@{stage}")
        yield Fault("control connection cut", "cut control", str(chance.choice(actions)))
        yield Fault("data connections cut", "cut data", str(chance.choice(actions)))
        names = file_names(stage, STAGES)
        yield Fault("worker killed while its part is written", "orphan", chance.choice(names))
        yield Fault("writer killed", "kill writer", chance.choice(names))
        yield Fault("writer stopped, then its worker killed", "stop writer", chance.choice(names))
        yield Fault("disk full", "full")
        for phase in _STARTING:
            yield Fault("SIGKILL in a recovery", "kill again", f"{phase}@{stage}")
        phase = chance.choice(_STARTING)
        yield Fault("SIGSTOP in a recovery", "stop again", f"{phase}@{stage}")


def other_faults() -> Iterator[Fault]:
    """Yield faults of other processes, and one that ends the job, which is then resumed."""
    for place in _WHILE_SENDING:
        yield Fault("coordinator killed", "kill coordinator", place)
    for place in IN_COMMIT:
        yield Fault("coordinator killed in a commit", "kill coordinator", place)
    for place in (*IN_RECOVERY, AT_START):
        yield Fault("coordinator killed in a recovery", "kill coordinator", place)
    yield Fault("coordinator stopped", "stop coordinator", "sent Advance")
    for how, when in _AGENT:
        yield Fault(f"agent: {how}", f"{how} agent", when)
    yield Fault("all but the launcher killed", "kill all")
    yield Fault("agent and coordinator killed after a suspension", "suspend all")
    yield Fault("worker killed while an interrupted job is saved", "kill to save", "saving@1")


def one_of_each(faults: Sequence[Fault], chance: random.Random) -> list[Fault]:
    kinds = {fault.kind: fault for fault in chance.sample(faults, len(faults))}
    return chance.sample([kinds[kind] for kind in _IN_EACH_RUN], len(_IN_EACH_RUN))


@pytest.fixture
def disk(jobs: Jobs) -> Iterator[Path | None]:
    """A small disk, if the system allows to mount one."""
    folder = jobs.folder / "disk"
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=4m", "pipeworker-test", str(folder)]
    if subprocess.run(line, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        for mounted in (*jobs.folder.glob("run-*/checkpoints"), folder):
            while mounted.is_mount():  # a process that is about to end may still use it
                subprocess.run(["umount", str(mounted)], capture_output=True)
                time.sleep(0.02)


def choose_faults(actions: Sequence[Action], chance: random.Random) -> list[Fault]:
    """Return the faults to inject, those of workers first: other processes survive many of them."""
    workers, others = [*worker_faults(actions, chance)], [*other_faults()]
    if not FAULTS:
        return one_of_each(
            [Fault(KILLED, "kill", str(chance.choice(actions))), *workers, *others], chance
        )
    workers += [fault_at(action, chance) for action in one_per_kind_and_stage(actions, chance)]
    more = range(len(workers) + len(others), FAULTS)
    workers += [fault_at(chance.choice(actions), chance) for _ in more]
    return [fault for part in (workers, others) for fault in chance.sample(part, len(part))]


@slow
@pytest.mark.timeout(10 * FAULTS + 120)
def test_weights_are_equal_with_and_without_faults(
    jobs: Jobs, disk: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(SEED)
    monkeypatch.setenv(
        "PAUSE", "0.02" if FAULTS else "0.1"
    )  # most of the time the job waits for the next fault
    injector = FaultInjector(ObservedJob(jobs, SOURCE, (*WORDS, *BITS)), chance, disk, PAUSE)
    injector.start()
    for fault in choose_faults(injector.actions, chance):
        injector.inject(fault)
    injector.restart_with("--schedule", "zbv", "--recompute", "never")
    parts = [
        action
        for action in one_per_kind_and_stage(injector.actions, chance)
        if action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    ]
    for action in parts if FAULTS else parts[-1:]:
        injector.inject(fault_at(action, chance))
    run = injector.finish()
    steps = run.summary["steps"]
    print(f"\nseed {SEED}: {sum(injector.fired.values())} faults in {steps} steps")
    injector.report()
    injector.check_flat()
    assert [row["step"] for row in run.metrics] == [*range(1, steps + 1)]
    assert not list((run.path / "checkpoints").glob(".*"))
    monkeypatch.delenv("PAUSE")
    words = ("--stages", "1", *BITS, "--steps", str(steps))
    assert_same(run, jobs.train(*words, source=SOURCE, timeout=60 + FAULTS))
