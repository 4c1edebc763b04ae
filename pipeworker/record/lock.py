"""Whose a run directory is: one job's at a time."""

from __future__ import annotations

import errno
import fcntl
import struct
import sys
import time
from pathlib import Path

_POLL_SECONDS = 0.05
# The C library's `struct flock`, here and on BSD and macOS: where the type is among its fields.
_FLOCK, _TYPE = ("hhqqi4x", 0) if sys.platform == "linux" else ("qqihh", 3)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def held(path: Path) -> bool:
    """Whether another process holds it. To ask takes it from nobody, and keeps nobody out.

    It is not for a process that has it: what closes any file of it lets it go.
    """
    asked: list[int] = [0] * 5
    asked[_TYPE] = fcntl.F_WRLCK  # which would be refused whatever another one holds
    try:
        with path.open("rb") as file:
            found = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *asked))
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, found)[_TYPE] != fcntl.F_UNLCK)


class Lock:
    """Held by a process for as long as it writes in a run directory; the kernel ends it with it.

    Who would begin there is alone, and shares it then with the other processes of its job. It is
    the process's own: a child that it forks does not have it, and cannot outlive it. A process has
    one at a time. A file system without locks keeps nobody out.

    Args:
        alone: that no other process may hold one.
        seconds: what who holds one is given to end.

    Raises:
        BlockingIOError: another process holds one.
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path, *, alone: bool, seconds: float = 0.0) -> None:
        self._file = path.open("a+b")
        until = time.monotonic() + seconds
        while not self._take(fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
            if time.monotonic() >= until:
                self.close()
                raise BlockingIOError(errno.EAGAIN, "another process holds it", str(path))
            time.sleep(_POLL_SECONDS)

    @property
    def held(self) -> bool:
        """Until it is closed."""
        return not self._file.closed

    def share(self) -> None:
        """Be alone no longer; who waits to be alone still waits."""
        self._take(fcntl.LOCK_SH)

    def close(self) -> None:
        """Hold it no longer. Idempotent."""
        self._file.close()

    def _take(self, how: int) -> bool:
        try:
            fcntl.lockf(self._file, how | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True
