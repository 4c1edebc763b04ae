"""The errors of pipeworker that a user may see.

:class:`UsageError` is a mistake in the command, the job file or a schedule, with exit status 2.
Every other :class:`PipeworkerError` is a run that failed, with exit status 1.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN = 75
"""The exit status of a rank whose job may be resumed by starting the ranks again.

``EX_TEMPFAIL``: the launcher of ranks distinguishes by it failures that are worth a retry.
"""


class PipeworkerError(Exception):
    """A run that failed. The message is shown to the user as it stands."""

    exit_status = 1


class UsageError(PipeworkerError):
    """A mistake in the command or the job file. The message names it, its place and the remedy."""

    exit_status = 2


class NoTerminalError(UsageError):
    """A request for input in a worker. Unlike others, the message names only the line of code."""


class ScheduleError(UsageError):
    """A schedule that is malformed, incomplete, out of order or can deadlock."""


class SkipError(UsageError):
    """Stashes and pops of skip connections that do not match."""

    in_step = False
    """Whether it was raised in a step: then the run has failed, although its plan was right."""


class ReplicasDiffer(UsageError):
    """Weights that are not the same on all replicas."""


class InUse(UsageError):
    """A run directory that another process uses; it becomes free when that process ends."""


class RendezvousError(PipeworkerError):
    """A rendezvous that failed: a rank of the job has ended, or never joined."""

    exit_status = AGAIN


class LayerError(PipeworkerError):
    """An exception of the user's code, which is its cause."""


class PeerLost(PipeworkerError):
    """A closed connection to a peer: nearly always a secondary failure."""


class UnreadableFile(UsageError):
    """A file that cannot be read; the message has its path, the reason and what to do."""

    def __init__(self, path: object, reason: object, remedy: str = "") -> None:
        if isinstance(reason, OSError):
            path, reason = reason.filename or path, reason.strerror or reason
        super().__init__(f"{path}: cannot be read: {reason}{remedy and f'; {remedy}'}")


class ProcError(PipeworkerError):
    """A file below ``/proc`` that cannot be read."""

    def __init__(self, error: OSError) -> None:
        super().__init__(
            f"/proc: {error.filename} cannot be read ({error.strerror}); mount it: mount -t proc "
            "proc /proc"
        )


class RecordError(PipeworkerError):
    """A file of the run that cannot be written; the message has its path and the reason."""

    def __init__(self, path: object, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or error
        if getattr(error, "errno", None) == errno.ELOOP:
            reason = "it is a link; remove it"
        super().__init__(f"{path}: cannot be written: {reason}")


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Raise UnreadableFile if a file cannot be read in the context."""
    try:
        yield
    except OSError as error:
        raise UnreadableFile(path, error) from None


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Raise UsageError if a file that a command names cannot be written in the context."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{RecordError(path, error)}; choose another file") from None


class SnapshotLost(PipeworkerError):
    """A snapshot that is not in memory; the job continues from an older state."""


class ProtocolError(PipeworkerError):
    """A message between processes that is not valid in this version."""


def first_line(error: Exception) -> str:
    """Return the first line of an error's text; if it has none, the name of its class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def a_type(value: Any) -> str:
    """Return the name of a value's type with its article, for messages: ``an int``."""
    return with_article(type(value).__name__)


def with_article(name: str) -> str:
    """Return a name with its article, as it is spoken: ``an SGD``, but ``a LAMB``, a word."""
    is_word = len(name) > 3 and name.isupper() and name[1] in "AEIOU"
    vowels = "AEFHILMNORSX" if name[:2].isupper() and not is_word else "aeioAEIO"
    return f"{'an' if name[0] in vowels else 'a'} {name}"


def of_status(status: int) -> type[PipeworkerError]:
    """Return the class of the error with which another process ended with this exit status."""
    return {AGAIN: RendezvousError, UsageError.exit_status: UsageError}.get(status, PipeworkerError)
