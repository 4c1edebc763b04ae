"""Links between two stages of one host, through shared memory.

The receiver's buffers lie in memory that both processes map (memfd: it has no name and cannot be
left behind). The receiver reports over a Unix socket which buffers it has posted; the sender copies
the tensor into the buffer and reports that. A message costs one copy and one wake-up, where a
network socket costs two copies through the kernel and a thread at either end.

Free memory has no receive posted into it, so the sender does not write there.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

import torch

from pipeworker.errors import PipeworkerError, ProtocolError
from pipeworker.plan.actions import Edge
from pipeworker.worker.transport.links.arena import Arena, ArenaAllocator, Pin, address_of
from pipeworker.worker.transport.links.link import OneLane, Pending, PendingReceive, peer_lost
from pipeworker.worker.transport.links.sending import RECORD_BYTES, Ancillary, PostedSender

POST = struct.Struct("<4q")
"""The receiver's record of a buffer: tag, arena (-1: the data is to come in the notice itself),
offset in the arena, bytes (-1: the arena is released). With a descriptor, the record of a new
arena: -1, -1, 0, bytes."""
NOTICE = struct.Struct("<q")
"""The sender's record of a delivered message: its tag, then the data if no arena has it."""
POSTS_AT_ONCE = RECORD_BYTES // POST.size
"""Posts in one record, at most."""
_INLINE_BYTES = 32 << 10
_QUEUE_BYTES = 4 << 20  # room for as many records as the system grants; at the least for twice 277


class ReceivingLink(OneLane):
    """The target's end. One thread posts and waits.

    `pin` pins memory, so that an accelerator copies from it by itself.
    """

    mapped = True

    def __init__(self, edge: Edge, connection: socket.socket, pin: Pin | None = None) -> None:
        self._edge = edge
        self._socket = connection
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        self._allocator = ArenaAllocator(self._report, pin)
        self._locations = self._allocator.locations
        # By tag: receives, with the bytes that a notice may carry for them.
        self._posted: dict[int, deque[tuple[PendingReceive, int]]] = {}
        self._record = bytearray(NOTICE.size + _INLINE_BYTES)
        self._inline = ctypes.addressof(ctypes.c_char.from_buffer(self._record, NOTICE.size))

    def allocate(self, count: int) -> torch.Tensor:
        try:
            return self._allocator.allocate(count)
        except OSError as error:
            raise _no_memory(self._edge, error) from error

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        """Post buffers in memory from :meth:`allocate`, or elsewhere of 32 KB at most."""
        posts: list[bytes] = []
        pending: list[PendingReceive] = []
        queue = self._posted.setdefault(tag, deque())
        for tensor in tensors:
            start, count = tensor.untyped_storage().data_ptr(), tensor.nbytes
            number, offset = self._locations.get(start, (-1, 0))
            if number < 0 and count > _INLINE_BYTES:
                raise ValueError(f"{count} bytes need memory from allocate()")
            offset += tensor.data_ptr() - start
            posts.append(POST.pack(tag, number, offset, count))
            receive = PendingReceive(self.complete, tensor)
            queue.append((receive, count if number < 0 else 0))
            pending.append(receive)
        try:
            for first in range(0, len(posts), POSTS_AT_ONCE):
                self._socket.send(b"".join(posts[first : first + POSTS_AT_ONCE]))
        except OSError as error:
            raise peer_lost(self._edge, error) from error
        return pending

    def complete(self, receive: PendingReceive) -> None:
        """Read notices until a receive is done."""
        while not receive.done:
            try:
                size = self._socket.recv_into(self._record)
            except OSError as error:
                raise peer_lost(self._edge, error) from error
            if not size:
                raise peer_lost(self._edge, "the sender is gone")
            (tag,) = NOTICE.unpack_from(self._record)
            queue, count = self._posted.get(tag), size - NOTICE.size
            posted, limit = queue.popleft() if queue else (None, 0)
            if posted is None or not 0 <= count <= limit:
                raise ProtocolError(
                    f"the channel {self._edge}: received {size} bytes for which no buffer was "
                    "posted"
                )
            if count:
                ctypes.memmove(posted.tensor.data_ptr(), self._inline, count)
            posted.done = True

    def close(self) -> None:
        """Close the socket; the memory stays until no tensor refers to it."""
        self._socket.close()

    def _report(self, arena: Arena, new: bool) -> None:
        place = (-1, 0, arena.size) if new else (arena.number, 0, -1)
        descriptors = [arena.descriptor] if new else []
        try:
            socket.send_fds(self._socket, [POST.pack(-1, *place)], descriptors)
        except OSError as error:
            raise peer_lost(self._edge, error) from error


class SendingLink(PostedSender):
    """The source's end. It writes only into the memory that the receiver has posted."""

    ancillary_bytes = socket.CMSG_LEN(struct.calcsize("i"))

    def __init__(self, edge: Edge, connection: socket.socket) -> None:
        super().__init__(edge, connection)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        self._arenas: dict[int, tuple[mmap.mmap, int]] = {}  # by number, with their addresses
        self._numbers = itertools.count()  # as the receiver counts them
        # By tag: address (0: inline), bytes, and the object that keeps the memory mapped.
        self._posts: dict[int, deque[tuple[int, int, mmap.mmap | None]]] = {}

    def _register(self, record: bytes, ancillary: Ancillary) -> None:
        """Note posted buffers, map a new arena, or unmap one."""
        if ancillary:
            self._map(record, ancillary[0][2])
            return
        if len(record) % POST.size:
            raise self._invalid(f"{len(record)} bytes")
        for tag, number, offset, count in POST.iter_unpack(record):
            memory, start = self._arenas.get(number, (None, 0))
            if memory is None and number != -1:
                raise self._invalid(f"arena {number}")
            if memory is not None and count < 0:
                del self._arenas[number]
                continue
            room = _INLINE_BYTES if memory is None else len(memory) - offset
            if offset < 0 or not 0 <= count <= room:
                raise self._invalid(f"{count} bytes at {offset}, where there is room for {room}")
            address = 0 if memory is None else start + offset
            self._posts.setdefault(tag, deque()).append((address, count, memory))

    def _map(self, record: bytes, descriptors: bytes) -> None:
        """Map an arena of the receiver, which cannot shrink while this end writes to it."""
        (descriptor,) = array.array("i", descriptors)
        try:
            _, _, _, count = POST.unpack(record)
            if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise self._invalid("memory that may shrink")
            arena = mmap.mmap(descriptor, count)
        except (OSError, ValueError, OverflowError, struct.error) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:  # for this process alone
                raise _no_memory(self._edge, error) from error
            raise self._invalid(f"memory: {error}") from error
        finally:
            os.close(descriptor)
        self._arenas[next(self._numbers)] = arena, address_of(arena)

    def _deliver(self, tensor: torch.Tensor, tag: int) -> None:
        address, count, _memory = self._posts[tag].popleft()
        record = NOTICE.pack(tag)
        size = min(count, tensor.nbytes)
        if address:
            ctypes.memmove(address, tensor.data_ptr(), size)
        else:
            record += ctypes.string_at(tensor.data_ptr(), size)
        try:
            self._socket.send(record)
        except OSError as error:
            raise peer_lost(self._edge, error) from error


def _no_memory(edge: Edge, error: OSError) -> PipeworkerError:
    return PipeworkerError(
        f"the channel {edge}: no shared memory: {error.strerror}; free memory on this host, or "
        "raise its limit (ulimit -f and -v, the cgroup's memory)"
    )
