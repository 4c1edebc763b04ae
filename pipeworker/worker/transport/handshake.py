"""Mutual authentication of the two ends of a connection before it carries anything.

Each end proves that it has the key of the edge by an HMAC over both ends' nonces and its own role
(a mutual challenge and response, as in ISO/IEC 9798-4), so a recorded exchange is of no use. The
source, which is the end that connects to a listener, proves itself first: an unauthenticated peer
of a listener learns nothing from it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
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
from pipeworker.wire.keys import derive_secret
from pipeworker.worker.internals import Store

MAX_PENDING = 64
"""Unauthenticated connections that a listener keeps at once."""
_NONCE_BYTES = _PROOF_BYTES = 32
_SOURCE, _TARGET = b"source", b"target"
_LOGGED = 20  # rejections that are logged one by one; then each thousandth
_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError)

Authentication = Generator[tuple[bytes, int], bytes, None]
"""One end's part of the exchange: yields the bytes to send and the number of bytes to receive next,
and is sent those."""

HandshakeSteps = Generator[int, None, socket.socket]
"""The steps by which a connection is authenticated: yields the selector event to wait for, and
returns the authenticated connection. It owns the connection, and closes it on failure or close."""


@dataclass(frozen=True, slots=True)
class RendezvousPoint:
    """A key of the job's store under which one end of a connection publishes its address.

    The ends wait for each other until `deadline` (monotonic).
    """

    store: Store
    key: str
    deadline: float

    def seconds_left(self) -> float:
        """Return the seconds until the deadline, 0.001 at the least."""
        return max(0.001, self.deadline - time.monotonic())


class AuthenticationError(Exception):
    """The process at the other end is not the peer."""


class PeerLeft(AuthenticationError):
    """The other end closed the connection before it was authenticated."""


@dataclass(frozen=True, slots=True)
class Membership:
    """The token and number that authenticate a worker as one of a job's generation."""

    token: str = field(repr=False)
    generation: int

    def edge_key(self, edge: Edge, replica: int) -> bytes:
        """Return the key of the two ends of an edge; raise UsageError if the token is too short."""
        return self._key(f"{self.generation}/{replica}/{edge}")

    def snapshot_key(self) -> bytes:
        """Return the key by which the hosts of a job transfer snapshots."""
        return self._key(f"{self.generation}/memory")

    def _key(self, purpose: str) -> bytes:
        secret = derive_secret(self.token, b"pipeworker-links")
        return hmac.digest(secret, purpose.encode(), "sha256")


def authenticate(key: bytes, *, sends: bool) -> Authentication:
    """Perform one end's part of the exchange; the source, which `sends`, proves itself first.

    Raises:
        AuthenticationError: the other end does not have the key.
    """

    def proof(role: bytes) -> bytes:
        return hmac.digest(key, role + target_nonce + source_nonce, hashlib.sha256)

    if sends:
        target_nonce = yield b"", _NONCE_BYTES
        source_nonce = secrets.token_bytes(_NONCE_BYTES)
        received = yield source_nonce + proof(_SOURCE), _PROOF_BYTES
        expected = proof(_TARGET)
    else:
        target_nonce = secrets.token_bytes(_NONCE_BYTES)
        reply = yield target_nonce, _NONCE_BYTES + _PROOF_BYTES
        source_nonce, received = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
        expected = proof(_SOURCE)
    if not hmac.compare_digest(received, expected):
        raise AuthenticationError("its proof is wrong")
    if not sends:
        yield proof(_TARGET), 0


def log_rejection(channel: object, reason: object) -> None:
    streams.note(f"the channel {channel}: rejected a connection that is not the peer's: {reason}")


# Over sockets that do not block.


def listen(host: str) -> tuple[socket.socket, str]:
    """Return a TCP listener at a free port of `host`, and the address to publish in the store."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=MAX_PENDING)
    return listener, f"{host} {listener.getsockname()[1]}"


def parse_address(published: bytes) -> tuple[str, int]:
    """Return the host and port of an address that :func:`listen` has returned."""
    host, _, port = published.decode().rpartition(" ")
    return host, int(port)


def exchange_proofs(
    connection: socket.socket, key: bytes, *, sends: bool
) -> Generator[int, None, None]:
    """Perform an authentication over a connection, whose buffers hold messages this small."""
    authentication = authenticate(key, sends=sends)
    with contextlib.suppress(StopIteration):
        message, count = next(authentication)
        while True:
            if message:
                connection.send(message)
            received = b""
            while len(received) < count:
                try:
                    data = connection.recv(count - len(received))
                except _WOULD_BLOCK:
                    yield selectors.EVENT_READ
                    continue
                if not data:
                    raise PeerLeft("it left")
                received += data
            message, count = authentication.send(received)


def plain_steps(connection: socket.socket, key: bytes, *, sends: bool) -> HandshakeSteps:
    """Authenticate a connection that stays unencrypted."""
    with contextlib.ExitStack() as unless_authenticated:
        unless_authenticated.callback(connection.close)
        yield from exchange_proofs(connection, key, sends=sends)
        unless_authenticated.pop_all()
    return connection


def complete(steps: HandshakeSteps, connection: socket.socket, deadline: float) -> socket.socket:
    """Return a connection that this process has made, authenticated and blocking.

    The other end may be silent until `deadline` (monotonic).

    Raises:
        AuthenticationError: the other end is not the peer, or is silent.
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
                    raise AuthenticationError("it is silent")
        except StopIteration as done:
            authenticated: socket.socket = done.value
    authenticated.setblocking(True)
    return authenticated


def accept(
    listener: socket.socket,
    channel: object,
    deadline: float,
    steps_of: Callable[[socket.socket], HandshakeSteps],
) -> socket.socket:
    """Return the first of :func:`accept_each`.

    Raises:
        TimeoutError: the peer has not come before `deadline` (monotonic).
    """
    accepted = accept_each(listener, channel, lambda: time.monotonic() >= deadline, steps_of)
    with contextlib.closing(accepted):
        for connection in accepted:
            return connection
    raise TimeoutError("it did not come")


def accept_each(
    listener: socket.socket,
    channel: object,
    is_over: Callable[[], bool],
    steps_of: Callable[[socket.socket], HandshakeSteps],
) -> Generator[socket.socket, None, None]:
    """Yield the connections that authenticate themselves, blocking; close and log all others.

    Pending connections are served at the same time, so a silent one delays no other; each has the
    time of a handshake. Beyond :data:`MAX_PENDING` the oldest is closed, preferably one that has
    sent nothing.

    Args:
        listener: a listening socket.
        channel: the channel's name in the log.
        is_over: called at each poll; if it returns True, pending connections are closed.
        steps_of: returns the steps of a new connection.
    """
    seconds = timings().handshake
    listener.setblocking(False)
    with contextlib.closing(_PendingConnections(channel)) as pending:
        pending.selector.register(listener, selectors.EVENT_READ)
        while not is_over():
            pending.reject_overdue(time.monotonic(), f"it proved nothing within {seconds:g} s")
            pending.reject_excess()
            for key, _ in pending.selector.select(timings().poll):
                descriptor, has_data = key.fd, True
                if key.fileobj is listener:
                    try:
                        connection, _ = listener.accept()
                    except OSError as error:  # it was closed meanwhile
                        if error.errno in (errno.EMFILE, errno.ENFILE):
                            time.sleep(timings().poll)  # it stays readable: others must close
                        continue
                    connection.setblocking(False)
                    descriptor, has_data = connection.fileno(), has_sent_data(connection)
                    pending.add(descriptor, steps_of(connection), time.monotonic() + seconds)
                if authenticated := pending.advance(descriptor, has_data=has_data):
                    authenticated.setblocking(True)
                    yield authenticated


class _PendingConnections:
    """The connections of a listener that are not authenticated yet."""

    def __init__(self, channel: object) -> None:
        self.selector = selectors.DefaultSelector()
        self._channel = channel
        # By descriptor, oldest first: the steps, and the time until which they may take.
        self._steps: dict[int, tuple[HandshakeSteps, float]] = {}
        self._with_data: set[int] = set()
        self._rejected = 0

    def close(self) -> None:
        for descriptor in list(self._steps):
            self._remove(descriptor)
        self.selector.close()

    def add(self, descriptor: int, steps: HandshakeSteps, until: float) -> None:
        self._steps[descriptor] = steps, until
        self.selector.register(descriptor, selectors.EVENT_READ)

    def advance(self, descriptor: int, *, has_data: bool) -> socket.socket | None:
        """Perform a connection's next step; return the connection once it is authenticated."""
        if has_data:
            self._with_data.add(descriptor)
        try:
            self.selector.modify(descriptor, next(self._steps[descriptor][0]))
        except StopIteration as done:
            authenticated: socket.socket = done.value
            self._remove(descriptor)
            return authenticated
        except (AuthenticationError, OSError) as error:
            self._reject(descriptor, error)
        return None

    def reject_overdue(self, now: float, reason: str) -> None:
        for descriptor, (_, until) in list(self._steps.items()):
            if until <= now:
                self._reject(descriptor, reason)

    def reject_excess(self) -> None:
        """Reject the oldest connections beyond the limit, first those that have sent nothing."""
        while len(self._steps) > MAX_PENDING:
            oldest = min(self._steps, key=self._with_data.__contains__)
            self._reject(oldest, f"it proved nothing before {MAX_PENDING} others came")

    def _reject(self, descriptor: int, reason: object) -> None:
        self._rejected += 1
        if self._rejected <= _LOGGED:
            log_rejection(self._channel, reason)
        elif self._rejected % 1000 == 0:
            log_rejection(self._channel, f"{reason} ({self._rejected} so far)")
        self._remove(descriptor)

    def _remove(self, descriptor: int) -> None:
        steps, _ = self._steps.pop(descriptor)
        self._with_data.discard(descriptor)
        self.selector.unregister(descriptor)
        steps.close()


def shut_down(connection: socket.socket) -> None:
    """End the transfers of other threads over a connection that may be closed already."""
    with contextlib.suppress(OSError):
        # An SSLSocket's own shutdown would let these threads continue without encryption.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def has_sent_data(connection: socket.socket) -> bool:
    """Return whether a connection has data to read; the data stays there."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except OSError:
        return False
