"""Encrypted sockets: a ROUTER for the coordinator, a DEALER for each worker.

The ROUTER asks an authenticator (ZAP, ZeroMQ RFC 27) whether a client's key is the job's; a peer
without it does not complete the handshake, so nothing it sends is ever read.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from zmq.auth.thread import ThreadAuthenticator

from pipeworker.timings import DEFAULT, Timings
from pipeworker.wire.codec import MAX_FRAME_BYTES
from pipeworker.wire.keys import client_keys, server_keys
from pipeworker.wire.strangers import Strangers

_RECONNECT_MS = 50
_BACKLOG = 4096  # connections that wait to be accepted, before the kernel makes them try again


SERVER = 16, 5
"""Descriptors, without those of connections, and threads that a coordinator's sockets take."""
WORKER = 20, 4
"""Those of a worker, with its logs and its first links."""


def check_room(descriptors: int, threads: int) -> None:
    """Find out whether the system grants these. ZeroMQ ends a process that lacks one, unasked.

    Raises:
        OSError: it does not.
    """
    held: list[int] = []
    started: list[threading.Thread] = []
    go = threading.Event()
    try:
        for _ in range(descriptors):
            held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        for _ in range(threads):
            thread = threading.Thread(target=go.wait)
            thread.start()
            started.append(thread)
    except RuntimeError:  # it has no number, and no other cause
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror) from None  # it is not about this file
    finally:
        go.set()
        for thread in started:
            thread.join()
        for descriptor in held:
            os.close(descriptor)


class _OnlyThisJob:
    """Credentials provider of the authenticator: admits the key that the job's workers share."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


@contextmanager
def server(
    token: str, host: str, timings: Timings = DEFAULT
) -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A bound ROUTER and its endpoint, on a port the system chooses at `host`.

    Everything is closed at exit. Of connections that have not proven themselves there are few
    (:mod:`pipeworker.wire.strangers`).
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(
        domain="pipeworker", credentials_provider=_OnlyThisJob(client_keys(token).public)
    )
    socket = context.socket(zmq.ROUTER)
    strangers = Strangers(socket) if sys.platform == "linux" else None
    try:
        keys = server_keys(token)
        socket.curve_server = True
        socket.curve_publickey = keys.public
        socket.curve_secretkey = keys.secret
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
        if strangers is not None:
            strangers.close()
        socket.close()
        authenticator.stop()
        context.term()


def client(
    context: zmq.Context[zmq.Socket[bytes]], token: str, endpoint: str, timings: Timings = DEFAULT
) -> zmq.Socket[bytes]:
    """A DEALER connected to the coordinator at `endpoint`; the caller closes it."""
    socket = context.socket(zmq.DEALER)
    keys = client_keys(token)
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = server_keys(token).public
    socket.setsockopt(zmq.HANDSHAKE_IVL, _ms(timings.handshake))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, _ms(timings.linger))
    # The coordinator knows a peer by its identity, which must survive a reconnection.
    socket.setsockopt(zmq.IDENTITY, b"w" + secrets.token_bytes(8))
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _ms(timings.reconnect))
    if "[" in endpoint:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(endpoint)
    return socket


def send(router: zmq.Socket[bytes], peer: bytes, frame: bytes) -> None:
    """A frame to a peer. Without send_multipart, which takes twice as long.

    Raises:
        zmq.ZMQError: the peer is gone or does not read; nothing is sent.
    """
    router.send(peer, zmq.SNDMORE)
    router.send(frame)


def receive(router: zmq.Socket[bytes]) -> tuple[bytes, bytes]:
    """What has arrived, after its peer; nothing, of a message that is not one frame.

    Raises:
        zmq.Again: there is none.
    """
    peer = router.recv(zmq.NOBLOCK)
    frame = router.recv(copy=False)  # it knows whether more belong to it
    if frame.more:
        router.recv_multipart()
        return peer, b""
    return peer, frame.bytes


def _ms(seconds: float) -> int:
    return int(1000 * seconds)
