"""Attacks on the ports of a job: unauthenticated peers, and an authenticated one that cheats."""

from __future__ import annotations

import contextlib
import random
import resource
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import zmq

from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Batch
from pipeworker.wire import sockets
from pipeworker.wire.codec import encode
from pipeworker.wire.keys import new_token, server_keys
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.directions import Message
from pipeworker.wire.messages.plan import Built, Described, Ready
from pipeworker.wire.messages.presence import Failed, Heartbeat, Hello, Signalled
from pipeworker.wire.messages.step import StepDone
from pipeworker.wire.messages.store import StoreOperation, StoreRequest
from pipeworker.wire.reliable_stream import UNNUMBERED, pack
from support.real_jobs.manual_job import GENERATION

_SEQUENCE = struct.Struct("<Q")
_NUMBERS = 16

_ROUND = 0.02  # seconds between two checks for lost connections


def listening(pid: int | str = "self") -> set[int]:
    """Return the TCP ports on which a process listens (Linux)."""
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


class UnauthenticatedPeers:
    """Connections to a gloo port that take the places of stages.

    Gloo identifies a pair by a sequence number that the connecting side sends; it is easily
    guessed.

    Args:
        data: what each connection sends after the number.
        leave: whether each connection is then reset.
    """

    def __init__(self, data: bytes = b"", *, leave: bool = False) -> None:
        self._data, self._leave = data, leave
        self._sockets: list[socket.socket] = []

    def take_places(self, port: int) -> None:
        """Take the place of every pair at a port."""
        for number in range(_NUMBERS):
            peer = socket.create_connection(("127.0.0.1", port), timeout=20)
            peer.sendall(_SEQUENCE.pack(number) + self._data)
            if self._leave:
                reset = struct.pack("ii", 1, 0)
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                peer.close()
            else:
                self._sockets.append(peer)

    def received(self) -> list[bytes]:
        """Return the data that these connections received so far."""
        received = []
        for peer in self._sockets:
            peer.setblocking(False)
            try:
                received.append(peer.recv(1 << 16))
            except (BlockingIOError, ConnectionResetError):
                continue
        return [data for data in received if data]

    def close(self) -> None:
        for peer in self._sockets:
            peer.close()


class SilentConnections:
    """`count` connections to an endpoint that send nothing; a thread replaces closed ones."""

    def __init__(self, endpoint: str, count: int) -> None:
        url = urlsplit(endpoint)
        self._address = url.hostname, url.port
        self._poll = select.epoll()
        self._open: dict[int, socket.socket] = {}
        self._stop = threading.Event()
        self.lost = 0
        """The number of connections that the endpoint has closed."""
        for _ in range(count):
            self._connect()
        self._thread = threading.Thread(target=self._renew, name="silent connections")
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
                self.lost += 1
                self._connect()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        for made in self._open.values():
            made.close()
        self._poll.close()


@contextlib.contextmanager
def descriptor_limit(count: int) -> Iterator[None]:
    """Raise the limit on descriptors of this process to `count` inside the context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(count, hard)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def forged_messages() -> list[Message]:
    """Return well-formed messages that would end or derail the job if it accepted them."""
    batch = Batch(9, 1, 1, 9)
    return [
        Hello(0, "elsewhere", 1),
        Hello(7, "x" * 500, 1),
        Described(0, ("Linear",), ()),
        Ready(0, (Built(0, 0, (), 0),), "cpu", batch),
        *(StepDone(1, s, (9.0,), (), (9.0,), 0.0, 0.0, 0, None, s) for s in range(1, 80)),
        Saved(0, 1),
        *(Saved(rank, step, error="no space left") for step in (1, 2) for rank in (0, 1)),
        Signalled(0, "SIGTERM"),
        Signalled(1, "SIGUSR1"),
        Heartbeat(1, Position(Phase.FORWARD, 1, 1, 1)),
        Failed(0, Failure(Cause.USER, "I am stage 0 and have failed", 0)),
        Failed(1, Failure(Cause.SIGNAL, "so have I", 1)),
        StoreRequest(0, 1, StoreOperation.SET, ("shared/replica-0/0>1/activation",), b"x"),
        StoreRequest(0, 2, StoreOperation.GET, ("never",)),
    ]


def framed(message: Message, generation: int) -> bytes:
    """Return the frame of a message, without a sequence number."""
    return pack(UNNUMBERED, encode(message, generation))


def invalid_frames(chance: random.Random, count: int) -> Iterator[bytes]:
    """Yield forged messages, forged messages with some bytes changed, and random bytes."""
    frames = [framed(message, GENERATION) for message in forged_messages()]
    for number in range(count):
        frame = bytearray(chance.choice(frames))
        match number % 3:
            case 1:
                for _ in range(chance.randint(1, 4)):
                    frame[chance.randrange(len(frame))] = chance.randrange(256)
            case 2:
                frame = bytearray(chance.randbytes(chance.randrange(300)))
        yield bytes(frame)


def peers_without_key(
    context: zmq.Context[zmq.Socket[bytes]], token: str, endpoint: str
) -> list[zmq.Socket[bytes]]:
    """Return peers without the job's key; each has sent the forged messages."""
    other_job = sockets.client(context, new_token(), endpoint)
    bare = context.socket(zmq.DEALER)
    bare.connect(endpoint)
    own_key = context.socket(zmq.DEALER)
    own_key.curve_publickey, own_key.curve_secretkey = zmq.curve_keypair()
    own_key.curve_serverkey = server_keys(token).public
    own_key.connect(endpoint)
    for peer in (other_job, bare, own_key):
        peer.setsockopt(zmq.SNDTIMEO, 0)
        peer.setsockopt(zmq.LINGER, 0)
        for message in forged_messages():
            with suppress(zmq.Again):
                peer.send(framed(message, GENERATION))
    return [other_job, bare, own_key]


def send_random_bytes(endpoint: str, chance: random.Random) -> None:
    """Send bytes that are not ZMTP, on connections that are then shut down or closed."""
    url = urlsplit(endpoint)
    assert url.port
    for number in range(60):
        with (
            socket.create_connection((url.hostname, url.port), timeout=5) as made,
            suppress(OSError),  # the server has closed it already
        ):
            made.sendall(chance.randbytes(chance.randrange(2000)) if number % 3 else b"\xff" * 10)
            if number % 2:
                made.shutdown(socket.SHUT_WR)
