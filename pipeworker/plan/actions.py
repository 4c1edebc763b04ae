"""Actions: the language of schedules.

An action is one thing that a worker does in a step, for one micro-batch on one of its stages. It is
written as the field writes it (torch.distributed.pipelining): stage, kind, micro-batch::

    2F0       forward of micro-batch 0 on stage 2
    2R0       the same forward again, because its graph was dropped to save memory (recompute)
    2B0       backward of micro-batch 0 on stage 2: gradients of the input and of the weights
    2I0 2W0   the same in two parts: gradient of the input, later those of the weights
    2>A0      send the activation of micro-batch 0 to stage 3; there, 3<A0 receives it
    2>G0      send the gradient of its input to stage 1; there, 1<G0 receives it
    0>T0@3    send the target of micro-batch 0 from stage 0 to stage 3; there, 3<T0@0
    0>S0@2    send the tensors of a skip connection to stage 2; there, 2<S0@0
    2>H0@0    send their gradients back to stage 0; there, 0<H0@2
    2FETCH0   begin to copy offloaded tensors of micro-batch 0 back from the host's memory
    0L0       load the next mini-batch (stage 0 only)

Activations and gradients go to a neighbouring stage. All other sends and receives name the stage at
the other end after ``@``. A step has at most one ``L``, ``TIE``, ``SCATTER``, ``SUM`` and
``GATHER`` per stage; they are written with micro-batch 0. A worker's part of a schedule is a line
of actions separated by spaces, which :func:`parse_actions` reads and :func:`format_actions` writes.

A compute order (:mod:`pipeworker.plan.orders`) consists of ``F``, ``R``, ``B``, ``I`` and ``W``;
:mod:`pipeworker.plan.connect` and :mod:`pipeworker.plan.recompute` add the rest.
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
    """The kind of an action; its value is the text form. A str, because that hashes faster."""

    FORWARD = "F"
    RECOMPUTE = "R"
    """The forward again, right before the backward."""
    FETCH = "FETCH"
    """Begin to copy the tensors that a forward's graph saved back from the host's memory."""
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """The gradient of the stage's input; the weights' follow (zero bubble, Qi et al. 2023)."""
    BACKWARD_WEIGHT = "W"
    """The gradients of the stage's weights, after BACKWARD_INPUT."""
    LOAD = "L"
    """Stage 0 reads the next mini-batch, in the gap between fill and drain."""
    REDUCE_TIED = "TIE"
    """Add up the gradients of tied weights at the end of the step."""
    SCATTER = "SCATTER"
    """Send each other replica its part of a stage's gradients."""
    SUM = "SUM"
    """Add up this replica's part in the order of the replicas, and send the sum to all others."""
    GATHER = "GATHER"
    """Receive the parts that other replicas have added up."""
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
    """The kind of values that a channel between two stages carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TARGET = "target"
    SKIP = "skip"
    SKIP_GRADIENT = "skip-gradient"
    TIED = "tied"
    SUM = "sum"
    """Between replicas: gradients, and their sums."""
    DATA = "data"
    """From the first stage of replica 0 to the others', if replica 0 reads the data for all."""

    def __str__(self) -> str:
        return self.value


REPLICAS = (Kind.SCATTER, Kind.SUM, Kind.GATHER)
"""The actions that add up a stage's gradients over its replicas, in this order."""
INPUTS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
"""The actions that compute the gradient of a stage's input."""
WEIGHTS = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
"""The actions that accumulate the gradients of a stage's weights."""
COMPUTE = frozenset({Kind.FORWARD, Kind.RECOMPUTE, *INPUTS, *WEIGHTS})
BUSY = COMPUTE | {Kind.LOAD}
_LETTERS = {
    "A": Payload.ACTIVATION,
    "G": Payload.GRADIENT,
    "T": Payload.TARGET,
    "S": Payload.SKIP,
    "H": Payload.SKIP_GRADIENT,
    "TIE": Payload.TIED,
}
SENDS = {Kind(f">{letter}"): payload for letter, payload in _LETTERS.items()}
RECEIVES = {Kind(f"<{letter}"): payload for letter, payload in _LETTERS.items()}
_NEIGHBOURS = {Payload.ACTIVATION: 1, Payload.GRADIENT: -1}
"""Payloads that go to a neighbouring stage; the actions of the others name the peer."""


class Action(NamedTuple):
    """One thing that a worker does for one micro-batch on one of its stages.

    `peer` is the stage at the other end of a target, skip connection or tie. A named tuple is made
    three times as fast as a frozen dataclass: 64 stages with 1,024 micro-batches have half a
    million actions.
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
    """A directed channel between two stages, or between the same stage of two replicas.

    `origin` and `goal` are the sending and the receiving replica; -1 for a channel that every
    replica has within it.
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
        """Read the text form: ``0>1/activation``, or ``2>2/sum@0>1`` between replicas."""
        match = _EDGE.fullmatch(text)
        if match is None:
            raise ScheduleError(f"{text!r} is not an edge: write it as 0>1/activation")
        between = (int(match[4]), int(match[5])) if match[4] is not None else ()
        return Edge(int(match[1]), int(match[2]), Payload(match[3]), *between)

    @staticmethod
    def between(stage: int, origin: int, goal: int) -> Edge:
        """Return the channel from a stage of one replica to the same stage of another."""
        return Edge(stage, stage, Payload.SUM, origin, goal)


@cache
def channel(kind: Kind, stage: int, peer: int = -1) -> Edge:
    """Return the channel that a send or receive of `stage` uses."""
    payload = SENDS.get(kind) or RECEIVES[kind]
    step = _NEIGHBOURS.get(payload)
    if kind in SENDS:
        return Edge(stage, peer if step is None else stage + step, payload)
    return Edge(peer if step is None else stage - step, stage, payload)


def edge_of(action: Action) -> Edge:
    """Return the channel that a send or receive uses."""
    return channel(action.kind, action.stage, action.peer)


def format_actions(actions: Iterable[Action]) -> str:
    """Return one worker's actions as text."""
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
    """Read one worker's actions; raise ScheduleError if a word is not an action."""
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
