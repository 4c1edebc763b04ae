"""The signals that a process receives, as input that it reads between its other inputs."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that end a job."""
_DEADLY = (signal.SIGTERM, signal.SIGHUP)
"""The signals among them that end a process at once unless it handles them."""
USUAL = (*ENDS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""The signals whose handlers in programs raise exceptions, as at a time limit."""
OF_ALL = (*ENDS, signal.SIGUSR1)
"""The signals that all processes of a job or host receive: the launcher decides what they mean."""


class SignalSocket:
    """A socket from which the signals with these numbers are read, instead of their effect."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._write, self._read = socket.socketpair()
        for end in (self._write, self._read):
            end.setblocking(False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor that is readable when a signal was received."""
        return self._read.fileno()

    def read(self) -> bytes:
        """Return the numbers of the signals that were received."""
        return self._read.recv(4096)

    def close(self) -> None:
        """Restore the effect of the signals; a forked child does this too."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._write.close()
        self._read.close()


def handle_before_job() -> None:
    """Have SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, and SIGUSR1 do nothing.

    A process that starts a job calls this before anything else; the job's own handlers replace
    these. A signal that is ignored or handled already keeps its effect.
    """
    handlers = {**dict.fromkeys(_DEADLY, signal.default_int_handler), signal.SIGUSR1: _do_nothing}
    for number, handler in handlers.items():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)


def ignore_ends() -> None:
    """Ignore the signals that end a job; called as Python exits, when the job has ended.

    Python gives up other handlers then, so a signal would replace the exit status.
    """
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


def restore_ends() -> None:
    """Have SIGTERM and SIGHUP end this process at once again: its job runs elsewhere."""
    for number in _DEADLY:
        if signal.getsignal(number) is signal.default_int_handler:
            signal.signal(number, signal.SIG_DFL)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal; unlike SIG_IGN, this is not inherited by the programs that are started."""


@contextmanager
def deferred_interrupt(numbers: Iterable[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Let signals take effect at the end of the context rather than inside of it.

    A second signal of a number takes effect at once. Outside of the main thread, and where Python
    does not handle the signal, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in numbers}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if number in received:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        received.append(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


@contextmanager
def exit_at_interrupt() -> Iterator[None]:
    """Have an interrupt inside the context end this process at once, with status 130.

    A module that is imported may catch an exception, and Python before 3.12 raises RuntimeError
    where one ends the definition of a class.
    """
    numbers = _raising()
    for number in numbers:
        signal.signal(number, lambda *_: os._exit(130))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.default_int_handler)


def _raising() -> list[signal.Signals]:
    """Return the signals of a job's end that raise KeyboardInterrupt."""
    return [one for one in ENDS if signal.getsignal(one) is signal.default_int_handler]


@contextmanager
def reported_interrupt(report: Callable[[], bool]) -> Iterator[None]:
    """Call `report` at the first interrupt in the context; if it returns True, that is its effect.

    An interrupt is SIGINT, or another signal of a job's end that raises KeyboardInterrupt. A second
    one raises it. Outside of the main thread, and where the program has a handler of its own,
    nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    numbers = _raising() if is_main else []
    reported = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal reported
        if reported or not report():
            signal.default_int_handler(number, frame)
        reported = True

    for one in numbers:
        signal.signal(one, handle)
    try:
        yield
    finally:
        for one in numbers:
            signal.signal(one, signal.default_int_handler)
