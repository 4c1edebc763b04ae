"""The lock of a run directory: one job at a time writes in it. Imports no torch."""

from __future__ import annotations

import errno
import fcntl
import struct
import time
from pathlib import Path

from pipeworker.record.files.atomic_file import open_file
from pipeworker.record.files.bounded_file import open_bounded

_POLL_SECONDS = 0.05
_FLOCK = "hhqqi4x"  # the C library's `struct flock`, which begins with the type
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock. The lock itself is not touched.

    A process that holds the lock must not call this: closing any file of the lock releases it.

    Raises:
        UsageError: the path is that of a pipe or a device.
    """
    query = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)  # conflicts with every lock
    try:
        with open_bounded(path) as file:
            found = fcntl.fcntl(file, fcntl.F_GETLK, query)
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, found)[0] != fcntl.F_UNLCK)


class RunLock:
    """A lock that a process holds while it writes in a run directory.

    The kernel releases it when the process ends. A process that resumes a run acquires the lock
    exclusively, and then shares it with the other processes of its job. A child that it forks does
    not hold it. A process has one lock at a time. On a file system without locks every process gets
    the lock.

    Raises:
        BlockingIOError: another process still holds the lock.
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, *, exclusive: bool, timeout: float = 0.0) -> None:
        self._file = open_file(path, "a+b")
        deadline = time.monotonic() + timeout
        while not self._acquire(fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH):
            if time.monotonic() >= deadline:
                self.release()
                raise BlockingIOError(errno.EAGAIN, "another process holds it", str(path))
            time.sleep(_POLL_SECONDS)

    def share(self) -> None:
        """Let other processes share the lock; a process that wants it alone still waits."""
        self._acquire(fcntl.LOCK_SH)

    def release(self) -> None:
        """Release the lock. Idempotent."""
        self._file.close()

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _acquire(self, kind: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True
