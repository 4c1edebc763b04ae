"""Processes that end with those they belong to."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """On Linux, be sent a signal when the parent ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


@contextmanager
def dying_with(parent: int) -> Iterator[None]:
    """Meanwhile a process does not look who is there: on Linux it is killed with its parent."""
    die_with(parent)
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def kill_group(pid: int) -> None:
    """Kill a worker and what it started; its process group is named by its own pid."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing is left of it
