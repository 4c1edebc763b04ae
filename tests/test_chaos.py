"""Faults at every place: ``make chaos`` has hundreds, a test run one of each kind.

What is lost comes back, and the weights are those of a quiet run. Which faults, and where, is drawn
from a seed; each is seen to have happened.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pipeworker.plan.actions import Action, Kind
from pipeworker.record.manifest import file_names
from support.besieged import Besieged
from support.compare import assert_same
from support.forked import Server
from support.jobs import Jobs, until
from support.registered import WITH_HALVES
from support.siege import BEGINS, COMMITS, KILLED, RECOVERS, Fault, Siege

FAULTS = int(os.environ.get("CHAOS_FAULTS", 0))
SEED = int(os.environ.get("CHAOS_SEED", 0))
STAGES = 4
PAUSE = 0.5 if FAULTS else 0.0
BITS = ("--microbatches", "6", "--clip-grad-norm", "1")
WORDS = (
    *("--stages", f"{STAGES}", "--balance", "4,4,4,4", "--recompute", "except_first"),
    *("--steps", "1000000", "--restarts", "1000000", "--checkpoint-every", "50"),
)

SOURCE = """
    import random
    import subprocess

    import torch
    from torch import nn

    import pipeworker

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
            ids = torch.randint(61, (12, random.randint(4, 8)))
            yield ids, ids.roll(1, 1)
"""
"""A tie and a skip from end to end, a child process, all that is random, sizes that change."""


_MANNERS = {
    "kill": KILLED,
    "exit": "os._exit of a worker",
    "terminate": "SIGTERM of a worker",
    "stop": "SIGSTOP of a worker",
}
_WEIGHTS = (6, 2, 1, 1)
_STARTING = ("loading", "building", "restoring", "connecting")
_SPEAKS = ("tell StepResult", "tell Snapshot", "tell Beat", "sent Advance")
_AGENT = (("kill", "any time"), ("kill", "forking"), ("stop", "any time"))
_OFTEN = (
    *(KILLED, "os._exit in a layer", "SIGKILL in a snapshot", "SIGKILL in a recovery"),
    *("control connection cut", "data connections cut", "disk full", "writer killed"),
    *("worker killed while its part is written", "coordinator killed in a commit"),
    "coordinator killed in a recovery",
)
"""Kinds of which a test run has one each: those that nobody waits for to fall silent."""


def by_place(actions: Sequence[Action], chance: random.Random) -> list[Action]:
    """Of each kind at each stage, one."""
    places: dict[tuple[int, Kind], list[Action]] = {}
    for action in actions:
        places.setdefault((action.stage, action.kind), []).append(action)
    return [chance.choice(some) for some in places.values()]


def at_action(action: Action, chance: random.Random) -> Fault:
    (how,) = chance.choices(list(_MANNERS), _WEIGHTS)
    return Fault(_MANNERS[how], how, str(action))


def of_workers(actions: Sequence[Action], chance: random.Random) -> Iterator[Fault]:
    """At each stage, what is no action."""
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


def of_others() -> Iterator[Fault]:
    """What is not a worker, or ends the job, which then goes on by ``--resume``."""
    for place in _SPEAKS:
        yield Fault("coordinator killed", "kill coordinator", place)
    for place in COMMITS:
        yield Fault("coordinator killed in a commit", "kill coordinator", place)
    for place in (*RECOVERS, BEGINS):
        yield Fault("coordinator killed in a recovery", "kill coordinator", place)
    yield Fault("coordinator stopped", "stop coordinator", "sent Advance")
    for how, when in _AGENT:
        yield Fault(f"fork server: {how}", f"{how} agent", when)
    yield Fault("all but the launcher killed", "kill all")
    yield Fault("worker killed while an interrupted job is saved", "kill to save", "saving@1")


def some(faults: Sequence[Fault], chance: random.Random) -> list[Fault]:
    kinds = {fault.kind: fault for fault in chance.sample(faults, len(faults))}
    return chance.sample([kinds[kind] for kind in _OFTEN], len(_OFTEN))


@pytest.fixture
def disk(jobs: Jobs) -> Iterator[Path | None]:
    """A small one, where there can be one."""
    folder = jobs.folder / "disk"
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=4m", "pipeworker-test", str(folder)]
    if subprocess.run(line, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        line = ["umount", str(folder)]
        until(lambda: subprocess.run(line, capture_output=True).returncode == 0)


def drawn(actions: Sequence[Action], chance: random.Random) -> list[Fault]:
    """Those of workers first: what else there is outlives many of them."""
    workers, others = [*of_workers(actions, chance)], [*of_others()]
    if not FAULTS:
        return some([Fault(KILLED, "kill", str(chance.choice(actions))), *workers, *others], chance)
    workers += [at_action(action, chance) for action in by_place(actions, chance)]
    more = range(len(workers) + len(others), FAULTS)
    workers += [at_action(chance.choice(actions), chance) for _ in more]
    return [fault for part in (workers, others) for fault in chance.sample(part, len(part))]


@pytest.mark.timeout(10 * FAULTS + 120)
def test_among_faults_as_without_them(jobs: Jobs, server: Server | None, disk: Path | None) -> None:
    chance = random.Random(SEED)
    siege = Siege(Besieged(jobs, SOURCE, (*WORDS, *BITS)), chance, disk, PAUSE)
    siege.start()
    for fault in drawn(siege.actions, chance):
        siege.do(fault)
    if server is None:  # else it knows no orders of the tests
        siege.go_over("--schedule", WITH_HALVES, "--recompute", "never")
        for action in by_place(siege.actions, chance):
            if action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                siege.do(at_action(action, chance))
    run = siege.finish()
    steps = run.summary["steps"]
    print(f"\nseed {SEED}: {sum(siege.fired.values())} faults in {steps} steps")
    siege.report()
    siege.check_flat()
    assert [row["step"] for row in run.metrics] == [*range(1, steps + 1)]
    assert not list((run.path / "checkpoints").glob(".*"))
    words = ("--stages", "1", *BITS, "--steps", str(steps))
    assert_same(run, jobs.train(*words, source=SOURCE, timeout=60 + FAULTS))
