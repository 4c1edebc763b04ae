"""The language of schedules: what a worker does for a micro-batch on one of its stages.

An action reads as the field writes it, the stage first: ``2F0`` is the forward of micro-batch 0 on
stage 2, ``2>A0`` sends what it gave to stage 3, ``0>T0@3`` sends a target from stage 0 to stage 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

from pipeworker.errors import ScheduleError


class Kind(str, Enum):
    """What an action does; the value is its text form. (A str, so that it hashes quickly.)"""

    FORWARD = "F"
    RECOMPUTE = "R"
    FETCH = "FETCH"
    """What the graph of a forward saved begins to come back from the host's memory."""
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """The gradient of the stage's input alone; the weights' follows (Qi et al. 2023)."""
    BACKWARD_WEIGHT = "W"
    LOAD = "L"
    """Stage 0 reads the next mini-batch, in the gap between fill and drain."""
    REDUCE_TIED = "TIE"
    """Add up the gradients of tied weights, at the end of a step (counts as micro-batch 0)."""
    SCATTER = "SCATTER"
    """Send each other replica its part of a stage's gradients (counts as micro-batch 0)."""
    SUM = "SUM"
    """Add up one's own part in the order of the replicas, and send it to all others (likewise)."""
    GATHER = "GATHER"
    """Take the other parts, added up by other replicas (likewise)."""
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
    SEND_TIED = ">TIE"
    RECEIVE_TIED = "<TIE"

    def __str__(self) -> str:
        return self.value


class Payload(str, Enum):
    """What a channel between two stages carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TARGET = "target"
    SKIP = "skip"
    SKIP_GRADIENT = "skip-gradient"
    TIED = "tied"
    SUM = "sum"
    """From one replica to another: gradients, and what they add up to."""
    DATA = "data"
    """From the first stage of replica 0 to those of the others, where it reads for all."""

    def __str__(self) -> str:
        return self.value


REPLICAS = (Kind.SCATTER, Kind.SUM, Kind.GATHER)
"""How the gradients of a stage are added up over its replicas, in this order."""
COMPUTE = frozenset(
    {
        Kind.FORWARD,
        Kind.RECOMPUTE,
        Kind.BACKWARD,
        Kind.BACKWARD_INPUT,
        Kind.BACKWARD_WEIGHT,
    }
)
WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""What accumulates the gradients of a stage's weights."""
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
_NEIGHBOURS = {Payload.ACTIVATION: 1, Payload.GRADIENT: -1}
"""Payloads that go to the stage beside; the others' actions name the stage at the other end."""


class Action(NamedTuple):
    """One thing a worker does for one micro-batch on one of its stages.

    `peer` is the stage at the other end, where it is not the neighbour: of a target, a skip
    connection or a tie. (A named tuple, which is made three times as quickly as a frozen dataclass:
    64 stages with 1,024 micro-batches have half a million.)
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int = -1

    def __str__(self) -> str:
        where = f"@{self.peer}" if self.peer >= 0 else ""
        return f"{self.stage}{self.kind.value}{self.microbatch}{where}"


_EDGE = re.compile(
    r"(\d{1,9})>(\d{1,9})/(" + "|".join(payload.value for payload in Payload) + ")"
    r"(?:@(\d{1,9})>(\d{1,9}))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A directed channel: `payload` goes from stage `source` to stage `target`.

    Attributes:
        origin, goal: where it leads from one replica to another, these; else -1, and every replica
            has one.
    """

    source: int
    target: int
    payload: Payload
    origin: int = -1
    goal: int = -1

    def __str__(self) -> str:
        between = f"@{self.origin}>{self.goal}" if self.origin >= 0 else ""
        return f"{self.source}>{self.target}/{self.payload}{between}"

    @staticmethod
    def parse(text: str) -> Edge:
        """Read the text form.

        Raises:
            ScheduleError: it is not an edge.
        """
        match = _EDGE.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an edge: 0>1/activation is")
        between = (int(match[4]), int(match[5])) if match[4] is not None else ()
        return Edge(int(match[1]), int(match[2]), Payload(match[3]), *between)

    @staticmethod
    def between(stage: int, origin: int, goal: int) -> Edge:
        """From a stage of one replica to the same stage of another."""
        return Edge(stage, stage, Payload.SUM, origin, goal)

    def other(self, stage: int) -> int:
        """The stage at the other end."""
        return self.target if stage == self.source else self.source


@cache
def channel(kind: Kind, stage: int, peer: int = -1) -> Edge:
    """The channel that a send or receive of `stage` uses."""
    payload = SENDS.get(kind) or RECEIVES[kind]
    step = _NEIGHBOURS.get(payload)
    if kind in SENDS:
        return Edge(stage, peer if step is None else stage + step, payload)
    return Edge(peer if step is None else stage - step, stage, payload)


def edge_of(action: Action) -> Edge:
    """The channel that a send or receive uses."""
    return channel(action.kind, action.stage, action.peer)


def format_actions(actions: Iterable[Action]) -> str:
    """One worker's actions as text."""
    return " ".join(map(str, actions))


_NAMED = frozenset(
    kind for kind, payload in (SENDS | RECEIVES).items() if payload not in _NEIGHBOURS
)
"""The kinds that name the stage at the other end."""
_TOKEN = re.compile(
    r"(\d{1,9})(" + "|".join(re.escape(kind.value) for kind in Kind) + r")(\d{1,9})(?:@(\d{1,9}))?",
    re.ASCII,
)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Read one worker's actions.

    Raises:
        ScheduleError: a word is not an action.
    """
    actions = []
    for word in text.split():
        match = _TOKEN.fullmatch(word)
        if match is None or (match[4] is not None) is not (Kind(match[2]) in _NAMED):
            raise ScheduleError(
                f"{word!r} is not an action: write a stage, a kind and a micro-batch, as 0F0, and "
                "for a target, a skip connection or a tie the other stage, as 0>S0@2"
            )
        peer = -1 if match[4] is None else int(match[4])
        actions.append(Action(Kind(match[2]), int(match[1]), int(match[3]), peer))
    return tuple(actions)
