"""Encrypted sockets of the control plane: a ROUTER for the coordinator, a DEALER per worker.

The ROUTER asks an authenticator (ZAP, ZeroMQ RFC 27) whether a client's key is the job's. A peer
without that key does not complete the handshake, so nothing it sends is ever read.
"""

from __future__ import annotations

import logging
import resource
import secrets
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pipeworker.timings import DEFAULT, Timings
from pipeworker.wire.codec import MAX_FRAME_BYTES
from pipeworker.wire.keys import client_keys, server_keys

MAX_PENDING = 1024
_SHARE = 4  # of all descriptors: at most this part is for pending connections
_EVENT = struct.Struct("=HI")
_ENDPOINT = "inproc://connections"

log = logging.getLogger("pipeworker.coordinator")

Address = tuple[Any, ...]


class ConnectionLimit:
    """A thread that watches the connections to a socket that is not bound yet."""

    def __init__(self, server: zmq.Socket[bytes]) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._pending: dict[int, Address] = {}  # by descriptor, the oldest first
        self._authenticated: set[int] = set()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        unlimited = descriptors == resource.RLIM_INFINITY
        self._limit = MAX_PENDING if unlimited else min(MAX_PENDING, descriptors // _SHARE)
        self._closed = 0
        # Not when accept fails: without descriptors it does many thousand times a second.
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_MONITOR_STOPPED
        server.monitor(_ENDPOINT, zmq.EVENT_ACCEPTED | ends)
        self._events = server.context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 0)  # or else libzmq would wait for this thread
        self._events.connect(_ENDPOINT)
        self._thread = threading.Thread(target=self._watch, name="connections", daemon=True)
        self._thread.start()

    def on_frame(self, frame: zmq.Frame) -> None:
        """Note that the connection a frame was read from is authenticated.

        A frame may be read before this object's thread learns that its connection was accepted.
        """
        descriptor = frame.get(zmq.SRCFD)
        if descriptor not in self._authenticated:
            with self._lock:
                self._authenticated.add(descriptor)
                self._pending.pop(descriptor, None)

    def close(self) -> None:
        """End the thread, and log how many connections were closed."""
        self._server.disable_monitor()
        self._thread.join()
        self._events.close()
        if self._closed:
            log.warning("%d unauthenticated connections were closed", self._closed)

    def _watch(self) -> None:
        while self._receive_event(0):
            with suppress(zmq.Again):
                while self._receive_event(zmq.NOBLOCK):
                    continue
                return
            with self._lock:
                for descriptor in self._excess():
                    self._close(descriptor, self._pending.pop(descriptor))

    def _receive_event(self, flags: int) -> bool:
        """Note one event of the monitor; return whether more will come."""
        event, descriptor = _EVENT.unpack(self._events.recv_multipart(flags)[0])
        with self._lock:
            self._pending.pop(descriptor, None)
            if event != zmq.EVENT_ACCEPTED:
                self._authenticated.discard(descriptor)
            elif descriptor not in self._authenticated:
                with suppress(OSError), _borrow(descriptor) as connection:  # or it has closed
                    self._pending[descriptor] = connection.getpeername()
        return bool(event != zmq.EVENT_MONITOR_STOPPED)

    def _excess(self) -> list[int]:
        """Return the descriptors above the limit: of the busiest source, the oldest first."""
        count = len(self._pending) - self._limit
        if count <= 0:
            return []
        sources: dict[Any, deque[int]] = {}
        for descriptor, address in self._pending.items():
            sources.setdefault(address[0], deque()).append(descriptor)
        return [max(sources.values(), key=len).popleft() for _ in range(count)]

    def _close(self, descriptor: int, address: Address) -> None:
        with suppress(OSError), _borrow(descriptor) as connection:
            if connection.getpeername() != address:
                return  # it has closed, and the descriptor is another connection's
            connection.shutdown(socket.SHUT_RDWR)  # libzmq notices, and closes it
            self._closed += 1
            if self._closed in (1, 1000, 1_000_000):
                log.warning("closed %d unauthenticated connections so far", self._closed)


@contextmanager
def _borrow(descriptor: int) -> Iterator[socket.socket]:
    """Use a connection of libzmq's; not a copy, as there may be no descriptor left for one.

    The family need not be right: an address is returned by its own.
    """
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    try:
        yield connection
    finally:
        connection.detach()


_RECONNECT_MS = 50
_BACKLOG = 4096  # connections that wait to be accepted, before the kernel makes them try again

SERVER_NEEDS = 16, 5
"""Descriptors, without those of connections, and threads that a coordinator's sockets take."""
WORKER_NEEDS = 20, 4
"""Descriptors and threads of a worker, with its logs and its first links."""


class Router(zmq.Socket[bytes]):
    """The coordinator's socket, with a limit on its unauthenticated connections."""

    connections: ConnectionLimit


@contextmanager
def server(token: str, host: str, timings: Timings = DEFAULT) -> Iterator[tuple[Router, str]]:
    """Bind a ROUTER to a free port of `host`; yield it and its endpoint, and close it at exit."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    job_key = client_keys(token).public  # the workers share it
    provider = SimpleNamespace(callback=lambda domain, key: key == job_key)
    authenticator.configure_curve_callback(domain="pipeworker", credentials_provider=provider)
    socket = Router(context, zmq.ROUTER)
    socket.connections = ConnectionLimit(socket)
    try:
        socket.curve_server = True
        socket.curve_secretkey = server_keys(token).secret
        socket.zap_domain = b"pipeworker"
        socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(timings.handshake))
        socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.LINGER, _ms(timings.linger))
        socket.setsockopt(zmq.SNDTIMEO, 0)
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
            host = f"[{host}]"
        port = socket.bind_to_random_port(f"tcp://{host}")
        yield socket, f"tcp://{host}:{port}"
    finally:
        socket.connections.close()
        socket.close()
        authenticator.stop()
        context.term()


def client(
    context: zmq.Context[zmq.Socket[bytes]],
    token: str,
    endpoint: str,
    timings: Timings = DEFAULT,
    *,
    identity: bytes = b"",
    events: int = 0,
    brief: bool = False,
) -> zmq.Socket[bytes]:
    """Return a DEALER that connects to the coordinator at `endpoint`; the caller closes it.

    The coordinator knows a peer by its `identity`, which is random by default. A monitor reports
    `events`, if any. With `brief`, attempts are short and follow each other at once.
    """
    socket = context.socket(zmq.DEALER)
    keys = client_keys(token)
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = server_keys(token).public
    socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(timings.redial if brief else timings.handshake))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, _ms(timings.linger))
    socket.setsockopt(zmq.IDENTITY, identity or b"w" + secrets.token_bytes(8))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _ms(timings.dial if brief else timings.reconnect))
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0 if brief else _ms(timings.reconnect))
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    if events:
        socket.get_monitor_socket(events)  # before the first event
    socket.connect(endpoint)
    return socket


def send(router: Router, peer: bytes, frame: bytes) -> None:
    """Send a frame to a peer, without send_multipart, which takes twice as long.

    Raises:
        zmq.ZMQError: the peer is gone or does not read; nothing is sent.
    """
    router.send(peer, zmq.SNDMORE)
    router.send(frame)


def receive(router: Router) -> tuple[bytes, bytes]:
    """Return the next message: its peer, and its frame, empty if it has more than one.

    Raises:
        zmq.Again: there is none.
    """
    peer = router.recv(zmq.NOBLOCK)
    frame = router.recv(copy=False)  # only a zmq.Frame tells whether more belong to the message
    router.connections.on_frame(frame)
    if frame.more:
        router.recv_multipart()
        return peer, b""
    return peer, frame.bytes


def _ms(seconds: float) -> int:
    return int(1000 * seconds)
