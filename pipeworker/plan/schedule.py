"""A schedule as data: for each stage, the tuple of actions it runs in a step.

The tuples made here are proven by :mod:`pipeworker.plan.proof` and then executed as they stand.
A schedule is written in two moves. A *compute order* (such as :func:`gpipe`) says when each stage
runs forward, recompute and backward; :func:`connect` places the sends and receives around it.

Text form, one line a stage, which round-trips (:func:`parse` of ``str(schedule)``)::

    gpipe stages=2 microbatches=2
    0: F0 >A0 >T0 F1 >A1 >T1 L0 <G0 B0 <G1 B1
    1: <A0 <T0 F0 <A1 <T1 F1 B0 >G0 B1 >G1
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from pipeworker.errors import ScheduleError


class Kind(Enum):
    """What an action does; the value is its text form."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    LOAD = "L"
    """The first stage reads the next mini-batch, in the gap between fill and drain."""
    SEND_ACTIVATION = ">A"
    RECEIVE_ACTIVATION = "<A"
    SEND_GRADIENT = ">G"
    RECEIVE_GRADIENT = "<G"
    SEND_TARGET = ">T"
    RECEIVE_TARGET = "<T"
    SEND_SKIP = ">S"
    RECEIVE_SKIP = "<S"
    SEND_SKIP_GRADIENT = ">H"
    RECEIVE_SKIP_GRADIENT = "<H"
    SEND_TIED = ">W"
    """The gradients of tied weights, at the end of a step (counts as micro-batch 0)."""
    RECEIVE_TIED = "<W"


class Payload(Enum):
    """What a channel between two stages carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TARGET = "target"
    SKIP = "skip"
    SKIP_GRADIENT = "skip-gradient"
    TIED = "tied"


COMPUTE = frozenset({Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD})
SENDS = {
    Kind.SEND_ACTIVATION: Payload.ACTIVATION,
    Kind.SEND_GRADIENT: Payload.GRADIENT,
    Kind.SEND_TARGET: Payload.TARGET,
    Kind.SEND_SKIP: Payload.SKIP,
    Kind.SEND_SKIP_GRADIENT: Payload.SKIP_GRADIENT,
    Kind.SEND_TIED: Payload.TIED,
}
RECEIVES = {
    Kind.RECEIVE_ACTIVATION: Payload.ACTIVATION,
    Kind.RECEIVE_GRADIENT: Payload.GRADIENT,
    Kind.RECEIVE_TARGET: Payload.TARGET,
    Kind.RECEIVE_SKIP: Payload.SKIP,
    Kind.RECEIVE_SKIP_GRADIENT: Payload.SKIP_GRADIENT,
    Kind.RECEIVE_TIED: Payload.TIED,
}
WITH_PEER = frozenset(
    {
        Kind.SEND_SKIP,
        Kind.RECEIVE_SKIP,
        Kind.SEND_SKIP_GRADIENT,
        Kind.RECEIVE_SKIP_GRADIENT,
        Kind.SEND_TIED,
        Kind.RECEIVE_TIED,
    }
)
"""The kinds that name the stage at the other end."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does for one micro-batch (LOAD counts as micro-batch 0).

    `peer` is the stage at the other end of a skip connection or a tie; in text, ``>S0@3``.
    """

    kind: Kind
    microbatch: int
    peer: int = -1

    def __str__(self) -> str:
        where = f"@{self.peer}" if self.kind in WITH_PEER else ""
        return f"{self.kind.value}{self.microbatch}{where}"


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A directed channel: `payload` goes from stage `source` to stage `target`."""

    source: int
    target: int
    payload: str

    def __str__(self) -> str:
        return f"{self.source}>{self.target}/{self.payload}"

    @staticmethod
    def parse(text: str) -> Edge:
        """Read the text form."""
        ends, _, payload = text.partition("/")
        source, _, target = ends.partition(">")
        return Edge(int(source), int(target), payload)


Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every stage for one step of `microbatches` micro-batches.

    `skips` are the pairs of stages (source, target) that skip connections lead between; `ties`
    those that tell each other gradients of tied weights, each pair in both directions.
    """

    name: str
    microbatches: int
    stages: tuple[tuple[Action, ...], ...]
    skips: Pairs = ()
    ties: Pairs = ()

    def __str__(self) -> str:
        head = f"{self.name} stages={len(self.stages)} microbatches={self.microbatches}"
        for label, ends in (("skips", self.skips), ("ties", self.ties)):
            if ends:
                head += f" {label}=" + ",".join(f"{source}>{target}" for source, target in ends)
        lines = (f"{stage}: {format_actions(actions)}" for stage, actions in enumerate(self.stages))
        return "\n".join([head, *lines])


def edge_of(action: Action, stage: int, stages: int) -> Edge:
    """The channel that a send or receive of `stage` uses."""
    kind = action.kind
    payload = SENDS.get(kind) or RECEIVES[kind]
    if kind in WITH_PEER:
        ends = (stage, action.peer) if kind in SENDS else (action.peer, stage)
        return Edge(*ends, payload.value)
    step = {Payload.ACTIVATION: 1, Payload.GRADIENT: -1, Payload.TARGET: stages - 1}[payload]
    if kind in SENDS:
        return Edge(stage, stage + step, payload.value)
    return Edge(stage - step, stage, payload.value)


def edges(schedule: Schedule) -> tuple[Edge, ...]:
    """Every channel the schedule uses, sorted so that all stages connect in one order."""
    count = len(schedule.stages)
    return tuple(
        sorted(
            {
                edge_of(action, stage, count)
                for stage, actions in enumerate(schedule.stages)
                for action in actions
                if action.kind in SENDS or action.kind in RECEIVES
            }
        )
    )


def gpipe(stages: int, microbatches: int, recomputed: Iterable[int]) -> list[list[Action]]:
    """The fill-drain compute order of GPipe (Huang et al. 2019, section 2.3).

    All forwards, then all backwards, both in micro-batch order 0..M-1. A micro-batch in
    `recomputed` is forwarded again before its backward (torchgpipe, Kim et al. 2020, section 3.2).
    """
    again = frozenset(recomputed)
    order = [Action(Kind.FORWARD, m) for m in range(microbatches)]
    for m in range(microbatches):
        if m in again:
            order.append(Action(Kind.RECOMPUTE, m))
        order.append(Action(Kind.BACKWARD, m))
    return [list(order) for _ in range(stages)]


ORDERS = {"gpipe": gpipe}
RECOMPUTE_MODES = ("auto", "always", "except_first", "never")


def recomputed(mode: str, microbatches: int) -> range:
    """The micro-batches that are forwarded twice under a recompute mode.

    ``auto`` is ``always`` while no plan knows the memory.
    """
    match mode:
        case "auto" | "always":
            return range(microbatches)
        case "except_first":
            return range(1, microbatches)
        case "never":
            return range(0)
    raise ScheduleError(
        f"unknown recompute mode {mode!r}: choose from {', '.join(RECOMPUTE_MODES)}"
    )


def build(
    name: str,
    stages: int,
    microbatches: int,
    recompute: str,
    skips: Pairs = (),
    ties: Pairs = (),
) -> Schedule:
    """Make the named schedule for a number of stages and micro-batches.

    Args:
        skips, ties: see :class:`Schedule`.

    Raises:
        ScheduleError: the name or the recompute mode is unknown, or a count is not positive.
    """
    if name not in ORDERS:
        raise ScheduleError(f"unknown schedule {name!r}: choose from {', '.join(ORDERS)}")
    if stages < 1 or microbatches < 1:
        raise ScheduleError("a schedule needs at least one stage and one micro-batch")
    order = ORDERS[name](stages, microbatches, recomputed(recompute, microbatches))
    return connect(name, microbatches, order, skips, ties)


def connect(
    name: str,
    microbatches: int,
    orders: Sequence[Sequence[Action]],
    skips: Pairs = (),
    ties: Pairs = (),
) -> Schedule:
    """Place sends right after what they send and receives right before what needs them.

    Recompute comes before the wait for the gradient, so that it fills the time until it arrives
    (early recompute, torchgpipe section 3.2.3).
    """
    last = len(orders) - 1
    return Schedule(
        name,
        microbatches,
        tuple(
            tuple(_connected(order, stage, last, skips, ties)) for stage, order in enumerate(orders)
        ),
        skips,
        ties,
    )


def _connected(
    order: Sequence[Action], stage: int, last: int, skips: Pairs, ties: Pairs
) -> Iterable[Action]:
    sources = [source for source, target in skips if target == stage]
    targets = [target for source, target in skips if source == stage]
    first_backward = next(
        (i for i, a in enumerate(order) if a.kind is not Kind.FORWARD), len(order)
    )
    for index, action in enumerate(order):
        m = action.microbatch
        if stage == 0 and index == first_backward:
            yield Action(Kind.LOAD, 0)
        if action.kind is Kind.FORWARD:
            if stage > 0:
                yield Action(Kind.RECEIVE_ACTIVATION, m)
            if stage == last and last > 0:
                yield Action(Kind.RECEIVE_TARGET, m)
            for peer in sources:
                yield Action(Kind.RECEIVE_SKIP, m, peer)
            yield action
            if stage < last:
                yield Action(Kind.SEND_ACTIVATION, m)
            if stage == 0 and last > 0:
                yield Action(Kind.SEND_TARGET, m)
            for peer in targets:
                yield Action(Kind.SEND_SKIP, m, peer)
        elif action.kind is Kind.BACKWARD:
            if stage < last:
                yield Action(Kind.RECEIVE_GRADIENT, m)
            for peer in targets:
                yield Action(Kind.RECEIVE_SKIP_GRADIENT, m, peer)
            yield action
            if stage > 0:
                yield Action(Kind.SEND_GRADIENT, m)
            for peer in sources:
                yield Action(Kind.SEND_SKIP_GRADIENT, m, peer)
        else:
            yield action
    peers = [target for source, target in ties if source == stage]
    for peer in peers:
        yield Action(Kind.SEND_TIED, 0, peer)
    for peer in peers:
        yield Action(Kind.RECEIVE_TIED, 0, peer)


def format_actions(actions: Iterable[Action]) -> str:
    """One stage's actions as text."""
    return " ".join(map(str, actions))


_TOKEN = re.compile("(" + "|".join(re.escape(kind.value) for kind in Kind) + r")(\d+)(?:@(\d+))?")


def parse_actions(text: str) -> tuple[Action, ...]:
    """Read one stage's actions.

    Raises:
        ScheduleError: a word is not an action.
    """
    actions = []
    for word in text.split():
        match = _TOKEN.fullmatch(word)
        if match is None or (match[3] is not None) is not (Kind(match[1]) in WITH_PEER):
            raise ScheduleError(
                f"{word!r} is not an action: write a kind and a micro-batch, as F0, and for a skip "
                "connection the other stage, as >S0@2"
            )
        actions.append(Action(Kind(match[1]), int(match[2]), int(match[3] or -1)))
    return tuple(actions)


_PAIRS = r"\d+>\d+(?:,\d+>\d+)*"
_HEAD = re.compile(
    rf"(\S+) stages=(\d+) microbatches=(\d+)(?: skips=({_PAIRS}))?(?: ties=({_PAIRS}))?"
)


def _pairs(text: str | None) -> Pairs:
    ends = [pair.split(">") for pair in text.split(",")] if text else []
    return tuple((int(source), int(target)) for source, target in ends)


def parse(text: str) -> Schedule:
    """Read the text form of a schedule.

    Raises:
        ScheduleError: the head or a stage line is malformed.
    """
    head, _, body = text.strip().partition("\n")
    match = _HEAD.fullmatch(head.strip())
    if match is None:
        raise ScheduleError(f"{head!r} is not a schedule's head: NAME stages=K microbatches=M")
    stages = []
    for stage, line in enumerate(line for line in body.splitlines() if line.strip()):
        label, _, actions = line.partition(":")
        if label.strip() != str(stage):
            raise ScheduleError(f"expected the line of stage {stage}, found {line!r}")
        stages.append(parse_actions(actions))
    if len(stages) != int(match[2]):
        raise ScheduleError(f"the head says {match[2]} stages, but {len(stages)} lines follow")
    return Schedule(match[1], int(match[3]), tuple(stages), _pairs(match[4]), _pairs(match[5]))
