"""The start of processes, and their end together with their parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import pipeworker
from pipeworker.host.signals import OF_ALL
from pipeworker.host.streams import connect_to_null

_PR_SET_PDEATHSIG = 1
TRACKER_SECONDS = 2.0
"""How long a resource tracker may take to end after the processes that it serves."""
_ROOT = str(Path(pipeworker.__file__).parents[1])
# A user's module in the current folder must not be imported in place of one of pipeworker's or of
# Python's, so the folder that `-c` puts first on the path is removed before any import, and
# pipeworker's own is appended. `sys` is built in; PYTHONSAFEPATH leaves that folder out.
# An interrupt before a handler is installed ends the process without a traceback. SIGUSR1, which a
# cluster sends to all processes of a job that is to continue, ends none that starts. Where SIGCHLD
# is ignored, as below some programs, no status of a child is known.
_BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); root, name = sys.argv[1:3]; "
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
    "signal.signal(signal.SIGCHLD, signal.SIG_DFL); "
    "root in sys.path or sys.path.append(root); "
    "import importlib; sys.exit(importlib.import_module(name).main())"
)


def command(module: str, python: str = "", *words: str) -> list[str]:
    """Return the command that runs ``main()`` of a module of pipeworker.

    The `words` follow the module's name in ``sys.argv``; the default `python` is this interpreter.
    """
    return [python or sys.executable, "-c", _BOOT, _ROOT, module, *words]


def start_survivor(name: str, follow: Callable[[int], None]) -> tuple[int, int]:
    """Fork a child that outlives this process, to remove what it leaves if it is killed.

    The child calls `follow` with the read end of a pipe, which this process's end closes, and ends.

    Args:
        name: the name that ``ps`` shows for the child.
        follow: what the child does.

    Returns:
        The child's pid, 0 if the system grants no process, and the write end of the pipe.
    """
    reads, writes = os.pipe()
    pid = 0
    with suppress(OSError):
        pid = os.fork()
        if pid == 0:
            try:
                os.close(writes)
                os.setsid()
                for number in OF_ALL:
                    signal.signal(number, signal.SIG_IGN)
                connect_to_null(0, 1, 2)  # their other ends wait for all that have them
                name_process(name)
                follow(reads)
            finally:
                os._exit(0)
    os.close(reads)
    return pid, writes


def name_process(name: str) -> None:
    """Give this process, which was forked, the name that ``ps`` shows."""
    with suppress(OSError):  # /proc may be missing
        Path("/proc/self/comm").write_text(name)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, none with 0.

    If `parent`, a pid, has ended already, this process exits.
    """
    signal_with_parent(number)
    if os.getppid() != parent:
        os._exit(1)


def signal_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, none with 0."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def has_ended(descriptor: int) -> bool:
    """Return whether the other end of a pipe is closed, although there may be more to read."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(found & select.POLLHUP for _, found in poll.poll(0))


def is_parent_stopped() -> bool:
    """Return whether this process's parent is stopped, as a launcher is by Ctrl-Z."""
    return is_stopped(os.getppid())


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        # The name in the file, which any program may set, is cut off at any byte.
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except OSError:
        return False
    return state in (b"T", b"t")


def kill_group(pid: int) -> None:
    """Kill the process group of a worker: the worker and the processes it started."""
    with suppress(ProcessLookupError):
        os.killpg(pid, 0)  # raises if all of them have ended, which is usual
        if Path("/proc/self").exists():
            kill_all(lambda: processes_with(os.getpgid, {pid}))
        else:  # no process can be listed
            os.killpg(pid, signal.SIGKILL)


def kill_all(members: Callable[[], set[int]]) -> None:
    """Kill the processes that `members` returns, also those that start meanwhile.

    A resource tracker of ``multiprocessing`` ends when the other processes have, and removes the
    shared memory that they leave. So it is killed only if it does not end soon.
    """
    killed: set[int] = set()
    until = time.monotonic() + TRACKER_SECONDS
    while left := members() - killed:
        spared = set(filter(_is_tracker, left)) if time.monotonic() < until else set()
        for pid in left - spared:
            with suppress(ProcessLookupError, PermissionError):  # ended, or another user's
                os.kill(pid, signal.SIGKILL)
        killed |= left - spared
        if left == spared:
            time.sleep(0.005)


def wait_for_killed(pid: int, seconds: float) -> None:
    """Wait for the end of a killed child, at most so long: a debugger or a driver may hold it."""
    until = time.monotonic() + seconds
    while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < until:
        time.sleep(0.002)


def processes_with(number_of: Callable[[int], int], numbers: Collection[int]) -> set[int]:
    """Return the processes whose group or session, as `number_of` returns it, is of `numbers`."""
    import psutil  # here: it is rarely needed

    found = set()
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if number_of(pid) in numbers:
                found.add(pid)
    return found


def _is_tracker(pid: int) -> bool:
    """Return whether a process is a resource tracker that has not ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()  # nothing, once it has ended
    except OSError:
        return False
    return b"multiprocessing.resource_tracker" in words
