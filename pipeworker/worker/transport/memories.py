"""Copies of the state that other hosts hold, for workers that go on from memory.

A host's memory outlives its workers, but only workers of that host can map it. Where a job has
several hosts, the first worker of each lends what is there until all are built; a worker takes from
others what it needs and does not have. What passes is what would be on disk: three files.
"""

from __future__ import annotations

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
from pipeworker.record.memory import Memory
from pipeworker.worker.transport import proof
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.distributed import CoordinatorStore, Network
from pipeworker.worker.transport.proof import Left, Membership, Place, Steps, Stranger

_ASK = struct.Struct("<2q")  # rank, slot
_SIZES = struct.Struct("<3q")
_CHUNK = 1 << 20
_WHAT = "of copies of the state"


class Lender:
    """Lends what a host's memory has, on a thread, until it is closed.

    Args:
        memories: by rank.
        whole: the ranks whose copies others may have.
        store: where they learn of it.

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
        self._key = membership.memory_key()
        self._credentials = _credentials(network, membership)
        self._over = threading.Event()
        host = network.own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=proof.GUESTS)
        for rank in whole:
            store.set(_at(rank), f"{host} {self._listener.getsockname()[1]}")
        self._thread = threading.Thread(target=self._lend, name="lends memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody needs it any more."""
        self._over.set()
        self._thread.join()
        self._listener.close()

    def _lend(self) -> None:
        while not self._over.is_set():
            soon = time.monotonic() + timings().look
            try:
                guest = proof.admit(self._listener, _WHAT, soon, self._steps)
            except TimeoutError:
                continue
            with guest, suppress(OSError):  # whoever has left asks again
                guest.settimeout(timings().handshake)
                self._answer(guest)

    def _steps(self, connection: socket.socket) -> Steps:
        return _proven(connection, self._key, self._credentials, sends=False)

    def _answer(self, guest: socket.socket) -> None:
        rank, slot = _ASK.unpack(_received(guest, _ASK.size))
        if rank not in self._memories or not 0 <= slot < len(self._memories[rank]):
            return
        handles = self._memories[rank][slot].handles
        guest.sendall(_SIZES.pack(*(os.fstat(handle).st_size for handle in handles)))
        for handle in handles:
            at = 0
            while data := os.pread(handle, _CHUNK, at):
                guest.sendall(data)
                at += len(data)


def borrow(
    rank: int, slot: int, store: CoordinatorStore, network: Network, membership: Membership
) -> Memory:
    """A copy of what another host has of a rank; the caller closes it.

    Raises:
        PeerLost: no host has it, or it cannot be reached in time.
        OSError: there is no memory for it.
    """
    where = Place(store, _at(rank), time.monotonic() + timings().connect)
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
            at = 0
            while at < size:
                data = lender.recv(min(_CHUNK, size - at))
                if not data:
                    raise Left("it left")
                at += os.pwrite(handle, data, at)
    except BaseException:
        memory.close()
        raise
    return memory


def _at(rank: int) -> str:
    return f"memory/{rank}"


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
