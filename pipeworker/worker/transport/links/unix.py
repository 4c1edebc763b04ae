"""Unix sockets between the two workers of an edge that are on one host."""

from __future__ import annotations

import os
import secrets
import socket
import struct
from pathlib import Path

from pipeworker.errors import ProcError
from pipeworker.plan.actions import Edge
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.handshake import HandshakeSteps, RendezvousPoint


def host_identity() -> str:
    """Return a text that is equal for processes that can share memory and use one Unix socket."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError as error:
        raise ProcError(error) from None
    return f"{boot}/{network}/{os.getuid()}"


def connect_unix(
    edge: Edge, secret: bytes, point: RendezvousPoint, *, sends: bool
) -> socket.socket:
    """Return a Unix socket (SOCK_SEQPACKET) to the authenticated other end of an edge.

    The target listens at a random abstract name, which it publishes; the source connects to it.

    Raises:
        OSError: the other end cannot be reached.
        AuthenticationError: the process that listens at the name is not the peer.
    """
    if not sends:
        return _listen(edge, secret, point)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    steps = handshake.plain_steps(connection, secret, sends=True)
    try:
        name = point.store.get(point.key)
        # Python's timeout would not wait while unauthenticated peers fill the listener's queue.
        seconds, fraction = divmod(point.seconds_left(), 1)
        limit = struct.pack("2l", int(seconds), int(1e6 * fraction))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connection.connect(b"\0" + name)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("2l", 0, 0))
    except OSError:
        connection.close()
        raise
    return handshake.complete(steps, connection, point.deadline)


def _listen(edge: Edge, secret: bytes, point: RendezvousPoint) -> socket.socket:
    def steps_of(connection: socket.socket) -> HandshakeSteps:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] != os.getuid():
            connection.close()
            raise handshake.AuthenticationError("it is another user's")
        return (yield from handshake.plain_steps(connection, secret, sends=False))

    name = f"pipeworker-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen(handshake.MAX_PENDING)
        point.store.set(point.key, name)
        return handshake.accept(listener, edge, point.deadline, steps_of)
