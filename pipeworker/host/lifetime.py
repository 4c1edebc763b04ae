"""The start of processes, and their end together with their parent."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pipeworker

_PR_SET_PDEATHSIG = 1
_ROOT = str(Path(pipeworker.__file__).parents[1])
# A user's module in the current folder must not be imported in place of one of pipeworker's or of
# Python's, so the folder that `-c` puts first on the path is removed before any import, and
# pipeworker's own is appended. `sys` is built in; PYTHONSAFEPATH leaves that folder out.
# An interrupt before a handler is installed ends the process without a traceback.
_BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); root, name = sys.argv[1:3]; "
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "root in sys.path or sys.path.append(root); "
    "import importlib; sys.exit(importlib.import_module(name).main())"
)


def command(module: str, python: str = "", *words: str) -> list[str]:
    """Return the command that runs ``main()`` of a module of pipeworker.

    The `words` follow the module's name in ``sys.argv``; the default `python` is this interpreter.
    """
    return [python or sys.executable, "-c", _BOOT, _ROOT, module, *words]


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends, none with 0 (Linux).

    If `parent`, a pid, has ended already, this process exits.
    """
    if sys.platform == "linux":
        signal_with_parent(number)
        if os.getppid() != parent:
            os._exit(1)


def signal_with_parent(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, none with 0 (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def has_ended(descriptor: int) -> bool:
    """Return whether the other end of a pipe is closed, although there may be more to read."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(found & select.POLLHUP for _, found in poll.poll(0))


def is_parent_stopped() -> bool:
    """Return whether this process's parent is stopped, as a launcher is by Ctrl-Z (Linux)."""
    return is_stopped(os.getppid())


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (Linux)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def kill_group(pid: int) -> None:
    """Kill the process group of a worker: the worker and the processes it started."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(pid, signal.SIGKILL)
