"""What happens to a job, as frozen facts: a recorded sequence of them replays."""

from __future__ import annotations

from dataclasses import dataclass

from pipeworker.wire.lines import CannotStart, HostLost, Interrupt, SaveAsked, WorkerExited
from pipeworker.wire.messages.directions import FromWorker


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message from `peer`, a transport identity, in a frame of this generation."""

    peer: bytes
    generation: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Garbled:
    """A frame of `peer` is not a message."""

    peer: bytes
    text: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """A worker of the job says Hello in another version of the protocol, and who it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The connection of `peer` is closed. It may come back."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class Committed:
    """The checkpoint of `step`, asked for by Commit, is complete, at `path`."""

    step: int
    path: str = ""


@dataclass(frozen=True, slots=True)
class Uncommitted:
    """It cannot be completed, and why."""

    step: int
    text: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: something may be overdue.

    Attributes:
        stopped: seconds of it that the coordinator was, and others may have been with it.
    """

    stopped: float = 0.0


@dataclass(frozen=True, slots=True)
class StarterGone:
    """The coordinator's parent is gone: the worker of this rank, or a launcher (-1)."""

    starter: int


@dataclass(frozen=True, slots=True)
class Unwell:
    """Something the job cannot do without is gone."""

    text: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The shell around the job could not perform an effect (a full disk, say)."""

    text: str


Event = (
    Arrived
    | Garbled
    | Foreign
    | Unreachable
    | SaveAsked
    | Committed
    | Uncommitted
    | Ticked
    | StarterGone
    | Broken
    | WorkerExited
    | CannotStart
    | HostLost
    | Unwell
    | Interrupt
)
