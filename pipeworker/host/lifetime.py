"""Processes that end together with their parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends (Linux).

    If `parent`, a pid, has ended already, this process exits.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def bound_to_parent(parent: int) -> Iterator[None]:
    """Have this process killed with its parent while it cannot watch its parent itself (Linux)."""
    die_with_parent(parent)
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def kill_group(pid: int) -> None:
    """Kill the process group of a worker: the worker and the processes it started."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(pid, signal.SIGKILL)
