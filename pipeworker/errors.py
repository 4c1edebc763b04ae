"""The errors a user of pipeworker can meet.

Two families, kept apart: :class:`UsageError` is a mistake in what the user wrote (the command,
the job file, a schedule) and ends with exit status 2; every other :class:`PipeworkerError` is a run
that failed and ends with exit status 1.
"""

from __future__ import annotations


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
