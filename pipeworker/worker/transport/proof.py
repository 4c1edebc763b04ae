"""Both ends of a link prove that they are of one job before it carries anything.

Whoever knows the job's token can say the right answer to a question nobody asked before: an HMAC
over a nonce of either end and the role of who answers (a challenge and response both ways, as in
ISO/IEC 9798-4), under a key that is one edge's of one replica in one generation. So a stranger, a
worker of another job, one that was left behind by an earlier generation, and a recording of any of
these are all turned away. The source, which is who connects to a listener, proves itself first: who
comes to a listener learns nothing from it.

What it does not do is keep what follows from being read or changed on the way: TLS does.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import secrets
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from pipeworker.environment import timings
from pipeworker.host import streams
from pipeworker.plan.actions import Edge
from pipeworker.wire.keys import secret_of
from pipeworker.worker.internals import Store

_NONCE = _PROOF = 32
_SOURCE, _TARGET = b"source", b"target"
GUESTS = 64  # who may be at the door at once
_SHOWN = 20  # of those turned away; then each thousandth

Proving = Generator[tuple[bytes, int], bytes, None]
"""One end of a proof: gives what to send and how many bytes to hear next, and is sent those."""

Steps = Generator[int, None, socket.socket]
"""A connection that becomes a proven one: gives the event of a selector that it waits for. It is
the connection's owner, and closes it when it fails or is closed."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ends of an edge meet: a key of the job's store, until a deadline (monotonic)."""

    store: Store
    key: str
    deadline: float

    def left(self) -> float:
        """Seconds until the deadline; a little when it has passed."""
        return max(0.001, self.deadline - time.monotonic())


class Stranger(Exception):
    """Who is at the other end is not the peer."""


class Left(Stranger):
    """Who was at the other end closed the connection, or never was there."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes a worker one of a generation of a job."""

    token: str = field(repr=False)
    generation: int

    def key(self, edge: Edge, replica: int) -> bytes:
        """What the ends of an edge have in common with nobody else.

        Raises:
            UsageError: the token is no secret.
        """
        return self._key(f"{self.generation}/{replica}/{edge}")

    def memory_key(self) -> bytes:
        """What the hosts of a job have in common with nobody else.

        Raises:
            UsageError: the token is no secret.
        """
        return self._key(f"{self.generation}/memory")

    def _key(self, what: str) -> bytes:
        secret = secret_of(self.token, b"pipeworker-links")
        return hmac.digest(secret, what.encode(), "sha256")


def proving(key: bytes, *, sends: bool) -> Proving:
    """The part of the source (`sends`) or of the target.

    Raises:
        Stranger: the other end does not know the key.
    """

    def proof(role: bytes) -> bytes:
        return hmac.digest(key, role + of_target + of_source, hashlib.sha256)

    if sends:
        of_target = yield b"", _NONCE
        of_source = secrets.token_bytes(_NONCE)
        said = yield of_source + proof(_SOURCE), _PROOF
        expected = proof(_TARGET)
    else:
        of_target = secrets.token_bytes(_NONCE)
        heard = yield of_target, _NONCE + _PROOF
        of_source, said = heard[:_NONCE], heard[_NONCE:]
        expected = proof(_SOURCE)
    if not hmac.compare_digest(said, expected):
        raise Stranger("its proof is wrong")
    if not sends:
        yield proof(_TARGET), 0


def turn_away(channel: object, why: object) -> None:
    """Say in the worker's log who was not let in."""
    who = "somebody who is not the peer connected and was turned away"
    streams.note(f"the channel {channel}: {who}: {why}")


# Over sockets that do not block.

_AGAIN = (BlockingIOError, ssl.SSLWantReadError)


def converse(connection: socket.socket, proof: Proving) -> Generator[int, None, None]:
    """Prove, over a connection in which messages this small do not wait to be sent."""
    with contextlib.suppress(StopIteration):
        message, count = next(proof)
        while True:
            if message:
                connection.send(message)
            heard = b""
            while len(heard) < count:
                try:
                    data = connection.recv(count - len(heard))
                except _AGAIN:
                    yield selectors.EVENT_READ
                    continue
                if not data:
                    raise Left("it left")
                heard += data
            message, count = proof.send(heard)


def over(connection: socket.socket, proof: Proving) -> Steps:
    """A connection that carries the proof as it is."""
    with contextlib.ExitStack() as unless_proven:
        unless_proven.callback(connection.close)
        yield from converse(connection, proof)
        unless_proven.pop_all()
    return connection


def refused(connection: socket.socket, why: str) -> Steps:
    """A connection that need not be asked."""
    connection.close()
    raise Stranger(why)
    yield  # what makes it steps


def finish(steps: Steps, connection: socket.socket, deadline: float) -> socket.socket:
    """Go through the steps of a connection we made; it blocks afterwards.

    Raises:
        Stranger: who listens there is not the peer, or is silent until the deadline.
        OSError: the connection failed.
    """
    connection.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.closing(steps):
        descriptor = connection.fileno()
        selector.register(descriptor, selectors.EVENT_READ)
        try:
            while True:
                selector.modify(descriptor, next(steps))
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Stranger("it is silent")
        except StopIteration as done:
            proven: socket.socket = done.value
    proven.setblocking(True)
    return proven


def admit(
    listener: socket.socket,
    channel: object,
    deadline: float,
    steps_of: Callable[[socket.socket], Steps],
) -> socket.socket:
    """The first to prove that it is the peer; it blocks afterwards. All others are turned away.

    They are heard at the same time, so that who is silent keeps nobody waiting; each may take what
    a handshake may. When too many are there the oldest is cut off, of those that have said nothing
    if there are any.

    Args:
        channel: how it is called in the log.
        deadline: when the peer is no longer waited for (monotonic).

    Raises:
        TimeoutError: it did not come.
    """
    seconds = timings().handshake
    listener.setblocking(False)
    guests: dict[int, tuple[Steps, float]] = {}  # by descriptor, with their deadlines; oldest first
    spoke: set[int] = set()
    turned_away = itertools.count(1)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as leaving:
        selector.register(listener, selectors.EVENT_READ)

        def drop(descriptor: int, why: object) -> None:
            if why and ((count := next(turned_away)) <= _SHOWN or count % 1000 == 0):
                turn_away(channel, why if count <= _SHOWN else f"{why} ({count} so far)")
            steps, _ = guests.pop(descriptor)
            spoke.discard(descriptor)
            selector.unregister(descriptor)
            steps.close()

        def drop_all() -> None:
            for descriptor in list(guests):
                drop(descriptor, "")

        leaving.callback(drop_all)

        def advance(descriptor: int) -> socket.socket | None:
            try:
                selector.modify(descriptor, next(guests[descriptor][0]))
            except StopIteration as done:
                proven: socket.socket = done.value
                drop(descriptor, "")
                return proven
            except (Stranger, OSError) as error:
                drop(descriptor, error)
            return None

        while (now := time.monotonic()) < deadline:
            for descriptor, (_, until) in list(guests.items()):
                if until <= now:
                    drop(descriptor, f"it proved nothing within {seconds:g} s")
            while len(guests) > GUESTS:
                oldest = min(guests, key=spoke.__contains__)
                drop(oldest, f"it proved nothing before {GUESTS} others came")
            soonest = min([deadline, *(until for _, until in guests.values())])
            for key, _ in selector.select(max(0.0, soonest - now)):
                descriptor = key.fd
                if key.fileobj is listener:
                    try:
                        connection, _ = listener.accept()
                    except OSError:
                        continue  # it is gone again
                    connection.setblocking(False)
                    descriptor = connection.fileno()
                    guests[descriptor] = steps_of(connection), time.monotonic() + seconds
                    selector.register(descriptor, selectors.EVENT_READ)
                    if _speaks(connection):
                        spoke.add(descriptor)
                elif descriptor in guests:
                    spoke.add(descriptor)
                if descriptor in guests and (proven := advance(descriptor)) is not None:
                    proven.setblocking(True)
                    return proven
    raise TimeoutError("it did not come")


def _speaks(connection: socket.socket) -> bool:
    """Whether something can be read, which stays there."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
