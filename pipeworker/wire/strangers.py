"""Connections that have not proven themselves: few, whoever knocks, and room for files beside them.

A ROUTER accepts whatever connects. Who does not complete the handshake is closed when that has
taken too long (``Timings.handshake``), but until then each costs a descriptor, and without any left
libzmq accepts nobody, in a busy loop, and no file can be opened. So the oldest are cut off when
there are too many, those first that have said nothing.

Who has proven itself is told by what it acknowledged: the server's greeting (64 bytes) is sent to
anyone, its WELCOME (170) to who knows the server's key, its READY (67) to who has the job's (ZMTP
3.1 and CURVE, ZeroMQ RFC 37 and 26). The kernel counts this on Linux; elsewhere only the time limit
holds.
"""

from __future__ import annotations

import errno
import logging
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import zmq

_MOST = 256
_SHARE = 4  # of all descriptors: at most this part is for who has not proven itself
_DESCRIPTORS = 1 << 16  # that a coordinator may want
_SPARE = 32  # descriptors for files
_TRIES, _PAUSE = 100, 0.01
_GREETING = 64
_UNPROVEN = 250  # bytes that may be acknowledged without the job's key: greeting, WELCOME, ERROR
_COUNTS = struct.Struct("=120xQQ")  # of tcp_info: bytes acknowledged, received
_EVENT = struct.Struct("=HI")
_ENDPOINT = "inproc://connections"

log = logging.getLogger("pipeworker.coordinator")


class Descriptors:
    """As many as the system grants this process; some of them no connection can take."""

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        granted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
        self._all = max(soft, granted)
        self._hard = hard
        self._limit(max(self._all - _SPARE, self._all // 2))

    def spare(self, write: Callable[[], None]) -> None:
        """Open files with descriptors that connections could not take until now.

        Args:
            write: changes nothing when it cannot open a file; it is tried again then, for
                connections may have been quicker.

        Raises:
            OSError: what `write` raised.
        """
        usual, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for left in reversed(range(_TRIES)):
            self._limit(self._all)
            try:
                write()
            except OSError as error:
                if error.errno != errno.EMFILE or not left:
                    raise
            else:
                return
            finally:
                self._limit(usual)
            time.sleep(_PAUSE)  # those above the limit are cut off meanwhile

    def _limit(self, count: int) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, self._hard))


class Strangers:
    """Watches who connects to a socket, on a thread of its own, until it is closed."""

    def __init__(self, server: zmq.Socket[bytes]) -> None:
        self._server = server
        self._unproven: dict[int, None] = {}  # descriptors, the oldest first
        self._most = min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE)
        self.cut = 0
        # Not when accept fails: without descriptors it does many thousand times a second.
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
        server.monitor(_ENDPOINT, zmq.EVENT_ACCEPTED | ends)
        self._events = server.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # or else libzmq would wait for this thread
        self._events.connect(_ENDPOINT)
        self._thread = threading.Thread(target=self._watch, name="strangers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.disable_monitor()
        self._thread.join()
        self._events.close()
        if self.cut:
            log.warning("%d connections that had not proven themselves were cut off", self.cut)

    def _watch(self) -> None:
        while self._heard(0):
            with suppress(zmq.Again):
                while self._heard(zmq.NOBLOCK):
                    continue
                return
            if len(self._unproven) > self._most:
                self._cut_off()

    def _heard(self, flags: int) -> bool:
        """Note one event; whether more will come."""
        event, descriptor = _EVENT.unpack(self._events.recv_multipart(flags)[0])
        self._unproven.pop(descriptor, None)
        if event == zmq.EVENT_ACCEPTED:
            self._unproven[descriptor] = None
        return bool(event != zmq.EVENT_MONITOR_STOPPED)

    def _cut_off(self) -> None:
        """Forget those that have proven themselves, and end the oldest others above the limit."""
        said: dict[int, bool] = {}
        for descriptor in self._unproven:
            with suppress(OSError), _borrowed(descriptor) as connection:  # or it has closed
                acknowledged, received = _counts(connection)
                if acknowledged <= _UNPROVEN:
                    said[descriptor] = received >= _GREETING
        self._unproven = dict.fromkeys(said)
        for descriptor in sorted(said, key=said.__getitem__)[: max(0, len(said) - self._most)]:
            del self._unproven[descriptor]
            with suppress(OSError), _borrowed(descriptor) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # libzmq sees its end, and closes it
                self.cut += 1
                if self.cut in (1, 1000, 1_000_000):
                    log.warning("cut off %d connections that have not proven themselves", self.cut)


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A connection of libzmq's. Not a copy: there may be no descriptor left for one."""
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _counts(connection: socket.socket) -> tuple[int, int]:
    """Bytes that the other end has acknowledged, and bytes received from it.

    Raises:
        OSError: this is no TCP connection any more, or the system does not count.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size)
    if len(info) < _COUNTS.size:
        raise OSError("no counts")
    acknowledged, received = _COUNTS.unpack(info)
    return acknowledged, received
