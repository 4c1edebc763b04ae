"""Copies of the state that other hosts hold, for workers that go on from memory.

A host's memory outlives its workers, but only workers of that host can map it. Where a job has
several hosts, the first worker of each lends what is there until all are built; a worker takes from
others what it needs and does not have. And each host's copies are kept by a neighbour as well, so
that a host may be lost. What passes is what would be on disk: three files.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from pipeworker.environment import timings
from pipeworker.errors import PeerLost
from pipeworker.host import streams
from pipeworker.record.memory import Memory
from pipeworker.worker.transport import proof
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.network import CoordinatorStore, Network
from pipeworker.worker.transport.proof import Left, Membership, Place, Steps, Stranger

_ASK = struct.Struct("<2q")  # rank, slot
_SIZES = struct.Struct("<3q")
_OFFER = struct.Struct("<4q")  # rank, slot, and the sizes of the files with tensors
_SIZE = struct.Struct("<q")
_DONE = b"."
_LENT, _KEPT = "memory", "mirror"
"""What keys of the store begin with."""
_CHUNK = 1 << 20
_WHAT = "of copies of the state"


class _Server:
    """Hears those of the job who come to a port, on a thread, until it is closed.

    Args:
        ranks: under whose names the port is known.
        store: where others learn of it, with what each key begins with.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(
        self,
        key: str,
        ranks: Collection[int],
        store: CoordinatorStore,
        network: Network,
        membership: Membership,
    ) -> None:
        self._key = membership.memory_key()
        self._credentials = _credentials(network, membership)
        self._over = threading.Event()
        host = network.own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=proof.GUESTS)
        for rank in ranks:
            store.set(f"{key}/{rank}", f"{host} {self._listener.getsockname()[1]}")
        self._thread = threading.Thread(target=self._hear, name=key, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody comes any more."""
        self._over.set()
        self._thread.join()
        self._listener.close()

    def _hear(self) -> None:
        while not self._over.is_set():
            soon = time.monotonic() + timings().look
            try:
                guest = proof.admit(self._listener, _WHAT, soon, self._steps)
            except TimeoutError:
                continue
            self._take_in(guest)

    def _steps(self, connection: socket.socket) -> Steps:
        return _proven(connection, self._key, self._credentials, sends=False)

    def _take_in(self, guest: socket.socket) -> None:
        raise NotImplementedError


class Lender(_Server):
    """Lends what a host's memory has.

    Args:
        memories: by rank.
        whole: the ranks whose copies others may have.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(
        self,
        memories: Mapping[int, Sequence[Memory]],
        whole: Collection[int],
        store: CoordinatorStore,
        network: Network,
        membership: Membership,
    ) -> None:
        self._memories = {rank: memories[rank] for rank in whole}
        super().__init__(_LENT, whole, store, network, membership)

    def _take_in(self, guest: socket.socket) -> None:
        with guest, suppress(OSError, Left):  # whoever has left asks again
            guest.settimeout(timings().handshake)
            rank, slot = _ASK.unpack(_received(guest, _ASK.size))
            handles = _among(self._memories, rank, slot).handles
            guest.sendall(_SIZES.pack(*(os.fstat(handle).st_size for handle in handles)))
            for handle in handles:
                _send(guest, handle)


class Pantry(_Server):
    """Keeps the copies of other hosts' workers, in memories that outlive this one's.

    Args:
        memories: by rank, those that are kept.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(
        self,
        memories: Mapping[int, Sequence[Memory]],
        store: CoordinatorStore,
        network: Network,
        membership: Membership,
    ) -> None:
        self._memories = memories
        self._guests: list[tuple[socket.socket, threading.Thread]] = []
        super().__init__(_KEPT, memories, store, network, membership)

    def close(self) -> None:
        super().close()
        for guest, thread in self._guests:
            with suppress(OSError):
                guest.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _take_in(self, guest: socket.socket) -> None:
        thread = threading.Thread(target=self._keep, args=(guest,), name="keeps", daemon=True)
        self._guests.append((guest, thread))
        thread.start()

    def _keep(self, guest: socket.socket) -> None:
        """One worker's copies, one after the other, until it or this one leaves."""
        with guest, suppress(OSError, Left):
            while True:
                rank, slot, *sizes = _OFFER.unpack(_received(guest, _OFFER.size))
                memory = _among(self._memories, rank, slot)
                memory.put(2, b"")  # it is not whole
                for number, size in enumerate(sizes):
                    _receive(guest, memory.handles[number], size)
                (size,) = _SIZE.unpack(_received(guest, _SIZE.size))
                memory.put(2, _received(guest, size))
                guest.sendall(_DONE)


class Mirror:
    """Has another host keep what this worker copies.

    Raises:
        TimeoutError: nobody says that it does.
    """

    def __init__(
        self, rank: int, store: CoordinatorStore, network: Network, membership: Membership
    ) -> None:
        self._rank = rank
        self._key, self._credentials = membership.memory_key(), _credentials(network, membership)
        host, _, port = store.get(f"{_KEPT}/{rank}").decode().rpartition(" ")
        self._address = host, int(port)
        self._connection: socket.socket | None = None
        self._closed = False

    def keep(self, slot: int, memory: Memory, step: int) -> bool:
        """Have a copy kept; returns whether all of it is, as it was after that step.

        It is not when the memory was used again meanwhile, or the other host is gone: then this
        generation is about to end.
        """
        try:
            connection = self._connection or self._connect()
            sizes = [os.fstat(handle).st_size for handle in memory.handles[:2]]
            connection.sendall(_OFFER.pack(self._rank, slot, *sizes))
            for handle, size in zip(memory.handles, sizes, strict=False):
                _send(connection, handle, size)
            state = memory.paths[2].read_bytes()  # written last, and taken away first
            whole = bool(state) and json.loads(state)["step"] == step
            connection.sendall(_SIZE.pack(len(state) if whole else 0) + (state if whole else b""))
            return _received(connection, len(_DONE)) == _DONE and whole
        except (OSError, Left, Stranger) as error:
            if not self._closed:
                streams.note(f"another host cannot keep the copy of step {step}: {error}")
            return False

    def close(self) -> None:
        """Whatever it is doing is given up."""
        self._closed = True
        if self._connection is not None:
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + timings().reach
        while True:
            try:
                connection = socket.create_connection(self._address, timeout=timings().handshake)
                steps = _proven(connection, self._key, self._credentials, sends=True)
                self._connection = proof.finish(steps, connection, deadline)
            except (Left, ConnectionError, ssl.SSLEOFError):
                if self._closed or time.monotonic() > deadline:
                    raise
            else:
                return self._connection
            time.sleep(timings().look)  # it was cut off, because of others or by them


def borrow(
    rank: int, slot: int, store: CoordinatorStore, network: Network, membership: Membership
) -> Memory:
    """A copy of what another host has of a rank; the caller closes it.

    Raises:
        PeerLost: no host has it, or it cannot be reached in time.
        OSError: there is no memory for it.
    """
    where = Place(store, f"{_LENT}/{rank}", time.monotonic() + timings().connect)
    store.deadline = where.deadline
    host, _, port = store.get(where.key).decode().rpartition(" ")
    credentials = _credentials(network, membership)
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=where.left())
            steps = _proven(connection, membership.memory_key(), credentials, sends=True)
            with proof.finish(steps, connection, where.deadline) as lender:
                lender.settimeout(where.left())
                return _taken(lender, rank, slot)
        except (Left, ConnectionError, ssl.SSLEOFError, Stranger, TimeoutError) as error:
            if time.monotonic() > where.deadline or isinstance(error, TimeoutError):
                text = f"the copy of the state of rank {rank} at {host}:{port}: {error}"
                raise PeerLost(text) from error
        time.sleep(timings().look)  # it was busy with others, or is gone


def _taken(lender: socket.socket, rank: int, slot: int) -> Memory:
    lender.sendall(_ASK.pack(rank, slot))
    sizes = _SIZES.unpack(_received(lender, _SIZES.size))
    memory = Memory()
    try:
        for handle, size in zip(memory.handles, sizes, strict=True):
            _receive(lender, handle, size)
    except BaseException:
        memory.close()
        raise
    return memory


def _among(memories: Mapping[int, Sequence[Memory]], rank: int, slot: int) -> Memory:
    """That of a rank and slot that somebody names."""
    if rank not in memories or not 0 <= slot < len(memories[rank]):
        raise Left(f"it named rank {rank}, slot {slot}, which are not here")
    return memories[rank][slot]


def _send(connection: socket.socket, handle: int, size: int | None = None) -> None:
    """A file; exactly so many bytes of it, if its size may have changed."""
    at = 0
    while data := os.pread(handle, _CHUNK if size is None else min(_CHUNK, size - at), at):
        connection.sendall(data)
        at += len(data)
    if size is not None and at < size:
        connection.sendall(bytes(size - at))


def _receive(connection: socket.socket, handle: int, size: int) -> None:
    """As many bytes into a file, which has no others then."""
    if size < 0:
        raise Left(f"it named {size} bytes")
    os.ftruncate(handle, size)
    buffer, at = memoryview(bytearray(min(_CHUNK, size))), 0
    while at < size:
        count = connection.recv_into(buffer[: size - at])
        if not count:
            raise Left("it left")
        at += os.pwrite(handle, buffer[:count], at)


def _credentials(network: Network, membership: Membership) -> Credentials | None:
    return Credentials.of(membership.token) if network.backend == "tls" else None


def _proven(
    connection: socket.socket, key: bytes, credentials: Credentials | None, *, sends: bool
) -> Steps:
    part = proof.proving(key, sends=sends)
    if credentials is None:
        return proof.over(connection, part)
    return credentials.steps(connection, part, connects=sends)


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        some = connection.recv(count - len(data))
        if not some:
            raise Left("it left")
        data += some
    return data
