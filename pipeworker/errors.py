"""The errors a user of pipeworker can meet.

Two families, kept apart: :class:`UsageError` is a mistake in what the user wrote (the command,
the job file, a schedule) and ends with exit status 2; every other :class:`PipeworkerError` is a run
that failed and ends with exit status 1.
"""

from __future__ import annotations

AGAIN = 75
"""Exit status of a rank whose job has lost something, and may go on when it is started again.

``EX_TEMPFAIL``: who starts ranks tells by it what is worth another try from what is not.
"""


class PipeworkerError(Exception):
    """A run failed. The message is complete: it is shown to the user as it stands."""

    exit_status = 1


class UsageError(PipeworkerError):
    """The command or the job file is wrong. The message says what, where and what to do."""

    exit_status = 2


class ScheduleError(UsageError):
    """A schedule is malformed, incomplete, out of order or can deadlock."""


class SkipError(UsageError):
    """Stashes and pops of skip connections do not match."""

    in_step = False
    """Whether that shows in a step: the plan was right, and the run has failed."""


class InUse(UsageError):
    """Another process has the run directory; where that one is being ended, it will be free."""


class NotMet(PipeworkerError):
    """The ranks of a job did not find each other: one is gone, or has not come."""

    exit_status = AGAIN


class LayerError(PipeworkerError):
    """The user's code raised; the cause is the user's exception."""


class PeerLost(PipeworkerError):
    """A neighbour's connection closed: nearly always the echo of a failure elsewhere."""


class RecordError(PipeworkerError):
    """A file of the run cannot be written; the message has its path and the system's reason."""

    def __init__(self, path: object, error: Exception) -> None:
        super().__init__(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


class ProtocolError(PipeworkerError):
    """A frame on the control plane is not a message of this version."""


def of_status(status: int) -> type[PipeworkerError]:
    """What an exit status of another process says of its error."""
    return {AGAIN: NotMet, UsageError.exit_status: UsageError}.get(status, PipeworkerError)
