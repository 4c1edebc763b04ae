"""A relay of TCP connections between two processes, which a test can interrupt."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from contextlib import suppress


class Proxy:
    """A relay of all connections to `target`; a test can make it swallow data or reset them.

    Attributes:
        lost: the number of bytes that it received and did not pass on.
        broken: the number of ends of connections that it has reset.
        accepted: the number of connections that it has accepted.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self.lost = self.broken = self.accepted = 0
        self.swallows = False
        self._stalled: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._other: dict[socket.socket, socket.socket] = {}
        self._requested = b""
        self._answered = threading.Event()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._thread.start()

    @property
    def ends(self) -> int:
        """The number of ends of relayed connections: two for each."""
        return len(self._other)

    def swallow(self) -> None:
        """Receive the data of both ends, as a working connection does, and pass nothing on."""
        self.swallows = True

    def stall(self) -> None:
        """Leave the data of all connections unread, as TCP does that waits; relay new ones."""
        self._request(b"s")

    def reset(self) -> None:
        """Reset all connections, as a router does that has lost its table; relay new ones."""
        self._request(b"r")

    def close(self) -> None:
        self._request(b"c")
        self._thread.join()

    def _request(self, word: bytes) -> None:
        self._answered.clear()
        self._wake_in.send(word)
        assert self._answered.wait(10)

    def _run(self) -> None:
        with self._listener, self._wake_in, self._wake_out, self._selector:
            while self._requested != b"c":
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake_out:
                        self._requested = self._wake_out.recv(1)
                        if self._requested == b"s":
                            self._stall_all()
                        else:
                            self._break_all()
                        self._answered.set()
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._other:
                        self._relay(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._target)
        self.accepted += 1
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._other[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _relay(self, source: socket.socket) -> None:
        try:
            data = source.recv(1 << 16)
            if self.swallows:
                self.lost += len(data)
            elif data:
                self._other[source].sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (source, self._other[source]):
                self._forget(end)

    def _forget(self, end: socket.socket) -> None:
        if self._other.pop(end, None) is not None:
            if end not in self._stalled:
                self._selector.unregister(end)
            self._stalled.discard(end)
            end.close()

    def _stall_all(self) -> None:
        for end in self._other.keys() - self._stalled:
            self._selector.unregister(end)
            self._stalled.add(end)

    def _break_all(self) -> None:
        for end in list(self._other):
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._forget(end)
            self.broken += 1
        self.swallows = False
