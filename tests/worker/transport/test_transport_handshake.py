"""Authentication of links: the peer is accepted, and all other connections are rejected."""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import PeerLost, UsageError
from pipeworker.timings import DEFAULT
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.handshake import (
    AuthenticationError,
    Membership,
    PeerLeft,
    authenticate,
)
from pipeworker.worker.transport.links import unix
from support.faults.authentication import REJECTED, Listener, join, timings
from support.faults.unauthenticated_peers import listening
from support.in_process.transport import BACK, FORTH, MEMBERSHIP, LocalStore

KEY = MEMBERSHIP.edge_key(FORTH, 0)


# The exchange itself.


def talk(
    source_key: bytes, target_key: bytes, change: Callable[[int, bytes], bytes] = lambda _, m: m
) -> list[bytes]:
    """Perform an authentication, with messages changed on the way; return the messages."""
    source, target = authenticate(source_key, sends=True), authenticate(target_key, sends=False)
    next(source)
    question, _ = next(target)
    messages = [question]
    answer, _ = source.send(change(0, question))
    messages.append(answer)
    last, none = target.send(change(1, answer))
    assert none == 0
    messages.append(last)
    with pytest.raises(StopIteration):
        source.send(change(2, last))
    with pytest.raises(StopIteration):
        target.send(b"")
    return messages


def test_two_ends_with_one_key_authenticate_without_sending_it() -> None:
    messages = talk(KEY, KEY)
    assert [len(message) for message in messages] == [32, 64, 32]
    assert not any(KEY in message for message in messages)
    assert not {*messages} & {*talk(KEY, KEY)}  # no message repeats


@given(st.integers(0, 2), st.integers(0, 63), st.integers(1, 255))
def test_any_changed_byte_is_rejected(which: int, at: int, by: int) -> None:
    def change(number: int, message: bytes) -> bytes:
        changed = bytearray(message)
        if number == which:
            changed[at % len(message)] ^= by
        return bytes(changed)

    with pytest.raises(AuthenticationError):
        talk(KEY, KEY, change)


@pytest.mark.parametrize(
    "other",
    [
        Membership("another secret of these tests", 1).edge_key(FORTH, 0),
        Membership(MEMBERSHIP.token, 2).edge_key(FORTH, 0),
        MEMBERSHIP.edge_key(FORTH, 1),
        MEMBERSHIP.edge_key(BACK, 0),
    ],
    ids=["token", "generation", "replica", "edge"],
)
def test_another_key_is_rejected(other: bytes) -> None:
    for keys in ((KEY, other), (other, KEY)):
        with pytest.raises(AuthenticationError):
            talk(*keys)


def test_a_reflected_proof_is_rejected() -> None:
    source = authenticate(KEY, sends=True)
    next(source)
    answer, count = source.send(os.urandom(32))
    with pytest.raises(AuthenticationError):
        source.send(answer[-count:])


def test_a_replayed_proof_is_rejected() -> None:
    _, answer, last = talk(KEY, KEY)
    target = authenticate(KEY, sends=False)
    next(target)
    with pytest.raises(AuthenticationError):
        target.send(answer)
    source = authenticate(KEY, sends=True)
    next(source)
    source.send(os.urandom(32))
    with pytest.raises(AuthenticationError):
        source.send(last)


def test_a_short_token_is_refused_and_no_token_is_shown() -> None:
    with pytest.raises(UsageError, match="too short"):
        Membership("short", 1).edge_key(FORTH, 0)
    assert MEMBERSHIP.token not in repr(MEMBERSHIP)


# Over every kind of link.


OTHERS = [Membership("another secret of these tests", 1), Membership(MEMBERSHIP.token, 2)]


@pytest.mark.parametrize("backends", [["auto", "gloo"], ["tls"]], ids=["near", "far"])
def test_workers_of_another_job_or_generation_are_not_connected(
    backends: list[str],
    patient_connect: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if backends == ["tls"]:
        monkeypatch.setattr(unix, "host_identity", lambda: os.urandom(8).hex())
    with ThreadPoolExecutor(8) as pool:
        made = [
            (rank, pool.submit(join, rank, local_store, backend, member))
            for backend in backends
            for other in OTHERS
            for local_store in [LocalStore()]
            for rank, member in enumerate((MEMBERSHIP, other))
        ]
    for rank, future in made:
        words = f"the worker of stage {1 - rank} .rank {1 - rank}.( on .*, from .*)?: "
        with pytest.raises(PeerLost, match=f"the channel 0>1/activation .* {words}"):
            future.result(0)
    assert capfd.readouterr().err.count(REJECTED) >= 2 * len(backends)


def test_a_peer_that_does_not_come_is_named(short_connect: None) -> None:
    with ThreadPoolExecutor(6) as pool:
        made = []
        for backend in ("auto", "gloo", "tls"):
            for rank in (0, 1):
                local_store = LocalStore()
                host = "another" if backend == "tls" else unix.host_identity()
                local_store.store().set(f"host/{1 - rank}", host)
                made.append((rank, pool.submit(join, rank, local_store, backend)))
    for rank, future in made:
        name = f"stage {1 - rank} .rank {1 - rank}."
        with pytest.raises(PeerLost, match=rf"0>1/activation .* {name}: it did not come within 1"):
            future.result(0)


# The listeners of shared memory and TLS.


@pytest.fixture(params=["auto", "tls"])
def listener(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    changed = timings(monkeypatch, "connect=21")  # a failing test does not wait for long
    next(changed)
    with ExitStack() as stack:
        yield Listener(request.param, stack)
    next(changed, None)


def test_unauthenticated_connections_do_not_delay_the_peer(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(8):
        listener.connect()  # and send nothing
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(200)):
        listener.connect().sendall(garbage)
    listener.connect().close()
    credentials_of_job = Credentials.of(MEMBERSHIP.token)
    listener.fail_handshake(Membership(MEMBERSHIP.token, 2).edge_key(FORTH, 0), credentials_of_job)
    listener.fail_handshake(MEMBERSHIP.edge_key(BACK, 0), credentials_of_job)
    if listener.kind == "tls":
        listener.fail_handshake(KEY, Credentials.of("another secret of these tests"))
    assert listener.accepts_peer()
    err = capfd.readouterr().err
    assert err.count(REJECTED) >= 4
    assert "proved nothing" not in err  # no silent one was waited for


def test_the_oldest_silent_connection_is_closed_when_there_are_too_many(
    listener: Listener, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    connections = [listener.connect() for _ in range(handshake.MAX_PENDING + 2)]
    for connection in connections[:2]:
        while connection.recv(1 << 16):  # the nonce, perhaps
            pass
    assert f"proved nothing before {handshake.MAX_PENDING} others came" in capfd.readouterr().err
    for connection in connections:
        connection.close()
    assert listener.accepts_peer()


@pytest.mark.parametrize("listener", ["tls"], indirect=True)
def test_a_connection_that_has_sent_data_is_not_closed_for_silent_ones(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = iter([0.5])

    def too_early(connection: socket.socket) -> bool:
        select.select([connection], [], [], next(delays, 0))  # its data comes afterwards
        return False

    monkeypatch.setattr(handshake, "has_sent_data", too_early)
    client = Credentials.of(MEMBERSHIP.token).client
    with client.wrap_socket(listener.connect(), do_handshake_on_connect=False) as source:
        source.setblocking(False)
        with suppress(ssl.SSLWantReadError):
            source.do_handshake()
        connections = [listener.connect() for _ in range(handshake.MAX_PENDING + 2)]
        for connection in connections[:2]:
            assert connection.recv(100) == b""
        source.settimeout(20)
        source.do_handshake()
        authentication = authenticate(KEY, sends=True)
        _, count = next(authentication)
        with suppress(StopIteration):
            while True:
                message, count = authentication.send(source.recv(count))
                source.sendall(message)
        listener.target.result(20).close()


def test_the_log_does_not_grow_with_every_rejection(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(100):
        listener.connect().close()
    assert listener.accepts_peer()
    assert capfd.readouterr().err.count(REJECTED) == 20


def test_a_source_whose_connection_is_closed_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the target read from it or after: there may have been too many connections."""
    with ExitStack() as stack:
        local_store, hosts = LocalStore(), iter("a")
        monkeypatch.setattr(unix, "host_identity", lambda: next(hosts))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.settimeout(20)
        local_store.store().set("host/1", "b")
        address = f"127.0.0.1 {listener.getsockname()[1]}"
        local_store.store().set(f"tls/replica-0/{FORTH}", address)
        pool = stack.enter_context(ThreadPoolExecutor(1))
        source = pool.submit(join, 0, local_store, "tls")
        for count in (0, 1):
            connection, _ = listener.accept()
            if count:
                connection.recv(count)
            connection.close()
        connection, _ = listener.accept()
        steps = Credentials.of(MEMBERSHIP.token).steps(connection, KEY, connects=False)
        stack.callback(handshake.complete(steps, connection, time.monotonic() + 20).close)
        source.result(20).close()


def test_a_connection_that_is_reset_before_the_handshake_counts_as_left() -> None:
    """Python before 3.10.13 and 3.11.5 does not read the reset when it wraps the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = socket.create_connection(listener.getsockname(), timeout=20)
        target, _ = listener.accept()
        target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        target.close()
        with pytest.raises(ConnectionResetError):
            source.recv(1)
        steps = Credentials.of(MEMBERSHIP.token).steps(source, KEY, connects=True)
        with pytest.raises(PeerLeft):
            handshake.complete(steps, source, time.monotonic() + 20)


def test_a_silent_connection_is_closed_after_the_time_of_a_handshake(
    short_handshake: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        listener = Listener("auto", stack)
        connection = listener.connect()
        while connection.recv(100):
            pass
        assert f"{REJECTED}: it proved nothing within 0.25 s" in (capfd.readouterr().err)
        assert listener.accepts_peer()


def test_a_listener_in_the_peers_place_learns_nothing_and_is_rejected(short_connect: None) -> None:
    """It listens at the name that the store has, without the secret."""
    for reply in (b"", os.urandom(32)):
        with ExitStack() as stack:
            local_store, name = LocalStore(), f"pipeworker-test-{os.urandom(8).hex()}"
            local_store.store().set("host/1", unix.host_identity())
            local_store.store().set(f"shared/replica-0/{FORTH}", name)
            impostor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(impostor.close)
            impostor.bind(f"\0{name}")
            impostor.listen()
            pool = stack.enter_context(ThreadPoolExecutor(1))
            source = pool.submit(join, 0, local_store, "auto")
            connection, _ = impostor.accept()
            stack.callback(connection.close)
            if reply:
                connection.send(reply)  # a nonce
                assert len(connection.recv(100)) == 64
                connection.send(reply)
            with pytest.raises(PeerLost, match="its proof is wrong" if reply else "it is silent"):
                source.result(20)


def test_a_connection_of_another_user_is_rejected_without_an_exchange(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as stack:
        listener = Listener("auto", stack)
        monkeypatch.setattr("os.getuid", lambda: -1)
        assert listener.connect().recv(100) == b""
        monkeypatch.undo()
        assert listener.accepts_peer()
    assert "it is another user's" in capfd.readouterr().err


def test_the_listener_closes_once_the_peer_is_accepted() -> None:
    with ExitStack() as stack:
        before = listening()
        listener = Listener("tls", stack)
        assert len(listening() - before) == 1
        assert listener.accepts_peer()
        assert listening() == before


class _Exhausted(socket.socket):
    """A listener of a process that has no descriptors left."""

    tries = 0

    def accept(self) -> Any:
        self.tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_listener_without_descriptors_waits_until_there_are_some() -> None:
    """The connection stays in the queue, and its listener readable."""
    with _Exhausted() as listener, socket.socket() as client:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client.connect(listener.getsockname())
        ends = time.monotonic() + 3 * DEFAULT.poll
        is_over = lambda: time.monotonic() > ends  # noqa: E731
        steps = partial(handshake.plain_steps, key=KEY, sends=True)
        assert list(handshake.accept_each(listener, "a channel", is_over, steps)) == []
        assert 1 <= listener.tries <= 4
