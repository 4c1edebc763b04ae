"""Strangers: connections to the ports of workers that no peer has made."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

_SEQUENCE = struct.Struct("<Q")
_NUMBERS = 16


def listening(pid: int | str = "self") -> set[int]:
    """The TCP ports at which a process listens (Linux)."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it may have been closed
            sockets.add(str(entry.readlink()))
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == "0A" and f"socket:[{row[9]}]" in sockets
    }


class Strangers:
    """Whoever guesses the number by which gloo knows a pair has a stage's place.

    Args:
        say: what each says when it is in.
        leave: whether it then goes away.
    """

    def __init__(self, say: bytes = b"", *, leave: bool = False) -> None:
        self._say, self._leave = say, leave
        self._sockets: list[socket.socket] = []

    def strike(self, port: int) -> None:
        """Take every place at this port."""
        for number in range(_NUMBERS):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=20)
            stranger.sendall(_SEQUENCE.pack(number) + self._say)
            if self._leave:
                reset = struct.pack("ii", 1, 0)
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                stranger.close()
            else:
                self._sockets.append(stranger)

    def heard(self) -> list[bytes]:
        """What was said to those who had a place."""
        said = []
        for stranger in self._sockets:
            stranger.setblocking(False)
            try:
                said.append(stranger.recv(1 << 16))
            except (BlockingIOError, ConnectionResetError):
                continue
        return [data for data in said if data]

    def close(self) -> None:
        for stranger in self._sockets:
            stranger.close()
