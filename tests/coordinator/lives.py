"""Jobs as hypothesis makes them up: what they are to do, and what happens to them meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hypothesis import strategies as st

from pipeworker.coordinator.events import (
    Arrived,
    Broken,
    Committed,
    Event,
    StarterGone,
    Unreachable,
    Unwell,
)
from pipeworker.wire.lines import HostLost, Interrupt, SaveAsked, WorkerExited
from pipeworker.wire.messages.calls import Call, CallKind, Loaded
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.directions import FromWorker
from pipeworker.wire.messages.evaluation import Evaluation, EvaluationDone
from pipeworker.wire.messages.failure import Cause, Failed, Failure, Signalled
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.presence import Heartbeat, Hello
from pipeworker.wire.messages.step import Batch, StepDone, Upcoming
from support.coordinator import BATCH, identity

LAYERS = tuple(f"Layer{number}" for number in range(8))
NUMBER = 2
"""The first generation; there was one before it."""


@dataclass(frozen=True)
class Life:
    """A job and what its workers would do if nothing went wrong.

    Attributes:
        calls: of the user's own loop; none of a job file.
        slow: whether a copy is not yet whole when the step beside it is done, in turn.
        overflows: steps with a gradient that is not finite.
        crowded: rank and step where there is no memory to spare for a snapshot.
    """

    workers: int
    options: dict[str, Any]
    data: tuple[Batch, ...]
    calls: tuple[Call, ...]
    slow: tuple[bool, ...] = (False,)
    overflows: frozenset[int] = frozenset()
    crowded: frozenset[tuple[int, int]] = frozenset()
    replaceable: bool = False

    @property
    def accumulate(self) -> int:
        found: int = self.options.get("accumulate", 1)
        return found

    @property
    def rows(self) -> list[int]:
        """The steps that are recorded, of a job that comes to its end."""
        if self.calls:
            return self._played[0]
        there, limit = len(self.cut), self.options["steps"]
        return [*range(1, 1 + (there if limit is None else min(limit, there)))]

    @property
    def cut(self) -> list[list[Batch]]:
        """The mini-batches of each step of a job file, had it as many as there are."""
        found: list[list[Batch]] = []
        for batch in self.data:
            last = found[-1] if found else []
            other = self.options["epochs"] and last and last[-1].epoch != batch.epoch
            if 0 < len(last) < self.accumulate and not other:
                last.append(batch)
            else:
                found.append([batch])
        return found

    @property
    def steps(self) -> int:
        """That it comes to."""
        return self._played[1] if self.calls else len(self.rows)

    @property
    def _played(self) -> tuple[list[int], int]:
        steps, rows = 0, []
        for call in self.calls:
            if call.loaded:
                steps = call.loaded.step
            elif call.kind is CallKind.STEP and call.last:
                steps += 1
                rows.append(steps)
        return rows, steps

    @property
    def evaluations(self) -> list[int]:
        """The steps that are evaluated, of a job file."""
        every: int | str | None = self.options["evaluate_every"]
        if every == "epoch":
            epochs = [*(cut[0].epoch for cut in self.cut), -1]
            return [step for step in self.rows if epochs[step] != epochs[step - 1]]
        return [step for step in self.rows if isinstance(every, int) and step % every == 0]


# Lives.

PLAIN = tuple(kind for kind in CallKind if kind is not CallKind.LOAD)
"""Calls that bear no checkpoint."""
BATCHES = st.builds(
    Batch,
    signature=st.just(1),
    samples=st.integers(1, 9),
    microbatches=st.sampled_from([4, 4, 2, 1]),
    epoch=st.integers(0, 1),
)


@st.composite
def calls(draw: st.DrawFn, kinds: Sequence[CallKind] = tuple(CallKind)) -> list[Call]:
    """What one line of the user's own loop comes to."""
    match draw(st.sampled_from([CallKind.STEP, CallKind.STEP, *kinds])):
        case CallKind.EVALUATE | CallKind.SAVE as kind:
            return [Call(0, kind)]
        case CallKind.PREDICT:
            return [Call(0, CallKind.PREDICT, everywhere=draw(st.booleans()))]
        case CallKind.LOAD:
            return [Call(0, CallKind.LOAD, loaded=Loaded(draw(st.integers(0, 4))))]
    batches = draw(st.lists(BATCHES, min_size=1, max_size=2))
    return [
        Call(0, CallKind.STEP, batch, last=number == len(batches))
        for number, batch in enumerate(batches, 1)
    ]


@st.composite
def loops(draw: st.DrawFn, kinds: Sequence[CallKind] = tuple(CallKind)) -> Life:
    """Of a loop of the user's own."""
    workers, options = draw(st.integers(1, 4)), draw(_options())
    lines = draw(st.lists(calls(kinds), max_size=5))
    made = [call for line in lines for call in line]
    options |= {"own_loop": True, "steps": None}
    return Life(workers, options, (), (*made, Call(0, CallKind.CLOSE)))


@st.composite
def files(
    draw: st.DrawFn, accumulate: int = 3, *, replaceable: bool = False, least: int = 0
) -> Life:
    """Of a job file, with at least so many mini-batches."""
    steps = draw(st.none() | st.integers(max(1, least), 6))
    options = draw(_options()) | {
        "steps": steps,
        "epochs": None if steps else draw(st.sampled_from([None, 2])),
        "accumulate": draw(st.integers(1, accumulate)),
        "evaluate_every": draw(st.sampled_from([None, 1, 2, 3, "epoch"])),
        "checkpoint_every": draw(st.sampled_from([None, "1", "2"])),
        "checkpoint_busy": draw(st.sampled_from(["skip", "wait"])),
    }
    if replaceable:
        options |= {
            "snapshot_every": draw(st.sampled_from([None, 1, 2, 3])),
            "restarts": draw(st.integers(1, 4)),
            "elastic": draw(st.sampled_from([None, None, 1])),
        }
    return Life(
        draw(st.sampled_from([2, 1, 3, 4])),
        options,
        tuple(draw(st.lists(BATCHES, min_size=least, max_size=8))),
        (),
        tuple(draw(st.lists(st.booleans(), min_size=1, max_size=4))),
        draw(st.frozensets(st.integers(1, 6), max_size=2)),
        draw(st.frozensets(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=3)),
        replaceable,
    )


def lives(*, replaceable: bool = False) -> st.SearchStrategy[Life]:
    """Of any job."""
    return files(replaceable=replaceable) | loops()


def _options() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(["gpipe", "looped"]),
            "precision": st.sampled_from(["fp32", "fp16"]),
            "recompute": st.sampled_from(["auto", "never"]),
        }
    )


# What may happen to them.


@dataclass(frozen=True)
class Deliver:
    choices: list[int]


@dataclass(frozen=True)
class Beat:
    seconds: float


@dataclass(frozen=True)
class Silence:
    seconds: float


@dataclass(frozen=True)
class Again:
    """Something that was said is said once more."""

    choice: int


@dataclass(frozen=True)
class Foreign:
    """Something that was said, or an exit, in a frame of a generation so much younger or older."""

    choice: int
    younger: int


@dataclass(frozen=True)
class Stolen:
    """What a worker is about to say, said by another peer: a stranger, or the worker of a rank."""

    choice: int
    rank: int


@dataclass(frozen=True)
class Rush:
    """Every rank calls before it is its turn."""

    kind: CallKind


@dataclass(frozen=True)
class Full:
    """A disk is full for so many attempts: that of the worker of a rank, or the coordinator's."""

    rank: int
    times: int


class How(Enum):
    """A worker is lost."""

    KILLED = "killed"
    RAISED = "raised what is worth another try"
    HUNG = "hung"
    CUT_OFF = "cut off"
    SIGNALLED = "signalled"


@dataclass(frozen=True)
class Lose:
    """The worker of a rank is lost, while it computes a layer or something else (-1)."""

    rank: int
    how: How
    layer: int


Happening = Deliver | Beat | Silence | Again | Foreign | Stolen | Rush | Full | Lose | Event
RANKS = st.integers(-1, 4)
STEPS = st.integers(0, 4)
FAILURES = st.builds(Failure, st.sampled_from(Cause), st.just("m"))
MESSAGES: st.SearchStrategy[FromWorker] = st.one_of(
    st.builds(Described, RANKS, st.sampled_from([LAYERS, LAYERS[:4]]), st.just(())),
    st.builds(Upcoming, RANKS, st.sampled_from([1, 2, 4])),
    st.builds(
        lambda rank, step, batch: StepDone(rank, step, (1.0,), (), (1.0,), 0.1, 0.1, 1, batch),
        RANKS,
        STEPS,
        st.sampled_from([None, BATCH]),
    ),
    st.builds(EvaluationDone, RANKS, STEPS, st.just(1), st.just(Evaluation(1, 0.5))),
    st.builds(
        Call,
        RANKS,
        st.sampled_from(PLAIN),
        st.sampled_from([None, BATCH]),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Saved, RANKS, STEPS, error=st.sampled_from(["", "no space left"])),
    st.builds(Signalled, RANKS, st.sampled_from(["SIGTERM", "SIGUSR1"])),
    st.builds(Heartbeat, RANKS, st.just(Position())),
)
HELLOS: st.SearchStrategy[FromWorker] = st.builds(Hello, RANKS, st.just("host"), st.just(1))
PLAUSIBLE: st.SearchStrategy[Happening] = st.builds(
    Deliver, st.lists(st.integers(0, 4), min_size=1, max_size=30)
)
HARMLESS: st.SearchStrategy[Happening] = st.one_of(
    st.builds(Beat, st.sampled_from([0.2, 1.0, 20.0])),
    st.builds(Foreign, st.integers(0, 99), st.sampled_from([-2, -1, 1])),
    st.builds(Arrived, st.sampled_from([b"stranger", b""]), st.just(NUMBER), MESSAGES),
    st.builds(Stolen, st.integers(0, 9), RANKS),
    st.builds(Committed, st.just(99)),
    st.builds(Unreachable, st.just(b"stranger")),
)
FAILING: st.SearchStrategy[Happening] = st.builds(Full, RANKS, st.integers(1, 3))
LOSSES: st.SearchStrategy[Lose] = st.builds(
    Lose, st.integers(0, 3), st.sampled_from(How), st.sampled_from([-1, -1, 0, 1])
)
ASKED: st.SearchStrategy[Happening] = st.just(SaveAsked())
ODD: st.SearchStrategy[Happening] = st.one_of(
    st.builds(Again, st.integers(0, 99)),
    st.builds(Rush, st.sampled_from(PLAIN)),
    st.one_of(MESSAGES, HELLOS).map(
        lambda message: Arrived(identity(max(message.rank, 0)), NUMBER, message)
    ),
    st.builds(Arrived, st.just(b"stranger"), st.just(NUMBER), HELLOS),
    st.builds(Arrived, RANKS.map(lambda rank: identity(max(rank, 0))), st.just(NUMBER), MESSAGES),
    st.builds(Silence, st.sampled_from([0.5, 3.0, 70.0])),
    st.builds(Unreachable, RANKS.map(lambda rank: identity(max(rank, 0)))),
)
FATAL: st.SearchStrategy[Happening] = st.one_of(
    st.builds(WorkerExited, RANKS, st.just(NUMBER), st.integers(-9, 2), st.just(Position())),
    st.builds(Failed, st.integers(0, 3), FAILURES).map(
        lambda failed: Arrived(identity(failed.rank), NUMBER, failed)
    ),
    st.just(Interrupt()),
    st.builds(StarterGone, RANKS),
    st.builds(HostLost, st.lists(RANKS, max_size=3).map(tuple), st.just("h")),
    st.sampled_from([Unwell("x"), Broken("y")]),
)


def often(
    *rare: st.SearchStrategy[Happening], size: int = 30
) -> st.SearchStrategy[list[Happening]]:
    return st.lists(st.one_of(PLAUSIBLE, PLAUSIBLE, PLAUSIBLE, *rare), max_size=size)
