"""The signals of a worker, and of the processes beside it that run the user's code."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable
from functools import cache

from pipeworker.host.signals import OF_ALL

_forking = threading.local()


def handle_signals(numbers: Iterable[int] = OF_ALL, wakeup: int = -1) -> None:
    """Have these signals do nothing but write their numbers to the descriptor `wakeup`.

    A child that the user's code forks writes nothing, and SIGTERM ends it: pools and
    ``Process.terminate()`` send that. A program that is started inherits nothing of this.
    """
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    _follow_forks()


@cache
def _follow_forks() -> None:
    os.register_at_fork(
        before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork_in_child
    )


def _begin_fork() -> None:
    """Block signals: a child may be sent one before it has left this process's handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_ALL)


def _end_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _end_fork_in_child() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_fork()
