"""The messages between a worker and the process that reads its data.

The worker sends a request, and waits for the reply to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeworker.facts.failure import Failure
from pipeworker.worker.data.reader import MicroBatches

Position = Mapping[str, Any]
"""A position in the data, as :mod:`pipeworker.worker.data.epoch` describes it."""
DataPlace = tuple[int, int]
"""An epoch, and the number of mini-batches read in it."""


def place_of(position: Position) -> DataPlace:
    """Return the place that a position in the data is about."""
    return position["epoch"], position["read"]


@dataclass(frozen=True, slots=True)
class Setup:
    """The job and the role of the worker; the first message to a new process. It has no reply."""

    options: str
    run_dir: str
    rank: int
    replica: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Begin:
    """Read from a position on, or from the beginning; the reply is :class:`Began`.

    Attributes:
        drawn: states of the user's own generators that the worker has.
    """

    position: Position | None
    drawn: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Length:
    """Report the length of the data to a worker of a replica; the reply is :class:`Began`.

    It is the first request to a process that has read for an earlier worker of the rank, which may
    have been of another replica, if there were more stages.
    """

    replica: int


@dataclass(frozen=True, slots=True)
class Peek:
    """Send the first mini-batch of the job, which stays the next one; the reply is an Item."""

    drawn: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Next:
    """Send the next mini-batch; the reply is :class:`Item`.

    Attributes:
        oldest: the place from which on mini-batches are kept, for later workers.
        more: whether the worker will need another mini-batch.
    """

    oldest: DataPlace
    more: bool


@dataclass(frozen=True, slots=True)
class End:
    """The job is over: no more mini-batches are needed. It has no reply."""


Request = Setup | Begin | Length | Peek | Next | End


@dataclass(frozen=True, slots=True)
class Began:
    """The process reads from the position on; `found` is whether it can.

    Attributes:
        length: number of mini-batches of the epoch, 0 if unknown.
    """

    found: bool
    length: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """A mini-batch, or None at the end of the data.

    Attributes:
        before, after: the positions in the data before and after it.
        drawn: states of the user's own generators after it.
        length: number of mini-batches of its epoch, 0 if unknown.
    """

    batches: MicroBatches | None
    before: Position
    after: Position
    drawn: Mapping[str, Any]
    length: int


@dataclass(frozen=True, slots=True)
class ReadingFailed:
    """The user's code raised."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Unfit:
    """The process cannot read this data: the worker must."""

    reason: str


Reply = Began | Item | ReadingFailed | Unfit
