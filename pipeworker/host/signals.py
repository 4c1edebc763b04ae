"""The signals that a process receives, as input that it reads between its other inputs."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable


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
