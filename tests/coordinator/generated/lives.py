"""Hypothesis strategies for jobs and for the events that happen to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hypothesis import strategies as st

from pipeworker.coordinator.events import (
    CheckpointEnded,
    Disconnected,
    EffectFailed,
    Event,
    MessageReceived,
    ParentLost,
    ParentReads,
)
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Position
from pipeworker.facts.step import Batch, Evaluation
from pipeworker.wire.lines import HostLost, Interrupt, SaveRequest, WorkerExited
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.directions import FromWorker
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.presence import Failed, Heartbeat, Hello, Signalled
from pipeworker.wire.messages.step import Call, CallKind, EvaluationDone, Loaded, StepDone, Upcoming
from support.pure.coordinator import BATCH, peer_of

LAYERS = tuple(f"Layer{number}" for number in range(8))
NUMBER = 2
"""The number of the first generation; there was one before it."""


@dataclass(frozen=True)
class Life:
    """A job, and what its workers do without faults.

    Attributes:
        data: the mini-batches of a job file.
        calls: the calls of an own loop; none for a job file.
        slow: whether a copy is unfinished when the step beside it is done, in turn.
        overflows: steps with a gradient that is not finite.
        crowded: ranks and steps without memory for a snapshot.
        losses: those of evaluation passes, in turn.
    """

    workers: int
    options: dict[str, Any]
    data: tuple[Batch, ...]
    calls: tuple[Call, ...]
    slow: tuple[bool, ...] = (False,)
    overflows: frozenset[int] = frozenset()
    crowded: frozenset[tuple[int, int]] = frozenset()
    replaceable: bool = False
    losses: tuple[float, ...] = (0.5,)

    @property
    def accumulate(self) -> int:
        found: int = self.options.get("accumulate", 1)
        return found

    @property
    def rows(self) -> list[int]:
        """The steps that a job which is done has recorded."""
        if self.calls:
            return self._played[0]
        last = self.evaluations[-1] if self._is_impatient(self.evaluations) else self._limit
        return [*range(1, 1 + last)]

    @property
    def _limit(self) -> int:
        """The last step of a job file with endless patience."""
        there, limit = len(self.cut), self.options["steps"]
        return there if limit is None else min(limit, there)

    @property
    def cut(self) -> list[list[Batch]]:
        """The mini-batches of each step of a job file without a limit of steps."""
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
        """The last step of a job that is done."""
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
        """The steps of a job file that are evaluated."""
        every: int | str | None = self.options["evaluate_every"]
        epochs = [*(cut[0].epoch for cut in self.cut), -1]
        found = [0] if self.options["evaluate_first"] else []
        for step in range(1, 1 + self._limit):
            ends = epochs[step] != epochs[step - 1] if every == "epoch" else False
            if (ends or (isinstance(every, int) and step % every == 0)) and not (
                self._is_impatient(found)
            ):
                found.append(step)
        return found

    def _is_impatient(self, evaluations: list[int]) -> bool:
        """Return whether too many evaluations have not been better."""
        losses = [*map(self.loss, evaluations)]
        since = len(losses) - 1 - losses.index(min(losses)) if losses else 0
        return self.options["patience"] is not None and since >= self.options["patience"]

    def loss(self, step: int) -> float:
        """Return the loss of the evaluation after a step."""
        return self.losses[step % len(self.losses)]


# Jobs.

PLAIN = tuple(kind for kind in CallKind if kind is not CallKind.LOAD)
"""CallRound that bear no checkpoint."""
BATCHES = st.builds(
    Batch,
    signature=st.just(1),
    samples=st.integers(1, 9),
    microbatches=st.sampled_from([4, 4, 2, 1]),
    epoch=st.integers(0, 1),
)


@st.composite
def calls(draw: st.DrawFn, kinds: Sequence[CallKind] = tuple(CallKind)) -> list[Call]:
    """Return the calls that one line of the user's loop makes."""
    match draw(st.sampled_from([CallKind.STEP, CallKind.STEP, *kinds])):
        case CallKind.EVALUATE | CallKind.END_EPOCH | CallKind.SAVE as kind:
            return [Call(0, kind)]
        case CallKind.PREDICT:
            return [Call(0, CallKind.PREDICT, everywhere=draw(st.booleans()))]
        case CallKind.LOAD:
            return [Call(0, CallKind.LOAD, loaded=Loaded(draw(st.integers(0, 4)), epoch=1))]
    batches = draw(st.lists(BATCHES, min_size=1, max_size=2))
    return [
        Call(0, CallKind.STEP, batch, last=number == len(batches))
        for number, batch in enumerate(batches, 1)
    ]


@st.composite
def loops(draw: st.DrawFn, kinds: Sequence[CallKind] = tuple(CallKind)) -> Life:
    """Return a job with a loop of the user's own."""
    workers, options = draw(st.integers(1, 4)), draw(_options())
    lines = draw(st.lists(calls(kinds), max_size=5))
    made = [call for line in lines for call in line]
    options |= {"own_loop": True, "steps": None}
    return Life(workers, options, (), (*made, Call(0, CallKind.CLOSE)))


@st.composite
def files(
    draw: st.DrawFn, accumulate: int = 3, *, replaceable: bool = False, least: int = 0
) -> Life:
    """Return a job file's job with at least `least` mini-batches."""
    steps = draw(st.none() | st.integers(max(1, least), 6))
    options = draw(_options()) | {
        "steps": steps,
        "epochs": None if steps else draw(st.sampled_from([None, 2])),
        "accumulate": draw(st.integers(1, accumulate)),
        "evaluate_every": draw(st.sampled_from([None, 1, 2, 3, "epoch"])),
        "evaluate_first": draw(st.booleans()),
        "checkpoint_every": draw(st.sampled_from(["end", "1", "2"])),
        "checkpoint_busy": draw(st.sampled_from(["skip", "wait"])),
    }
    patience = st.sampled_from([None, 1, 2] if options["evaluate_every"] else [None])
    options["patience"] = draw(patience)
    if replaceable:
        options |= {
            "snapshot_every": draw(st.sampled_from([None, 1, 2, 3])),
            "max_restarts": draw(st.integers(1, 4)),
            "min_stages": draw(st.sampled_from([None, None, 1])),
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
        tuple(draw(st.lists(st.sampled_from([0.25, 0.5, 0.75]), min_size=1, max_size=5))),
    )


def lives(*, replaceable: bool = False) -> st.SearchStrategy[Life]:
    """Return jobs of both kinds."""
    return files(replaceable=replaceable) | loops()


def _options() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "schedule": st.sampled_from(["gpipe", "looped"]),
            "precision": st.sampled_from(["fp32", "fp16"]),
            "recompute": st.sampled_from(["auto", "never"]),
        }
    )


# Events.


@dataclass(frozen=True)
class Deliver:
    """Messages, parts and commits that are due are processed in this order."""

    choices: list[int]


@dataclass(frozen=True)
class Beat:
    """Time passes, and the workers send heartbeats."""

    seconds: float


@dataclass(frozen=True)
class Silence:
    """Time passes without heartbeats."""

    seconds: float


@dataclass(frozen=True)
class Repeat:
    """A message that was sent arrives once more."""

    choice: int


@dataclass(frozen=True)
class Foreign:
    """An earlier message, or an exit, with the number of a younger or older generation."""

    choice: int
    younger: int


@dataclass(frozen=True)
class Stolen:
    """The next message of a worker, sent by an unknown peer or another rank's worker."""

    choice: int
    rank: int


@dataclass(frozen=True)
class Rush:
    """Every rank makes a call out of turn."""

    kind: CallKind


@dataclass(frozen=True)
class Full:
    """The disk of a rank's worker, or of the coordinator (-1), is full for some attempts."""

    rank: int
    times: int


class How(Enum):
    """The way in which a worker is lost."""

    KILLED = "killed"
    RAISED = "raised a transient error"
    HUNG = "hung"
    CUT_OFF = "cut off"
    SIGNALLED = "signalled"


@dataclass(frozen=True)
class Lose:
    """The worker of a rank is lost while it computes a layer, or outside of layers (-1)."""

    rank: int
    how: How
    layer: int


Happening = Deliver | Beat | Silence | Repeat | Foreign | Stolen | Rush | Full | Lose | Event
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
    st.builds(MessageReceived, st.sampled_from([b"unknown", b""]), st.just(NUMBER), MESSAGES),
    st.builds(Stolen, st.integers(0, 9), RANKS),
    st.builds(CheckpointEnded, st.just(99)),
    st.builds(ParentReads, st.booleans()),
    st.builds(Disconnected, st.just(b"unknown")),
)
FAILING: st.SearchStrategy[Happening] = st.builds(Full, RANKS, st.integers(1, 3))
LOSSES: st.SearchStrategy[Lose] = st.builds(
    Lose, st.integers(0, 3), st.sampled_from(How), st.sampled_from([-1, -1, 0, 1])
)
ASKED: st.SearchStrategy[Happening] = st.just(SaveRequest())
ODD: st.SearchStrategy[Happening] = st.one_of(
    st.builds(Repeat, st.integers(0, 99)),
    st.builds(Rush, st.sampled_from(PLAIN)),
    st.one_of(MESSAGES, HELLOS).map(
        lambda message: MessageReceived(peer_of(max(message.rank, 0)), NUMBER, message)
    ),
    st.builds(MessageReceived, st.just(b"unknown"), st.just(NUMBER), HELLOS),
    st.builds(
        MessageReceived, RANKS.map(lambda rank: peer_of(max(rank, 0))), st.just(NUMBER), MESSAGES
    ),
    st.builds(Silence, st.sampled_from([0.5, 3.0, 70.0])),
    st.builds(Disconnected, RANKS.map(lambda rank: peer_of(max(rank, 0)))),
)
FATAL: st.SearchStrategy[Happening] = st.one_of(
    st.builds(WorkerExited, RANKS, st.just(NUMBER), st.integers(-9, 2), st.just(Position())),
    st.builds(Failed, st.integers(0, 3), FAILURES).map(
        lambda failed: MessageReceived(peer_of(failed.rank), NUMBER, failed)
    ),
    st.just(Interrupt()),
    st.builds(ParentLost, RANKS),
    st.builds(HostLost, st.lists(RANKS, max_size=3).map(tuple), st.just("h")),
    st.sampled_from([ParentLost(text="x"), EffectFailed("y")]),
)


def often(
    *rare: st.SearchStrategy[Happening], size: int = 30
) -> st.SearchStrategy[list[Happening]]:
    return st.lists(st.one_of(PLAUSIBLE, PLAUSIBLE, PLAUSIBLE, *rare), max_size=size)
