"""Links between two stages of one host, through shared memory.

The receiver's buffers lie in memory that both processes map (memfd, so nothing has a name or can be
left behind). The receiver says over a Unix socket which buffer it has posted; the sender copies the
tensor straight into it and says so. That is one copy and one wake-up a message, where a socket of
the network costs two copies through the kernel and a thread of its own at either end.

A range of that memory is free when no tensor refers to it any more, and then serves any size that
fits. However the sizes change, no more is held than an eighth above what was in use at once: what
is free beyond that goes back to the system, page by page, for both ends. Memory that is free has
no receive posted into it, so the sender does not write there.

Linux only; elsewhere, between hosts, and with ``--backend gloo``, torch.distributed moves the
tensors (:mod:`pipeworker.worker.transport.links.gloo`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError
from pipeworker.plan.actions import Edge
from pipeworker.worker.transport import proof
from pipeworker.worker.transport.frame import ALIGNMENT
from pipeworker.worker.transport.heap import Heap
from pipeworker.worker.transport.links.arena import Arena, Pin, address_of
from pipeworker.worker.transport.links.link import COMPLETE, OneLane, Pending
from pipeworker.worker.transport.proof import Place

_POST = struct.Struct("<4q")  # tag, arena (-1: inline), offset in it, bytes (-1: forget the arena)
_DONE = struct.Struct("<q")  # tag; an inline payload follows
_POSTS_AT_ONCE = 64
_INLINE_BYTES = 32 << 10
_QUEUE_BYTES = 4 << 20
_ARENA_BYTES = 1 << 20
_SPARE = 8  # what is held besides what was in use at once: this part of it
_HANDLE_BYTES = socket.CMSG_LEN(struct.calcsize("i"))


def host_identity() -> str:
    """Equal for processes that can share memory and meet on a Unix socket, else of no use."""
    if sys.platform != "linux":
        return secrets.token_hex(16)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


def _roomy(connection: socket.socket) -> socket.socket:
    """With room for as many messages under way as the system grants; twice 277 at the least."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
    return connection


@dataclass(slots=True)
class _Receiving:
    link: ReceivingLink
    tensor: torch.Tensor
    inline: bool
    done: bool = False

    def wait(self) -> None:
        while not self.done:
            self.link.take()


class ReceivingLink(OneLane):
    """The target's end. One thread posts and waits."""

    device = torch.device("cpu")
    mapped = True

    def __init__(self, edge: Edge, connection: socket.socket, pin: Pin | None = None) -> None:
        self._edge = edge
        self._pin = pin
        self._socket = _roomy(connection)
        self._arenas: dict[int, Arena] = {}  # by start
        self._numbers = itertools.count()
        self._heap = Heap()
        self._limit = 0  # bytes: the most that was in use at once, and some
        self._touched = 0  # bytes, at most, of pages that were written to
        # What is in use, by address: arena and offset; size, and what notes that it is free again.
        self._places: dict[int, tuple[int, int]] = {}
        self._blocks: dict[int, tuple[int, weakref.ref[memoryview]]] = {}
        self._freed: deque[int] = deque()  # by whatever thread lets go last
        self._posted: dict[int, deque[_Receiving]] = {}
        self._record = bytearray(_DONE.size + _INLINE_BYTES)
        self._inline = ctypes.addressof(ctypes.c_char.from_buffer(self._record, _DONE.size))

    def allocate(self, count: int) -> torch.Tensor:
        """So many bytes that the sender can write to; given out again when nobody uses them."""
        while self._freed:
            start = self._freed.popleft()
            del self._places[start]
            self._heap.give(start, self._blocks.pop(start)[0])
        size = max(1, -(-count // ALIGNMENT)) * ALIGNMENT
        if not self._heap.used and self._heap.total > max(self._limit, _ARENA_BYTES):
            self._drop_arenas()
        start = self._heap.take(size) or self._add_arena(size)
        self._limit = max(self._limit, self._heap.used + self._heap.used // _SPARE)
        self._touched += size
        if self._touched > self._limit:
            self._trim()
        return self._block(start, size)[:count]

    def _block(self, start: int, size: int) -> torch.Tensor:
        """Memory with a storage of its own, which says when nothing refers to it any more."""
        arena, freed = self._arenas[self._heap.region(start)], self._freed
        view = arena.use(start, size)
        self._blocks[start] = size, weakref.ref(view, lambda _: freed.append(start))
        self._places[start] = arena.number, start - arena.start
        return torch.frombuffer(view, dtype=torch.uint8)

    def _add_arena(self, size: int) -> int:
        """Take so many bytes of a new arena, which also replaces those that nobody uses."""
        self._drop_arenas()
        heap = self._heap
        room = max(size, self._limit - heap.total, heap.used, _ARENA_BYTES)  # few, as each doubles
        try:
            arena = Arena(next(self._numbers), room, self._pin)
            try:
                socket.send_fds(self._socket, [_POST.pack(-1, -1, 0, arena.size)], [arena.handle])
            finally:
                os.close(arena.handle)
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error
        self._arenas[arena.start] = arena
        heap.add(arena.start, arena.size)
        return heap.take(size) or 0

    def _drop_arenas(self) -> None:
        """Forget those that nobody uses, at both ends."""
        for arena in [a for start, a in self._arenas.items() if self._heap.remove(start)]:
            arena.clear(arena.start, arena.size)  # the other end may take its time
            del self._arenas[arena.start]
            try:
                self._socket.send(_POST.pack(-1, arena.number, 0, -1))
            except OSError as error:
                raise PeerLost(f"the channel {self._edge} closed: {error}") from error

    def _trim(self) -> None:
        """Give the system back what is free, if more is held than was in use, and some."""
        self._touched = sum(arena.held for arena in self._arenas.values())
        if self._touched > self._limit:
            for start, size in self._heap.free():
                self._arenas[self._heap.region(start)].clear(start, size)
            self._touched = self._heap.used

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        raise AssertionError(f"{self._edge} ends here")

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        posts: list[bytes] = []
        pending: list[Pending] = []
        for tensor in tensors:
            block = tensor.untyped_storage().data_ptr()
            number, offset = self._places.get(block, (-1, 0))
            if number < 0 and tensor.nbytes > _INLINE_BYTES:
                raise ValueError(f"{tensor.nbytes} bytes need memory from allocate()")
            offset += tensor.data_ptr() - block
            posts.append(_POST.pack(tag, number, offset, tensor.nbytes))
            receiving = _Receiving(self, tensor, number < 0)
            self._posted.setdefault(tag, deque()).append(receiving)
            pending.append(receiving)
        try:
            for start in range(0, len(posts), _POSTS_AT_ONCE):
                self._socket.send(b"".join(posts[start : start + _POSTS_AT_ONCE]))
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error
        return pending

    def close(self) -> None:
        """The memory goes when nothing refers to it any more."""
        self._socket.close()

    def take(self) -> None:
        """Wait for one message and complete the receive it is for."""
        try:
            size = self._socket.recv_into(self._record)
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error
        if not size:
            raise PeerLost(f"the channel {self._edge} closed: the sender is gone")
        (tag,) = _DONE.unpack_from(self._record)
        posted, count = self._posted.get(tag), size - _DONE.size
        pending = posted.popleft() if posted else None
        if pending is None or not 0 <= count <= (pending.tensor.nbytes if pending.inline else 0):
            raise ProtocolError(
                f"the channel {self._edge}: {size} bytes that nothing was posted for"
            )
        ctypes.memmove(pending.tensor.data_ptr(), self._inline, count)
        pending.done = True


@dataclass(slots=True, eq=False)
class _Sending:
    tensor: torch.Tensor | None  # until it is delivered
    tag: int
    done: threading.Event = field(default_factory=threading.Event)
    error: PipeworkerError | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class SendingLink(OneLane):
    """The source's end. A send that finds no posted buffer is finished by a thread."""

    device = torch.device("cpu")

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        self._edge = edge
        self._socket = _roomy(connection)
        self._arenas: dict[int, tuple[mmap.mmap, int]] = {}  # by number, with their addresses
        self._mapped = itertools.count()  # numbers, as at the other end
        # By tag: address (0: inline) and bytes, and what keeps that memory.
        self._posts: dict[int, deque[tuple[int, int, mmap.mmap | None]]] = {}
        self._lock = threading.Lock()
        self._queue: list[_Sending] = []  # while there is one, only the thread reads the socket
        self._work = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._closing = False

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        raise AssertionError(f"{self._edge} begins here")

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        with self._lock:
            if not self._queue:
                while not (posts := self._posts.get(tag)):
                    heard = self._hear(socket.MSG_DONTWAIT)
                    if heard is None:
                        break
                    self._register(*heard)
                if posts:
                    self._deliver(tensor, tag)
                    return COMPLETE
            sending = _Sending(tensor, tag)
            self._queue.append(sending)
            self._deliver_posted()
            if sending.done.is_set():
                return COMPLETE
        if self._thread is None:
            self._thread = threading.Thread(target=self._finish, name=str(self._edge), daemon=True)
            self._thread.start()
        self._work.release()
        return sending

    def close(self) -> None:
        """End the thread as well; what is queued is not delivered."""
        self._closing = True
        self._work.release()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits on it
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        self._give_up(PeerLost(f"the channel {self._edge} was closed"))

    def _finish(self) -> None:
        """Deliver what is queued as its buffers are posted."""
        while self._work.acquire() and not self._closing:
            while self._queue:
                try:
                    heard = self._hear(0)
                    with self._lock:
                        if heard:
                            self._register(*heard)
                        self._deliver_posted()
                except PipeworkerError as error:
                    self._give_up(error)

    def _give_up(self, error: PipeworkerError) -> None:
        with self._lock:
            for sending in self._queue:
                sending.error = error
                sending.done.set()
            self._queue.clear()

    def _hear(self, flags: int) -> tuple[bytes, list[tuple[int, int, bytes]]] | None:
        """One record of the receiver's and what came with it; None when none has come."""
        try:
            record, ancillary, _, _ = self._socket.recvmsg(
                _POSTS_AT_ONCE * _POST.size, _HANDLE_BYTES, flags
            )
        except BlockingIOError:
            return None
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error
        if not record:
            raise PeerLost(f"the channel {self._edge} closed: the receiver is gone")
        return record, ancillary

    def _register(self, record: bytes, ancillary: list[tuple[int, int, bytes]]) -> None:
        """Note posted buffers, map a new arena, or forget one."""
        if ancillary:
            self._map(record, ancillary[0][2])
            return
        if len(record) % _POST.size:
            raise self._wrong(f"{len(record)} bytes")
        for tag, number, offset, count in _POST.iter_unpack(record):
            memory, start = self._arenas.get(number, (None, 0))
            if memory is None and number != -1:
                raise self._wrong(f"arena {number}")
            if memory is not None and count < 0:
                del self._arenas[number]
                continue
            room = _INLINE_BYTES if memory is None else len(memory) - offset
            if offset < 0 or not 0 <= count <= room:
                raise self._wrong(f"{count} bytes at {offset}, where there is room for {room}")
            address = 0 if memory is None else start + offset
            self._posts.setdefault(tag, deque()).append((address, count, memory))

    def _map(self, record: bytes, handles: bytes) -> None:
        """Memory that the receiver has made, and can no longer make smaller under our hands."""
        (handle,) = array.array("i", handles)
        try:
            _, _, _, count = _POST.unpack(record)
            if not fcntl.fcntl(handle, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise self._wrong("memory that may shrink")
            arena = mmap.mmap(handle, count)
        except (OSError, ValueError, OverflowError, struct.error) as error:
            raise self._wrong(f"memory: {error}") from error
        finally:
            os.close(handle)
        self._arenas[next(self._mapped)] = arena, address_of(arena)

    def _wrong(self, what: str) -> ProtocolError:
        return ProtocolError(f"the channel {self._edge}: the receiver posted {what}")

    def _deliver_posted(self) -> None:
        """Deliver, in order within each tag, every queued send whose buffer is posted."""
        blocked: set[int] = set()
        for sending in list(self._queue):
            if sending.tag in blocked or not self._posts.get(sending.tag):
                blocked.add(sending.tag)
                continue
            assert sending.tensor is not None
            self._deliver(sending.tensor, sending.tag)
            sending.tensor = None  # who waits for this send later need not keep it
            self._queue.remove(sending)
            sending.done.set()

    def _deliver(self, tensor: torch.Tensor, tag: int) -> None:
        address, count, _memory = self._posts[tag].popleft()
        record = _DONE.pack(tag)
        size = min(count, tensor.nbytes)
        if address:
            ctypes.memmove(address, tensor.data_ptr(), size)
        else:
            record += ctypes.string_at(tensor.data_ptr(), min(size, _INLINE_BYTES))
        try:
            self._socket.send(record)
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error


def connect(
    edge: Edge, secret: bytes, where: Place, pin: Pin | None = None, *, sends: bool
) -> ReceivingLink | SendingLink:
    """Connect this worker's end of an edge whose other end is on the same host.

    Args:
        pin: has an accelerator copy from the memory by itself.

    Raises:
        as :func:`meet`.
    """
    connection = meet(edge, secret, where, sends=sends)
    return SendingLink(edge, connection) if sends else ReceivingLink(edge, connection, pin)


def meet(edge: Edge, secret: bytes, where: Place, *, sends: bool) -> socket.socket:
    """A Unix socket to the other end of an edge, which has proven itself.

    Args:
        secret: what the two ends alone know.

    Raises:
        OSError: the other end cannot be reached.
        Stranger: who listens in its place is not the peer.
    """
    family, kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
    if sends:
        connection = socket.socket(family, kind)
        steps = proof.over(connection, proof.proving(secret, sends=True))
        try:
            name = where.store.get(where.key)
            # A timeout of Python's would not wait while strangers fill the queue at the door.
            seconds, rest = divmod(where.left(), 1)
            limit = struct.pack("2l", int(seconds), int(1e6 * rest))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(b"\0" + name)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("2l", 0, 0))
        except OSError:
            connection.close()
            raise
        return proof.finish(steps, connection, where.deadline)

    def steps_of(connection: socket.socket) -> proof.Steps:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[1] == os.getuid():
            return proof.over(connection, proof.proving(secret, sends=False))
        return proof.refused(connection, "it is another user's")

    ours = f"pipeworker-{secrets.token_hex(16)}"
    with contextlib.closing(socket.socket(family, kind)) as listener:
        listener.bind(f"\0{ours}")
        listener.listen(proof.GUESTS)
        where.store.set(where.key, ours)
        return proof.admit(listener, edge, where.deadline, steps_of)
