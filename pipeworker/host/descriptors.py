"""File descriptors, threads and processes: how many there may be, and a reserve for files."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from pipeworker.host import cgroups

_WANTED = 1 << 16  # as many as a process of pipeworker asks for
_RESERVE = 32  # descriptors for files
ATTEMPTS, _PAUSE = 100, 0.01


def raise_limit() -> int:
    """Raise the soft limit of descriptors, at most to the hard limit; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    granted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft == resource.RLIM_INFINITY or soft >= granted:
        return max(soft, granted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    return granted


class DescriptorReserve:
    """Descriptors for files that connections cannot take: the soft limit is below them."""

    def __init__(self) -> None:
        self._all = raise_limit()
        self._usual = max(self._all - _RESERVE, self._all // 2)
        _set_limit(self._usual)

    def run(self, write: Callable[[], None]) -> None:
        """Run `write` with the reserve; raise what it raises.

        It must change nothing if it cannot open a file, because it is then retried: connections may
        have used up the reserve meanwhile.
        """
        for left in reversed(range(ATTEMPTS)):
            _set_limit(self._all)
            try:
                write()
            except OSError as error:
                if error.errno != errno.EMFILE or not left:
                    raise
            else:
                return
            finally:
                _set_limit(self._usual)
            time.sleep(_PAUSE)  # excess connections are closed meanwhile


def check_available(descriptors: int, threads: int) -> None:
    """Raise OSError unless so many more are granted; ZeroMQ aborts a process that lacks one."""
    end = threading.Event()
    with ExitStack() as cleanup:
        try:
            for _ in range(descriptors):
                cleanup.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            for _ in range(threads):
                thread = threading.Thread(target=end.wait)
                thread.start()
                cleanup.callback(thread.join)
        except RuntimeError:  # it has no error number, and no other cause
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror) from None  # it is not about this file
        finally:
            end.set()


def check_tasks(needed: int, need: str = "the workers of this host need") -> None:
    """Raise OSError unless so many more processes and threads are free under all limits.

    `need` is the subject of the error and its verb.
    """
    free = [one for one in (cgroups.available_tasks(), _available_to_user()) if one is not None]
    if free and min(free) < needed:
        raise OSError(
            errno.EAGAIN,
            f"{os.strerror(errno.EAGAIN)}: {need} at least {needed} processes and threads, and "
            f"{min(free)} are free; raise the limit (ulimit -u, pids.max of the cgroup) or start "
            "fewer workers on this host",
        )


def _available_to_user() -> int | None:
    """Return how many more processes and threads this user may have; None for any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    own = os.getuid()
    if soft == resource.RLIM_INFINITY or own == 0:  # root has no limit
        return None
    used = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            if process.stat().st_uid == own:
                used += len(list((process / "task").iterdir()))
    return max(0, soft - used)


def _set_limit(count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
