"""Who gets through the handshake, and that nobody else gets anything."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest
import zmq

from pipeworker.wire import sockets
from pipeworker.wire.keys import client_keys, new_token, server_keys

TOKEN = new_token()
PATIENCE_MS = 700
"""Long for a handshake on this host, which takes a few milliseconds."""

Server = tuple[zmq.Socket[bytes], str]


@pytest.fixture
def server() -> Iterator[Server]:
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        router.setsockopt(zmq.RCVTIMEO, 10_000)
        yield router, endpoint


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@contextmanager
def bystander(context: zmq.Context[zmq.Socket[bytes]], server: Server) -> Iterator[None]:
    """A right peer talks to the server before and after what happens in the block."""
    router, endpoint = server
    peer = sockets.client(context, TOKEN, endpoint)
    peer.setsockopt(zmq.RCVTIMEO, 10_000)
    for word in (b"before", b"after"):
        peer.send(word)
        identity, heard = router.recv_multipart()
        assert heard == word
        router.send_multipart([identity, b"answer"])
        assert peer.recv() == b"answer"
        if word == b"before":
            yield
            assert router.poll(0) == 0


def hears_nothing(peer: zmq.Socket[bytes], server: Server) -> None:
    """Neither side reads anything of the other."""
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.SNDTIMEO, PATIENCE_MS)
    with suppress(zmq.Again):  # a refused socket may have nowhere to put it
        peer.send(b"let me in")
    assert server[0].poll(PATIENCE_MS) == 0
    assert peer.poll(0) == 0
    peer.close()


def test_the_right_token_gets_through_both_ways(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with bystander(context, server):
        pass


def test_peers_are_told_apart(server: Server, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    router, endpoint = server
    peers = [sockets.client(context, TOKEN, endpoint) for _ in range(3)]
    for number, peer in enumerate(peers):
        peer.send(b"%d" % number)
    identity = {heard: who for who, heard in (router.recv_multipart() for _ in peers)}
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
        if len(parts) > 1:  # whose it is, is known
            assert frame == b""
            continue
        assert frame == parts[0]
        sockets.send(router, identity, frame + b"!")
        assert peer.recv_multipart() == [frame + b"!"]
    with pytest.raises(zmq.ZMQError):
        sockets.send(router, b"stranger", b"hello")
    sockets.send(router, identity, b"still there")
    assert peer.recv() == b"still there"


def test_another_token_gets_nothing(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    with bystander(context, server):
        hears_nothing(sockets.client(context, new_token(), server[1]), server)


def test_knowing_the_server_is_not_enough(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """The server's public key is right, the client's own key is not the job's."""
    peer = context.socket(zmq.DEALER)
    peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
    peer.curve_serverkey = server_keys(TOKEN).public
    peer.connect(server[1])
    with bystander(context, server):
        hears_nothing(peer, server)


def test_the_public_key_without_its_secret_is_not_enough(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    peer = context.socket(zmq.DEALER)
    peer.curve_publickey = client_keys(TOKEN).public
    peer.curve_secretkey = zmq.curve_keypair()[1]
    peer.curve_serverkey = server_keys(TOKEN).public
    peer.connect(server[1])
    with bystander(context, server):
        hears_nothing(peer, server)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_no_encryption_gets_nothing(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], kind: int
) -> None:
    peer = context.socket(kind)
    peer.connect(server[1])
    with bystander(context, server):
        hears_nothing(peer, server)


def test_plain_user_and_password_get_nothing(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    peer = context.socket(zmq.DEALER)
    peer.plain_username, peer.plain_password = b"admin", TOKEN.encode()
    peer.connect(server[1])
    with bystander(context, server):
        hears_nothing(peer, server)


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 10_000, bytes(64), b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00"],
    ids=["http", "ones", "zeros", "greeting"],
)
def test_raw_bytes_reach_nobody(
    server: Server, context: zmq.Context[zmq.Socket[bytes]], garbage: bytes
) -> None:
    """The greeting of ZMTP is all a stranger may see: it is the same for every server."""
    with bystander(context, server), _raw(server[1]) as stranger:
        stranger.sendall(garbage)
        assert server[0].poll(100) == 0
        stranger.settimeout(0.2)
        assert len(_read(stranger)) <= 64


@contextmanager
def _raw(endpoint: str) -> Iterator[socket.socket]:
    url = urlsplit(endpoint)
    assert url.hostname
    assert url.port
    with socket.create_connection((url.hostname, url.port), timeout=5) as made:
        yield made


def _read(stranger: socket.socket) -> bytes:
    heard = b""
    with suppress(TimeoutError, ConnectionResetError):
        while data := stranger.recv(4096):
            heard += data
    return heard


def test_the_port_is_the_systems_choice_at_the_host_alone(server: Server) -> None:
    url = urlsplit(server[1])
    assert url.scheme == "tcp"
    assert url.hostname == "127.0.0.1"
    assert url.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", url.port), timeout=5)
    with sockets.server(TOKEN, "127.0.0.1") as (_, another):
        assert another != server[1]


def test_leaving_frees_the_port_and_the_threads() -> None:
    threads = threading.active_count()
    with sockets.server(TOKEN, "127.0.0.1") as (_, endpoint):
        assert (
            threading.active_count() == threads + 2
        )  # the authenticator, and who watches strangers
    assert threading.active_count() == threads
    url = urlsplit(endpoint)
    assert url.port
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((url.hostname, url.port), timeout=5)
