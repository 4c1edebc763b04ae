"""The handshake of the control plane: only a peer with the job's token completes it.

Unauthenticated connections are limited: the busiest source's oldest are closed above the limit.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import zmq

from pipeworker.timings import DEFAULT
from pipeworker.wire import sockets
from pipeworker.wire.keys import client_keys, new_token, server_keys
from support.real_jobs.jobs import until

TOKEN = new_token()
LIMIT = 5
PATIENCE_MS = 700
"""Long for a handshake on this host, which takes a few milliseconds."""

Server = tuple[sockets.Router, str]


@pytest.fixture
def server() -> Iterator[Server]:
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        router.setsockopt(zmq.RCVTIMEO, 10_000)
        yield router, endpoint


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(sockets, "MAX_PENDING", LIMIT)
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        yield router, endpoint


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@contextmanager
def bystander(context: zmq.Context[zmq.Socket[bytes]], server: Server) -> Iterator[None]:
    """A peer with the token exchanges messages with the server before and after the block."""
    router, endpoint = server
    peer = sockets.client(context, TOKEN, endpoint)
    peer.setsockopt(zmq.RCVTIMEO, 10_000)
    for word in (b"before", b"after"):
        peer.send(word)
        identity, received = router.recv_multipart()
        assert received == word
        router.send_multipart([identity, b"answer"])
        assert peer.recv() == b"answer"
        if word == b"before":
            yield
            assert router.poll(0) == 0


def has_ipv6() -> bool:
    """Return whether this host has IPv6's loopback address, which many containers lack."""
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="needs IPv6")
def test_a_host_may_have_an_ipv6_address_alone(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with sockets.server(TOKEN, "::1") as (router, endpoint):
        assert endpoint.startswith("tcp://[::1]:")
        sockets.client(context, TOKEN, endpoint).send(b"hello")
        assert receive(router)[1] == b"hello"


def test_a_send_to_a_peer_that_is_gone_or_does_not_read_fails_at_once(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    def send_without_end(router: sockets.Router, identity: bytes) -> None:
        while True:
            sockets.send(router, identity, bytes(4096))

    with sockets.server(TOKEN, "127.0.0.1", DEFAULT.scaled(0.05)) as (router, endpoint):
        with pytest.raises(zmq.ZMQError) as gone:
            sockets.send(router, b"nobody", b"hello")
        assert gone.value.errno == zmq.EHOSTUNREACH
        peer = sockets.client(context, TOKEN, endpoint)
        peer.send(b"hello")
        with pytest.raises(zmq.Again):
            send_without_end(router, receive(router)[0])


def assert_nothing_received(peer: zmq.Socket[bytes], server: Server) -> None:
    """Assert that neither side receives anything from the other."""
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    with suppress(zmq.Again):  # a rejected socket may have no queue
        peer.send(b"let me in")
    assert server[0].poll(PATIENCE_MS) == 0
    assert peer.poll(0) == 0
    peer.close()


def test_a_peer_with_the_token_sends_and_receives(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with bystander(context, server):
        pass


def test_peers_are_distinguished(server: Server, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    router, endpoint = server
    peers = [sockets.client(context, TOKEN, endpoint) for _ in range(3)]
    for number, peer in enumerate(peers):
        peer.send(b"%d" % number)
    identity = {received: one for one, received in (router.recv_multipart() for _ in peers)}
    assert len(set(identity.values())) == 3
    for number, peer in enumerate(peers):
        router.send_multipart([identity[b"%d" % number], b"you are %d" % number])
        assert peer.recv() == b"you are %d" % number


def test_a_frame_has_a_peer_and_one_part(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router, endpoint = server
    with pytest.raises(zmq.Again):
        sockets.receive(router)
    peer = sockets.client(context, TOKEN, endpoint)
    peer.setsockopt(zmq.RCVTIMEO, 10_000)
    for parts in ([b"one"], [b"two", b"parts"], [b"", b"", b"three"], [b""]):
        peer.send_multipart(parts)
        assert router.poll(10_000)
        identity, frame = sockets.receive(router)
        if len(parts) > 1:  # its sender is known
            assert frame == b""
            continue
        assert frame == parts[0]
        sockets.send(router, identity, frame + b"!")
        assert peer.recv_multipart() == [frame + b"!"]
    with pytest.raises(zmq.ZMQError):
        sockets.send(router, b"unknown peer", b"hello")
    sockets.send(router, identity, b"still there")
    assert peer.recv() == b"still there"


def test_another_token_gets_nothing(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with bystander(context, server):
        assert_nothing_received(sockets.client(context, new_token(), server[1]), server)


def test_the_servers_public_key_is_not_enough(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """The server's public key is right, the client's own key is not the job's."""
    peer = context.socket(zmq.DEALER)
    peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
    peer.curve_serverkey = server_keys(TOKEN).public
    peer.connect(server[1])
    with bystander(context, server):
        assert_nothing_received(peer, server)


def test_the_public_key_without_its_secret_is_not_enough(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    peer = context.socket(zmq.DEALER)
    peer.curve_publickey = client_keys(TOKEN).public
    peer.curve_secretkey = zmq.curve_keypair()[1]
    peer.curve_serverkey = server_keys(TOKEN).public
    peer.connect(server[1])
    with bystander(context, server):
        assert_nothing_received(peer, server)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_no_encryption_gets_nothing(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], kind: int
) -> None:
    peer = context.socket(kind)
    peer.connect(server[1])
    with bystander(context, server):
        assert_nothing_received(peer, server)


def test_plain_user_and_password_get_nothing(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    peer = context.socket(zmq.DEALER)
    peer.plain_username, peer.plain_password = b"admin", TOKEN.encode()
    peer.connect(server[1])
    with bystander(context, server):
        assert_nothing_received(peer, server)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000, bytes(64), b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00"],
    ids=["http", "ones", "zeros", "greeting"],
)
def test_raw_bytes_are_not_received(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], garbage: bytes
) -> None:
    """An unauthenticated peer receives only the greeting of ZMTP, which every server sends."""
    with bystander(context, server), _raw(server[1]) as connection:
        connection.sendall(garbage)
        assert server[0].poll(100) == 0
        connection.settimeout(0.2)
        assert len(_read(connection)) <= 64


@contextmanager
def _raw(endpoint: str) -> Iterator[socket.socket]:
    url = urlsplit(endpoint)
    assert url.hostname
    assert url.port
    with socket.create_connection((url.hostname, url.port), timeout=5) as made:
        yield made


def _read(connection: socket.socket) -> bytes:
    received = b""
    with suppress(TimeoutError, ConnectionResetError):
        while data := connection.recv(4096):
            received += data
    return received


def test_the_system_chooses_a_port_on_the_hosts_address_alone(server: Server) -> None:
    url = urlsplit(server[1])
    assert url.scheme == "tcp"
    assert url.hostname == "127.0.0.1"
    assert url.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", url.port), timeout=5)
    with sockets.server(TOKEN, "127.0.0.1") as (_, another):
        assert another != server[1]


def test_closing_frees_the_port_and_the_threads() -> None:
    threads = threading.active_count()
    with sockets.server(TOKEN, "127.0.0.1") as (_, endpoint):
        assert (
            threading.active_count() == threads + 2
        )  # of the authenticator and of the connection limit
    assert threading.active_count() == threads
    url = urlsplit(endpoint)
    assert url.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((url.hostname, url.port), timeout=5)


def connect(endpoint: str, source: str = "127.0.0.1") -> socket.socket:
    url = urlsplit(endpoint)
    assert url.port
    return socket.create_connection((url.hostname, url.port), 10, (source, 0))


def is_closed(connection: socket.socket) -> bool:
    """Return whether the limited has closed it; its greeting may have come before."""
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def closed(connections: list[socket.socket]) -> list[bool]:
    return [is_closed(connection) for connection in connections]


def receive(router: sockets.Router) -> tuple[bytes, bytes]:
    assert router.poll(10_000)
    return sockets.receive(router)


def test_the_oldest_silent_connections_are_closed_above_the_limit(limited: Server) -> None:
    with ExitStack() as stack:
        made: list[socket.socket] = []
        for count in range(1, 20):
            made.append(stack.enter_context(connect(limited[1])))
            until(lambda count=count: sum(closed(made)) == max(0, count - LIMIT))  # type: ignore[misc]
        assert closed(made) == [True] * (19 - LIMIT) + [False] * LIMIT


def test_a_flood_from_one_address_closes_no_connection_from_another(limited: Server) -> None:
    with ExitStack() as stack:
        slow = stack.enter_context(connect(limited[1], "127.0.0.2"))
        until(lambda: slow.recv(1000, socket.MSG_PEEK))  # it is accepted before the others
        flood = [stack.enter_context(connect(limited[1])) for _ in range(20)]
        until(lambda: sum(closed(flood)) == 20 - LIMIT + 1)
        assert not is_closed(slow)


def test_authenticated_connections_are_not_counted(
    limited: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router, endpoint = limited
    peers, identities = [], []
    for _ in range(3 * LIMIT):  # in turn: never is more than one in its handshake
        peers.append(sockets.client(context, TOKEN, endpoint))
        peers[-1].send(b"hello")
        identities.append(receive(router)[0])
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(endpoint)) for _ in range(4 * LIMIT)]
        until(lambda: sum(closed(silent)) == 3 * LIMIT)
        for identity in identities:  # fails if a connection was closed
            sockets.send(router, identity, b"still connected")
        for peer in peers:
            assert peer.poll(10_000)


class MonitoredSocket:
    """A ROUTER's part for `ConnectionLimit`: the test says when it reports which event."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self._events = context.socket(zmq.PAIR)

    def monitor(self, endpoint: str, events: int) -> None:
        self._events.bind(endpoint)

    def report(self, event: int, connection: socket.socket | None = None) -> None:
        descriptor = connection.fileno() if connection else 0
        self._events.send_multipart([struct.pack("=HI", event, descriptor), b""])

    def disable_monitor(self) -> None:
        self.report(zmq.EVENT_MONITOR_STOPPED)


Monitored = tuple[MonitoredSocket, sockets.ConnectionLimit]


@pytest.fixture
def monitored(
    monkeypatch: pytest.MonkeyPatch, context: zmq.Context[zmq.Socket[bytes]]
) -> Monitored:
    """Return a socket and the limit of its connections."""
    monkeypatch.setattr(sockets, "MAX_PENDING", LIMIT)
    server = MonitoredSocket(context)
    return server, sockets.ConnectionLimit(server)  # type: ignore[arg-type]


Pairs = tuple[list[socket.socket], list[socket.socket]]


def pairs(stack: ExitStack, count: int) -> Pairs:
    """Return the accepted and the connected ends of some connections."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    accepted, connected = [], []
    for _ in range(count):
        address = listener.getsockname()
        connected.append(stack.enter_context(socket.create_connection(address, 10)))
        accepted.append(stack.enter_context(listener.accept()[0]))
    return accepted, connected


def test_a_connection_that_has_ended_is_not_counted(monitored: Monitored) -> None:
    server, limit = monitored
    with ExitStack() as stack:
        accepted, connected = pairs(stack, 2 * LIMIT)
        for number, connection in enumerate(accepted):
            server.report(zmq.EVENT_ACCEPTED, connection)
            if LIMIT <= number < 2 * LIMIT - 1:
                server.report(zmq.EVENT_DISCONNECTED, connection)
        until(lambda: any(closed(connected)))  # for the last one, which is above the limit
        limit.close()
        assert closed(connected) == [True] + [False] * (2 * LIMIT - 1)


def test_the_next_connection_with_a_descriptor_is_not_closed_for_the_last_one(
    monitored: Monitored,
) -> None:
    server, limit = monitored
    with ExitStack() as stack:
        accepted, connected = pairs(stack, LIMIT + 4)
        *first, other, second, third = accepted
        for connection in first:
            server.report(zmq.EVENT_ACCEPTED, connection)
        until(lambda: is_closed(connected[0]))
        os.dup2(other.fileno(), first[1].fileno())  # the oldest of the others
        for connection in (second, third):
            server.report(zmq.EVENT_ACCEPTED, connection)
        until(lambda: is_closed(connected[2]))
        limit.close()
        assert closed(connected)[3:] == [False] * (LIMIT + 1)


def test_a_frame_that_is_read_before_its_connection_is_reported(monitored: Monitored) -> None:
    server, limit = monitored
    with ExitStack() as stack:
        accepted, connected = pairs(stack, LIMIT + 2)
        limit.on_frame({zmq.SRCFD: accepted[0].fileno()})  # type: ignore[arg-type]
        for connection in accepted:
            server.report(zmq.EVENT_ACCEPTED, connection)
        until(lambda: any(closed(connected)))
        assert closed(connected) == [False, True] + [False] * LIMIT
        server.report(zmq.EVENT_DISCONNECTED, accepted[0])
        server.report(zmq.EVENT_ACCEPTED, accepted[0])  # another connection at its descriptor
        until(lambda: sum(closed(connected)) == 2)
        limit.close()
        assert closed(connected) == [False, True, True] + [False] * (LIMIT - 1)


def test_a_peer_connects_during_a_flood(
    limited: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router, endpoint = limited
    with ExitStack() as stack:
        flood = [stack.enter_context(connect(endpoint)) for _ in range(4 * LIMIT)]
        until(lambda: sum(closed(flood)) == 3 * LIMIT)
        sockets.client(context, TOKEN, endpoint).send(b"hello")
        assert receive(router)[1] == b"hello"


def test_a_handshake_has_a_deadline() -> None:
    timings = DEFAULT.scaled(0.05)
    with sockets.server(TOKEN, "127.0.0.1", timings) as (_, endpoint), connect(endpoint) as silent:
        until(lambda: is_closed(silent), 10)


def test_the_number_of_closed_connections_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sockets, "MAX_PENDING", LIMIT)
    with ExitStack() as stack:
        _, endpoint = stack.enter_context(sockets.server(TOKEN, "127.0.0.1"))
        made = [stack.enter_context(connect(endpoint)) for _ in range(10)]
        until(lambda: sum(closed(made)) == 10 - LIMIT)
        stack.pop_all().close()
    with sockets.server(TOKEN, "127.0.0.1"):
        pass  # of none, nothing is logged
    assert caplog.messages == [
        "closed 1 unauthenticated connections so far",
        f"{10 - LIMIT} unauthenticated connections were closed",
    ]
