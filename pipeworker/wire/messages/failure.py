"""What ends a job early, and how that is said."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.wire.messages.limits import LONGEST_TEXT, MOST_STATUSES, check, check_names
from pipeworker.wire.messages.position import Position

_NOWHERE = Position()


class Cause(Enum):
    """Why a job ends early."""

    USAGE = "usage"
    """The command or the job file is wrong."""
    USER = "user"
    """The user's code raised."""
    PEER = "peer"
    """A neighbour's connection closed: an echo, never the cause while another is known."""
    SIGNAL = "signal"
    """Something outside asked a worker to end; an echo too, where a job's ranks end together."""
    LOST = "lost"
    """A process ended that should not have."""
    HUNG = "hung"
    """A process stopped answering."""
    TRANSIENT = "transient"
    """The user's code raised what the job file declares to be worth another try."""
    INTERNAL = "internal"
    """A defect in pipeworker."""
    EXIT = "exit"
    """The job file ended its process when it was run; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, whole: enough to show the user.

    Attributes:
        rank: -1 for the job itself.
        stage: how the rank is called by what it holds: ``stage 1``.
        status: the exit status that a job file chose.
    """

    cause: Cause
    message: str
    rank: int = -1
    position: Position = _NOWHERE
    layer_class: str = ""
    traceback: str = ""
    stage: str = ""
    status: int = 1

    def __post_init__(self) -> None:
        longest = max(len(self.message), len(self.traceback))
        check(longest <= LONGEST_TEXT, f"a failure of {longest} characters")
        check(0 <= self.status < MOST_STATUSES, f"an exit status of {self.status}")


@dataclass(frozen=True, slots=True)
class Failed:
    rank: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Signalled:
    """A worker was sent a signal from outside; it goes on until it hears what then."""

    rank: int
    signal: str

    def __post_init__(self) -> None:
        check_names((self.signal,), "names of signals")


@dataclass(frozen=True, slots=True)
class Abort:
    """The job is over, and not by its own end: `reason` is why."""

    reason: str
    exit_status: int
