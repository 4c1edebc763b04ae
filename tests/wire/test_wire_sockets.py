"""The handshake of the control plane: only a peer with the job's token completes it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import zmq

from pipeworker.timings import DEFAULT
from pipeworker.wire import sockets
from pipeworker.wire.keys import client_keys, new_token, server_keys

TOKEN = new_token()
PATIENCE_MS = 700
"""Long for a handshake on this host, which takes a few milliseconds."""

Server = tuple[sockets.Router, str]


@pytest.fixture
def server() -> Iterator[Server]:
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        router.setsockopt(zmq.RCVTIMEO, 10_000)
        yield router, endpoint


def receive(router: sockets.Router) -> tuple[bytes, bytes]:
    assert router.poll(10_000)
    return sockets.receive(router)


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
