"""Failures of a job, and their causes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.facts.limits import LONGEST_TEXT, MOST_STATUSES, check
from pipeworker.facts.position import Position

_NOWHERE = Position()
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    3: "SIGQUIT",
    4: "SIGILL",
    5: "SIGTRAP",
    6: "SIGABRT",
    8: "SIGFPE",
    9: "SIGKILL",
    11: "SIGSEGV",
    13: "SIGPIPE",
    14: "SIGALRM",
    15: "SIGTERM",
    24: "SIGXCPU",
    25: "SIGXFSZ",
}
"""The names of signals whose numbers are the same on all hosts; ``signal`` is not pure."""


class Cause(Enum):
    """The cause for which a job ends early."""

    USAGE = "usage"
    """The command or the job file is wrong."""
    USER = "user"
    """The user's code raised an exception."""
    PEER = "peer"
    """A peer's connection closed: a secondary failure, never the cause if another is known."""
    SIGNAL = "signal"
    """A worker received a signal to end; secondary too if all ranks of a job end together."""
    LOST = "lost"
    """A process ended unexpectedly."""
    HUNG = "hung"
    """A process stopped answering."""
    SNAPSHOT = "snapshot"
    """The snapshot that a worker was to restore is not in memory."""
    TRANSIENT = "transient"
    """The user's code raised an exception that the job file declares as `transient`."""
    DIVERGED = "diverged"
    """The replicas have different weights, none of which are worth saving."""
    INTERNAL = "internal"
    """A defect in pipeworker."""
    EXIT = "exit"
    """The job file ended its process when it was run; the message is what it printed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure, with everything that the user is shown.

    Attributes:
        rank: the worker that failed; -1 for the job itself.
        layer_class: of the layer at `position`, or "".
        traceback: the user's own frames, or "".
        stage: what messages call the rank: ``stage 1``.
        status: the exit status that a job file chose.
        lacks_place: whether a mistake's message does not name its place, `position`.
    """

    cause: Cause
    message: str
    rank: int = -1
    position: Position = _NOWHERE
    layer_class: str = ""
    traceback: str = ""
    stage: str = ""
    status: int = 1
    lacks_place: bool = False

    def __post_init__(self) -> None:
        longest = max(len(self.message), len(self.traceback))
        check(longest <= LONGEST_TEXT, f"a failure of {longest} characters")
        check(0 <= self.status < MOST_STATUSES, f"an exit status of {self.status}")


def describe_exit(code: int) -> str:
    """Return ``was killed by SIGKILL`` or ``exited with status 1``; a signal is a negative `code`.

    A signal whose number depends on the system is named by its number: ``signal 40``.
    """
    if code >= 0:
        return f"exited with status {code}"
    return f"was killed by {_SIGNALS.get(-code, f'signal {-code}')}"
