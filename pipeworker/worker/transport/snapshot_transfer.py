"""Transfer of snapshots between hosts.

In a job of several hosts, one worker a host serves its host's snapshots until all workers are
built, and a worker fetches from other hosts those that it needs and does not have. Each host's
snapshots are also mirrored by a neighbour, so that one host may be lost. A snapshot crosses the
network as it would be on disk: as four files, of which the last one, written last, makes it valid.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pipeworker.environment import timings
from pipeworker.errors import PeerLost
from pipeworker.host import cgroups, streams
from pipeworker.record.checkpoint.snapshot_buffer import content_of
from pipeworker.record.checkpoint.snapshot_memory import LacksMemory, SnapshotMemory
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.credentials import CLOSED, Credentials, Login
from pipeworker.worker.transport.handshake import AuthenticationError, Membership, PeerLeft
from pipeworker.worker.transport.network import CoordinatorStore, Network

_REQUEST = struct.Struct("<2q")  # rank, slot
_SIZES = struct.Struct("<4q")  # bytes of each file
_MIRROR_HEADER = struct.Struct("<5q")  # rank, slot, bytes of the files with tensors
_SIZE = struct.Struct("<q")
_MIRRORED, _LACKING = b".", b"!"
_PART = 2
"""The mirrored snapshots may take one part in so many of the available memory."""
_CHUNK_BYTES = 1 << 20
_CHANNEL = "of copies of the state"  # in the log


class _Server:
    """A thread that accepts authenticated connections at a port until it is closed.

    The port is published under the ranks of `memories`.
    """

    key: str
    """The prefix of the store's keys."""

    def __init__(
        self,
        memories: Mapping[int, Sequence[SnapshotMemory]],
        store: CoordinatorStore,
        network: Network,
        membership: Membership,
    ) -> None:
        self._memories = memories
        self._login = _login(network, membership)
        self._closed = threading.Event()
        self._peers: list[tuple[socket.socket, threading.Thread]] = []
        self._listener, address = handshake.listen(network.own_address())
        for rank in memories:
            store.set(f"{self.key}/{rank}", address)
        self._thread = threading.Thread(target=self._accept, name=self.key, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting connections, and close those there are."""
        self._closed.set()
        self._thread.join()
        self._listener.close()
        for peer, thread in self._peers:
            handshake.shut_down(peer)
            thread.join()

    def _accept(self) -> None:
        accepted = handshake.accept_each(
            self._listener, _CHANNEL, self._closed.is_set, self._login.steps
        )
        for peer in accepted:
            thread = threading.Thread(target=self._serve, args=(peer,), name=self.key, daemon=True)
            self._peers.append((peer, thread))
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        """Serve one connection, on a thread of its own, and close it."""
        raise NotImplementedError

    def _memory(self, rank: int, slot: int) -> SnapshotMemory:
        """Return the memory of a rank and slot that a peer has named."""
        if rank not in self._memories or not 0 <= slot < len(self._memories[rank]):
            raise PeerLeft(f"it named rank {rank}, slot {slot}, which are not here")
        return self._memories[rank][slot]


class SnapshotServer(_Server):
    """Serves the snapshots in a host's memory."""

    key = "memory"

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError, PeerLeft):  # a rejected peer retries
            files = self._memory(*_REQUEST.unpack(_receive(peer, _REQUEST.size))).plain_last
            sizes = [os.fstat(file).st_size for file in files]
            peer.sendall(_SIZES.pack(*sizes))
            for file, size in zip(files, sizes, strict=True):
                _send_file(peer, file, size)


class MirrorServer(_Server):
    """Mirrors the snapshots of another host's workers, in memory that outlives this worker.

    A snapshot for which this host has too little memory is received, and not kept.
    """

    key = "mirror"

    def _serve(self, peer: socket.socket) -> None:
        """Receive one worker's snapshots until either end closes the connection."""
        with peer, suppress(OSError, PeerLeft):
            while True:
                rank, slot, *sizes = _MIRROR_HEADER.unpack(_receive(peer, _MIRROR_HEADER.size))
                memory = self._memory(rank, slot)
                memory.write(2, b"")  # invalid until all of it has come
                room = cgroups.available_memory() // (_PART * len(self._memories))
                fits = sum(sizes) - memory.size <= room
                for file, size in zip(memory.plain_last, sizes, strict=False):
                    _receive_file(peer, file if fits else None, size)
                (size,) = _SIZE.unpack(_receive(peer, _SIZE.size))
                state = _receive(peer, size)
                memory.write(2, state if fits else b"")
                peer.sendall(_MIRRORED if fits else _LACKING)


class MirrorClient:
    """Sends this worker's snapshots to the host that mirrors them.

    Raises:
        TimeoutError: no host offers to mirror them.
    """

    def __init__(
        self, rank: int, store: CoordinatorStore, network: Network, membership: Membership
    ) -> None:
        self._rank = rank
        self._login = _login(network, membership)
        self._address = handshake.parse_address(store.get(f"{MirrorServer.key}/{rank}"))
        self._connection: socket.socket | None = None
        self._closed = False

    def mirror(self, slot: int, memory: SnapshotMemory, step: int) -> bool:
        """Send a snapshot; return whether all of it is mirrored, as it was after `step`.

        It is not if the slot was reused meanwhile or the connection failed, which the next call
        opens again. Where the other host is gone, this generation is about to end.

        Raises:
            LacksMemory: the other host has too little memory.
        """
        if self._closed:
            return False
        try:
            connection = self._connection
            if connection is None:
                until = time.monotonic() + timings().reach
                connection = self._login.connect(self._address, until, lambda: self._closed)
                self._connection = connection
            sizes = [os.fstat(file).st_size for file in memory.plain_last[:3]]
            connection.sendall(_MIRROR_HEADER.pack(self._rank, slot, *sizes))
            for file, size in zip(memory.plain_last, sizes, strict=False):
                _send_file(connection, file, size)
            state = memory.paths[2].read_bytes()  # written last, and cleared first
            valid = content_of(state).get("step") == step
            content = state if valid else b""
            connection.sendall(_SIZE.pack(len(content)) + content)
            answer = _receive(connection, len(_MIRRORED))
        except (OSError, AuthenticationError) as error:
            if not self._closed:
                streams.note(f"the snapshot of step {step} could not be mirrored: {error}")
            self._disconnect()
            return False
        if answer == _LACKING:
            raise LacksMemory(OSError(errno.ENOMEM, "on the host that mirrors this one's"))
        return valid

    def close(self) -> None:
        """Close the connection; a transfer under way fails."""
        self._closed = True
        self._disconnect()

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            handshake.shut_down(connection)
            connection.close()


def fetch_snapshot(
    rank: int, slot: int, store: CoordinatorStore, network: Network, membership: Membership
) -> SnapshotMemory:
    """Return a copy of a rank's snapshot from the host that serves it; the caller closes it.

    Raises:
        OSError: there is no memory for it.
    """
    key, deadline = f"{SnapshotServer.key}/{rank}", time.monotonic() + timings().connect
    store.deadline = deadline
    address, login = handshake.parse_address(store.get(key)), _login(network, membership)
    while True:
        try:
            with login.connect(address, deadline) as server:
                server.settimeout(max(0.001, deadline - time.monotonic()))
                return _fetch(server, rank, slot)
        except (AuthenticationError, ConnectionError, *CLOSED, TimeoutError) as error:
            if time.monotonic() > deadline or isinstance(error, TimeoutError):
                host, port = address
                text = f"the snapshot of rank {rank} at {host}:{port}: {error}"
                raise PeerLost(text) from error
        time.sleep(timings().poll)  # the listener was full of others, or is gone


def _fetch(server: socket.socket, rank: int, slot: int) -> SnapshotMemory:
    server.sendall(_REQUEST.pack(rank, slot))
    sizes = _SIZES.unpack(_receive(server, _SIZES.size))
    memory = SnapshotMemory()
    try:
        for file, size in zip(memory.plain_last, sizes, strict=True):
            _receive_file(server, file, size)
    except BaseException:
        memory.close()
        raise
    return memory


def _login(network: Network, membership: Membership) -> Login:
    credentials = Credentials.of(membership.token) if network.backend == "tls" else None
    return Login(membership.snapshot_key(), credentials)


def _send_file(connection: socket.socket, file: int, size: int) -> None:
    """Send exactly `size` bytes of a file, though it may change meanwhile."""
    sent = 0
    while data := os.pread(file, min(_CHUNK_BYTES, size - sent), sent):
        connection.sendall(data)
        sent += len(data)
    connection.sendall(bytes(size - sent))


def _receive_file(connection: socket.socket, file: int | None, size: int) -> None:
    """Receive a file; drop its bytes if `file` is None."""
    if size < 0:
        raise PeerLeft(f"it named {size} bytes")
    if file is not None:
        os.ftruncate(file, size)
    buffer, received = memoryview(bytearray(min(_CHUNK_BYTES, size))), 0
    while received < size:
        count = connection.recv_into(buffer[: size - received])
        if not count:
            raise PeerLeft("it left")
        received += count if file is None else os.pwrite(file, buffer[:count], received)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = connection.recv(count - len(data))
        if not chunk:
            raise PeerLeft("it left")
        data += chunk
    return data
