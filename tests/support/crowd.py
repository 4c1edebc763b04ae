"""Strangers who connect, say nothing, and come back when they are cut off."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

_ROUND = 0.02  # seconds between two looks at who was cut off


class Crowd:
    """So many connections to an endpoint, kept open and renewed on a thread."""

    def __init__(self, endpoint: str, count: int) -> None:
        url = urlsplit(endpoint)
        self._address = url.hostname, url.port
        self._poll = select.epoll()
        self._open: dict[int, socket.socket] = {}
        self._stop = threading.Event()
        self.cut = 0
        """How often one of them lost its connection."""
        for _ in range(count):
            self._connect()
        self._thread = threading.Thread(target=self._renew, name="crowd")
        self._thread.start()

    def _connect(self) -> None:
        made = socket.socket()
        made.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            made.connect(self._address)
        self._open[made.fileno()] = made
        self._poll.register(made, select.EPOLLRDHUP)

    def _renew(self) -> None:
        while not self._stop.wait(_ROUND):
            for descriptor, _ in self._poll.poll(0):
                self._open.pop(descriptor).close()
                self.cut += 1
                self._connect()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for made in self._open.values():
            made.close()
        self._poll.close()


@contextlib.contextmanager
def descriptors(count: int) -> Iterator[None]:
    """This process may have so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
