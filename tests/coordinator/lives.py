"""Jobs as hypothesis makes them up: what they are to do, and what happens to them meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from pipeworker.coordinator.events import (
    Arrived,
    Broken,
    Committed,
    Event,
    SaveAsked,
    StarterGone,
    Unreachable,
)
from pipeworker.wire.lines import Interrupt, Unwell, WorkerExited
from pipeworker.wire.messages import (
    Batch,
    Call,
    CallKind,
    Cause,
    Described,
    Evaluation,
    EvaluationDone,
    Failed,
    Failure,
    FromWorker,
    Heartbeat,
    Hello,
    Position,
    Saved,
    StepDone,
    Upcoming,
)
from support.coordinator import BATCH, identity

LAYERS = tuple(f"Layer{number}" for number in range(8))
NUMBER = 2
"""The generation; there was one before it."""


@dataclass(frozen=True)
class Life:
    """A job and what its workers would do if nothing went wrong."""

    workers: int
    options: dict[str, object]
    data: tuple[Batch, ...]
    calls: tuple[Call, ...]

    @property
    def steps(self) -> int:
        """That it comes to."""
        if self.calls:
            return sum(call.kind is CallKind.STEP and call.last for call in self.calls)
        accumulate, limit = self.options["accumulate"], self.options["steps"]
        assert isinstance(accumulate, int)
        assert isinstance(limit, int | None)
        there = -(-len(self.data) // accumulate)
        return there if limit is None else min(limit, there)


# Lives.

BATCHES = st.builds(
    Batch,
    signature=st.just(1),
    samples=st.integers(1, 9),
    microbatches=st.sampled_from([4, 4, 2, 1]),
    epoch=st.integers(0, 1),
)


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    """What one line of the user's own loop comes to."""
    match draw(st.sampled_from([CallKind.STEP, CallKind.STEP, *CallKind])):
        case CallKind.EVALUATE:
            return [Call(0, CallKind.EVALUATE)]
        case CallKind.PREDICT:
            return [Call(0, CallKind.PREDICT, everywhere=draw(st.booleans()))]
    batches = draw(st.lists(BATCHES, min_size=1, max_size=2))
    return [
        Call(0, CallKind.STEP, batch, last=number == len(batches))
        for number, batch in enumerate(batches, 1)
    ]


@st.composite
def lives(draw: st.DrawFn, accumulate: int = 3) -> Life:
    options: dict[str, object] = {
        "schedule": draw(st.sampled_from(["gpipe", "looped"])),
        "precision": draw(st.sampled_from(["fp32", "fp16"])),
        "recompute": draw(st.sampled_from(["auto", "never"])),
    }
    workers = draw(st.integers(1, 4))
    if draw(st.booleans()):
        lines = draw(st.lists(calls(), max_size=5))
        made = [call for line in lines for call in line]
        options |= {"own_loop": True, "steps": None}
        return Life(workers, options, (), (*made, Call(0, CallKind.CLOSE)))
    options |= {
        "steps": draw(st.none() | st.integers(1, 4)),
        "accumulate": draw(st.integers(1, accumulate)),
        "evaluate_every": draw(st.none() | st.integers(1, 2)),
    }
    return Life(workers, options, tuple(draw(st.lists(BATCHES, max_size=6))), ())


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
    """Something that was said, or an exit, in a frame of another generation."""

    choice: int
    number: int


@dataclass(frozen=True)
class Stolen:
    """What a worker is about to say, said by another peer: a stranger, or the worker of a rank."""

    choice: int
    rank: int


@dataclass(frozen=True)
class Rush:
    """Every rank calls before it is its turn."""

    kind: CallKind


Happening = Deliver | Beat | Silence | Again | Foreign | Stolen | Rush | Event
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
        st.sampled_from(CallKind),
        st.sampled_from([None, BATCH]),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Saved, RANKS, STEPS),
    st.builds(Heartbeat, RANKS, st.just(Position())),
)
HELLOS: st.SearchStrategy[FromWorker] = st.builds(Hello, RANKS, st.just("host"), st.just(1))
PLAUSIBLE: st.SearchStrategy[Happening] = st.builds(
    Deliver, st.lists(st.integers(0, 4), min_size=1, max_size=30)
)
HARMLESS: st.SearchStrategy[Happening] = st.one_of(
    st.builds(Beat, st.sampled_from([0.2, 1.0, 20.0])),
    st.builds(Foreign, st.integers(0, 99), st.sampled_from([0, 1, 3])),
    st.builds(Arrived, st.sampled_from([b"stranger", b""]), st.just(NUMBER), MESSAGES),
    st.builds(Stolen, st.integers(0, 9), RANKS),
    st.builds(Committed, st.just(99)),
    st.builds(Unreachable, st.just(b"stranger")),
)
ASKED: st.SearchStrategy[Happening] = st.just(SaveAsked())
ODD: st.SearchStrategy[Happening] = st.one_of(
    st.builds(Again, st.integers(0, 99)),
    st.builds(Rush, st.sampled_from(CallKind)),
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
    st.sampled_from([Unwell("x"), Broken("y")]),
)


def often(
    *rare: st.SearchStrategy[Happening], size: int = 30
) -> st.SearchStrategy[list[Happening]]:
    return st.lists(st.one_of(PLAUSIBLE, PLAUSIBLE, PLAUSIBLE, *rare), max_size=size)
