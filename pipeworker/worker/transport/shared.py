"""Links between two stages of one host, through shared memory.

The receiver's buffers lie in memory that both processes map (memfd, so nothing has a name or can be
left behind). The receiver says over a Unix socket which buffer it has posted; the sender copies the
tensor straight into it and says so. That is one copy and one wake-up a message, where a socket of
the network costs two copies through the kernel and a thread of its own at either end.

Linux only; elsewhere, between hosts, and with ``--backend gloo``, torch.distributed moves the
tensors (:mod:`pipeworker.worker.transport.distributed`).
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pipeworker.errors import PeerLost
from pipeworker.plan.actions import Edge
from pipeworker.worker.internals import storage_uses
from pipeworker.worker.transport import proof
from pipeworker.worker.transport.link import COMPLETE, OneLane, Pending
from pipeworker.worker.transport.proof import Place

_POST = struct.Struct("<4q")  # tag, arena (-1: inline), offset in it, bytes
_DONE = struct.Struct("<q")  # tag; an inline payload follows
_POSTS_AT_ONCE = 64
_INLINE_BYTES = 32 << 10
_QUEUE_BYTES = 4 << 20
_ARENA_BYTES = 1 << 20
_UNUSED = 2  # references to memory nobody else has: ours and the look
_LOOKS = 16  # at blocks that may be free again, before a new one is made: thousands may be in use
_HANDLE_BYTES = socket.CMSG_LEN(struct.calcsize("i"))


def host_identity() -> str:
    """Equal for processes that can share memory and meet on a Unix socket, else of no use."""
    if sys.platform != "linux":
        return secrets.token_hex(16)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}/{os.getuid()}"


def _rounded(count: int) -> int:
    """Up to a size that memory of other counts can share, within an eighth."""
    step = max(4096, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


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

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        self._edge = edge
        self._socket = _roomy(connection)
        self._arenas: list[mmap.mmap] = []
        self._used = 0  # bytes of the last arena
        self._blocks: dict[int, deque[torch.Tensor]] = {}  # by size, last looked at last
        self._places: dict[int, tuple[int, int]] = {}  # arena and offset, by address of the block
        self._posted: dict[int, deque[_Receiving]] = {}
        self._record = bytearray(_DONE.size + _INLINE_BYTES)
        self._inline = ctypes.addressof(ctypes.c_char.from_buffer(self._record, _DONE.size))

    def allocate(self, count: int) -> torch.Tensor:
        """So many bytes that the sender can write to; given out again when nobody uses them."""
        size = _rounded(count)
        known = self._blocks.setdefault(size, deque())
        for _ in range(min(_LOOKS, len(known))):
            known.rotate(-1)
            if storage_uses(known[-1]) <= _UNUSED:
                return known[-1][:count]
        known.append(self._new_block(size))
        return known[-1][:count]

    def _new_block(self, size: int) -> torch.Tensor:
        """A part of an arena, with a storage of its own. Each arena is twice the last."""
        if not self._arenas or self._used + size > len(self._arenas[-1]):
            last = len(self._arenas[-1]) if self._arenas else _ARENA_BYTES // 2
            self._add_arena(max(size, 2 * last))
        arena, offset = self._arenas[-1], self._used
        self._used += size
        block = torch.frombuffer(arena, dtype=torch.uint8, offset=offset, count=size)
        self._places[block.data_ptr()] = len(self._arenas) - 1, offset
        return block

    def _add_arena(self, size: int) -> None:
        handle = os.memfd_create("pipeworker", os.MFD_CLOEXEC)
        try:
            os.ftruncate(handle, size)
            self._arenas.append(mmap.mmap(handle, size))
            self._used = 0
            socket.send_fds(self._socket, [_POST.pack(-1, -1, 0, size)], [handle])
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error
        finally:
            os.close(handle)

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
        pending = self._posted[tag].popleft()
        if pending.inline:
            ctypes.memmove(pending.tensor.data_ptr(), self._inline, size - _DONE.size)
        pending.done = True


@dataclass(slots=True, eq=False)
class _Sending:
    tensor: torch.Tensor | None  # until it is delivered
    tag: int
    done: threading.Event = field(default_factory=threading.Event)
    error: PeerLost | None = None

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
        self._arenas: list[tuple[mmap.mmap, int]] = []  # and their addresses
        self._posts: dict[int, deque[tuple[int, int]]] = {}  # by tag: address (0: inline), bytes
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
                except PeerLost as error:
                    self._give_up(error)

    def _give_up(self, error: PeerLost) -> None:
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
        """Note posted buffers, or map a new arena."""
        if not ancillary:
            for tag, number, offset, count in _POST.iter_unpack(record):
                address = 0 if number < 0 else self._arenas[number][1] + offset
                self._posts.setdefault(tag, deque()).append((address, count))
            return
        _, _, _, count = _POST.unpack(record)
        (handle,) = array.array("i", ancillary[0][2])
        try:
            arena = mmap.mmap(handle, count)
        finally:
            os.close(handle)
        self._arenas.append((arena, ctypes.addressof(ctypes.c_char.from_buffer(arena))))

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
        address, count = self._posts[tag].popleft()
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


def connect(edge: Edge, secret: bytes, where: Place, *, sends: bool) -> ReceivingLink | SendingLink:
    """Connect this worker's end of an edge whose other end is on the same host.

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
        return SendingLink(edge, proof.finish(steps, connection, where.deadline))

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
        return ReceivingLink(edge, proof.admit(listener, edge, where.deadline, steps_of))
