"""Snapshots that are fetched from another host, and mirrored on it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest

from pipeworker.errors import PeerLost
from pipeworker.host import cgroups
from pipeworker.record.checkpoint.snapshot_memory import LacksMemory, SnapshotMemory
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.credentials import CLOSED, Credentials
from pipeworker.worker.transport.handshake import HandshakeSteps, Membership, PeerLeft
from pipeworker.worker.transport.network import CoordinatorStore, Network
from pipeworker.worker.transport.snapshot_transfer import (
    MirrorClient,
    MirrorServer,
    SnapshotServer,
    fetch_snapshot,
)
from support.faults.authentication import timings
from support.in_process.transport import ENDPOINT, MEMBERSHIP, LocalStore

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(params=["gloo", "tls"])
def network(request: pytest.FixtureRequest) -> Network:
    return Network(ENDPOINT, request.param)


@pytest.fixture
def memories() -> Iterator[dict[int, list[SnapshotMemory]]]:
    """Two slots of each of two ranks; one file is larger than a chunk of the transfer."""
    made = {rank: [SnapshotMemory(), SnapshotMemory()] for rank in (3, 5)}
    for rank, slots in made.items():
        for slot, memory in enumerate(slots):
            memory.write(0, bytes([rank, slot]) * 700_000)
            memory.write(1, b"")
            memory.write(2, f"{rank}/{slot}".encode())
            memory.write(3, bytes([rank]) * slot)
    yield made
    for slots in made.values():
        for memory in slots:
            memory.close()


def test_a_fetched_snapshot_is_a_copy(
    network: Network, memories: dict[int, list[SnapshotMemory]]
) -> None:
    store, before = LocalStore(), threading.active_count()
    server = SnapshotServer(memories, store.store(), network, MEMBERSHIP)
    for rank, slot in ((5, 1), (3, 0), (3, 1)):
        fetched = fetch_snapshot(rank, slot, store.store(), network, MEMBERSHIP)
        served = memories[rank][slot]
        assert [p.read_bytes() for p in fetched.paths] == [p.read_bytes() for p in served.paths]
        fetched.close()
    server.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("sender", ["server", "client"])
def test_nothing_is_sent_unencrypted_while_a_connection_closes(
    sender: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread sends until the connection is shut down, which is delayed here."""
    network, store, content = Network(ENDPOINT, "tls"), LocalStore().store(), b"\5\1" * (16 << 20)
    closing, received = threading.Event(), threading.Event()
    shut_down, until = socket.socket.shutdown, time.monotonic() + 20
    credentials = Credentials.of(MEMBERSHIP.token)

    def steps(connection: socket.socket, *, connects: bool = False) -> HandshakeSteps:
        return credentials.steps(connection, MEMBERSHIP.snapshot_key(), connects=connects)

    def delayed(connection: socket.socket, how: int) -> None:
        closing.set()
        received.wait(20)
        shut_down(connection, how)

    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        memory = stack.enter_context(contextlib.closing(SnapshotMemory()))
        memory.write(0, content)
        memory.write(1, b"")
        memory.write(2, b'{"step": 1}')
        if sender == "server":
            server = SnapshotServer({5: [memory]}, store, network, MEMBERSHIP)
            address, close = handshake.parse_address(store.get("memory/5")), server.close
            connection = socket.create_connection(address, 20)
            peer = handshake.complete(steps(connection, connects=True), connection, until)
            peer.sendall(struct.pack("<2q", 5, 0))
        else:
            listener, published = handshake.listen("127.0.0.1")
            stack.enter_context(listener)
            store.set("mirror/5", published)
            client = MirrorClient(5, store, network, MEMBERSHIP)
            close = client.close
            pool.submit(client.mirror, 0, memory, 1)
            peer = handshake.accept(listener, "", until, steps)
        stack.enter_context(peer)
        assert peer.recv(1)  # it sends
        monkeypatch.setattr(socket.socket, "shutdown", delayed)
        closed = pool.submit(close)
        assert closing.wait(20)
        peer.settimeout(0.5)
        raw = bytearray()
        with contextlib.suppress(TimeoutError):
            while len(raw) < len(content) and (data := socket.socket.recv(peer, 1 << 20)):
                raw += data
        received.set()
        closed.result(20)
        assert len(raw) > len(content) // 2
        assert content[:100] not in raw


@pytest.mark.parametrize("error", [errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_a_snapshot_is_fetched_once_its_host_is_on_the_network_again(
    memories: dict[int, list[SnapshotMemory]], error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an unplugged cable: the kernel has forgotten the way, and reports it at once."""
    store, failures = LocalStore().store(), [OSError(error, os.strerror(error))] * 3
    connect = socket.create_connection

    def off_the_network(*args: Any, **named: Any) -> socket.socket:
        if failures:
            raise failures.pop()
        return connect(*args, **named)

    monkeypatch.setattr(socket, "create_connection", off_the_network)
    server = SnapshotServer(memories, store, Network(ENDPOINT, "auto"), MEMBERSHIP)
    with contextlib.closing(server):
        fetched = fetch_snapshot(3, 0, store, Network(ENDPOINT, "auto"), MEMBERSHIP)
        assert fetched.size == memories[3][0].size
        fetched.close()
        failures += [OSError(error, os.strerror(error))] * 10_000
        changed = timings(monkeypatch, "0.02")
        next(changed)
        with pytest.raises(PeerLost, match=f"127.0.0.1:.*: {os.strerror(error)}"):
            fetch_snapshot(3, 0, store, Network(ENDPOINT, "auto"), MEMBERSHIP)
        next(changed, None)


def test_only_complete_snapshots_are_mirrored(
    network: Network, memories: dict[int, list[SnapshotMemory]]
) -> None:
    store, before = LocalStore(), threading.active_count()
    copies = {rank: [SnapshotMemory(), SnapshotMemory()] for rank in memories}
    server = MirrorServer(copies, store.store(), network, MEMBERSHIP)
    clients = {rank: MirrorClient(rank, store.store(), network, MEMBERSHIP) for rank in memories}
    for step in (7, 8):
        for rank, slots in memories.items():
            slots[step % 2].write(0, bytes([rank, step]) * (step * 100_000))
            slots[step % 2].write(2, json.dumps({"step": step, "rank": rank}).encode())
            assert clients[rank].mirror(step % 2, slots[step % 2], step)
    for rank, slots in memories.items():
        for own, copy in zip(slots, copies[rank], strict=True):
            assert [p.read_bytes() for p in own.paths] == [p.read_bytes() for p in copy.paths]
    memories[3][0].write(2, b"")  # the slot is reused while it is sent
    assert not clients[3].mirror(0, memories[3][0], 8)
    assert copies[3][0].paths[2].read_bytes() == b""
    assert clients[5].mirror(0, memories[5][0], 8)
    server.close()
    assert not clients[5].mirror(0, memories[5][0], 8)
    for client in clients.values():
        client.close()
    assert threading.active_count() == before
    for slots in copies.values():
        for memory in slots:
            memory.close()


def test_a_host_with_too_little_memory_mirrors_nothing_and_reports_that(
    network: Network, memories: dict[int, list[SnapshotMemory]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system would end its workers otherwise: hosts may have less memory than others."""
    store, memory = LocalStore(), memories[3][0]
    memory.write(2, json.dumps({"step": 7}).encode())
    copies = {3: [SnapshotMemory()], 5: [SnapshotMemory()]}
    server = MirrorServer(copies, store.store(), network, MEMBERSHIP)
    with contextlib.closing(MirrorClient(3, store.store(), network, MEMBERSHIP)) as client:
        monkeypatch.setattr(cgroups, "available_memory", lambda: 4 * 1_400_000 - 4)
        with pytest.raises(LacksMemory, match="on the host that mirrors"):
            client.mirror(0, memory, 7)
        assert copies[3][0].size == 0
        monkeypatch.setattr(cgroups, "available_memory", lambda: 4 * 1_400_000)
        assert client.mirror(0, memory, 7)
        monkeypatch.setattr(cgroups, "available_memory", lambda: 0)
        assert client.mirror(0, memory, 7)  # into the memory that it has
    server.close()
    for (copy,) in copies.values():
        copy.close()


def test_a_snapshot_is_mirrored_after_one_whose_connection_failed(
    network: Network, memories: dict[int, list[SnapshotMemory]]
) -> None:
    store, memory = LocalStore(), memories[3][0]
    memory.write(2, json.dumps({"step": 7}).encode())
    copies = {3: [SnapshotMemory()]}
    server = MirrorServer(copies, store.store(), network, MEMBERSHIP)
    with contextlib.closing(MirrorClient(3, store.store(), network, MEMBERSHIP)) as client:
        for slot in (1, -1):
            assert not client.mirror(slot, memory, 7)  # the server has no such slot: it closes
        assert client.mirror(0, memory, 7)
    server.close()
    copies[3][0].close()


def test_a_worker_of_another_generation_is_rejected(
    network: Network,
    memories: dict[int, list[SnapshotMemory]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    store = LocalStore()
    server = SnapshotServer(memories, store.store(), network, MEMBERSHIP)
    old = Membership(MEMBERSHIP.token, MEMBERSHIP.generation + 1)
    host, port = store.store().get("memory/3").decode().split()
    until = time.monotonic() + 20
    connection = socket.create_connection((host, int(port)), timeout=20)
    steps = (
        Credentials.of(old.token).steps(connection, old.snapshot_key(), connects=True)
        if network.backend == "tls"
        else handshake.plain_steps(connection, old.snapshot_key(), sends=True)
    )
    with pytest.raises((PeerLeft, ConnectionError, *CLOSED)):
        handshake.complete(steps, connection, until)
    log = ""
    while "the channel of copies of the state: rejected a connection" not in log:
        log += capfd.readouterr().err
        assert time.monotonic() < until
    fetched = fetch_snapshot(3, 0, store.store(), network, MEMBERSHIP)
    assert fetched.size == memories[3][0].size
    fetched.close()
    server.close()


@contextlib.contextmanager
def polled_server(
    memories: dict[int, list[SnapshotMemory]], store: CoordinatorStore
) -> Iterator[threading.Semaphore]:
    """Serve snapshots; yield a semaphore that the server releases for each poll of a connection."""
    polls = threading.Semaphore(0)

    class Polled(threading.Event):
        def is_set(self) -> bool:
            polls.release()
            return super().is_set()

    with mock.patch.object(threading, "Event", Polled):
        server = SnapshotServer(memories, store, Network(ENDPOINT, "auto"), MEMBERSHIP)
    with contextlib.closing(server):
        yield polls


def wait_for_polls(polls: threading.Semaphore, count: int) -> None:
    while polls.acquire(blocking=False):
        pass
    for _ in range(count):
        assert polls.acquire(timeout=20)


def test_a_peer_whose_handshake_outlasts_a_poll_is_served(
    memories: dict[int, list[SnapshotMemory]],
) -> None:
    """As between hosts that are far apart, where a round trip takes longer."""
    store, until = LocalStore().store(), time.monotonic() + 20
    with polled_server(memories, store) as polls:
        connection = socket.create_connection(handshake.parse_address(store.get("memory/3")), 20)
        steps = handshake.plain_steps(connection, MEMBERSHIP.snapshot_key(), sends=True)
        assert select.select([connection], [], [], 20)[0]  # the server's question is there
        wait_for_polls(polls, 4)
        with handshake.complete(steps, connection, until) as peer:
            peer.sendall(struct.pack("<2q", 3, 0))
            assert peer.recv(8) == struct.pack("<q", 1_400_000)


def test_a_slow_line_may_take_longer_for_a_snapshot_than_for_a_handshake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where packets are lost: the line takes nothing for a while, and then the rest."""
    store, size, changed = LocalStore().store(), 32 << 20, timings(monkeypatch, "0.02")
    next(changed)
    with contextlib.closing(SnapshotMemory()) as memory:
        memory.write(0, bytes(size))
        with polled_server({3: [memory]}, store) as polls:
            address = handshake.parse_address(store.get("memory/3"))
            connection = socket.create_connection(address, 20)
            steps = handshake.plain_steps(connection, MEMBERSHIP.snapshot_key(), sends=True)
            with handshake.complete(steps, connection, time.monotonic() + 20) as peer:
                peer.settimeout(20)
                peer.sendall(struct.pack("<2q", 3, 0))
                received = peer.makefile("rb")
                assert received.read(32) == struct.pack("<4q", size, 0, 0, 0)
                wait_for_polls(polls, 200)  # for four times the limit of a handshake
                assert len(received.read(size)) == size
    next(changed, None)


def test_a_client_that_is_closed_does_not_try_to_connect_again() -> None:
    store = LocalStore()
    with (
        socket.create_server(("127.0.0.1", 0)) as full,
        ThreadPoolExecutor() as pool,
        contextlib.closing(SnapshotMemory()) as memory,
    ):
        store.store().set("mirror/5", f"127.0.0.1 {full.getsockname()[1]}")
        client = MirrorClient(5, store.store(), Network(ENDPOINT, "auto"), MEMBERSHIP)
        mirrored = pool.submit(client.mirror, 0, memory, 1)
        connection, _ = full.accept()
        client.close()
        connection.close()
        assert not mirrored.result(10)  # a third of the time for which it would try
