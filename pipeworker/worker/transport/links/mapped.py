"""A lane between two processes of a host whose devices map each other's memory.

The receiver's buffers lie in memory of its device that the sender maps. The receiver reports over a
Unix socket which buffer it has posted, and an event marks when its device has finished using it.
The sender's device copies into the buffer, and a second event marks when the copy is done. Neither
host waits for a device. A copy waits only for work submitted to the devices before it, and edges
are not ordered against each other, so devices cannot deadlock.

A buffer and its two events are introduced once, with the first post and the first copy; later
records refer to them by number. All messages are expected ones (see the channel): they have one
tag, and each is as long as its buffer.
"""

from __future__ import annotations

import itertools
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from pipeworker.errors import ProtocolError, first_line
from pipeworker.host import streams
from pipeworker.plan.actions import Edge
from pipeworker.record.checkpoint.tensor_file import raw_bytes
from pipeworker.worker.device.accelerator import Accelerator, CudaIpc, Event, Signal
from pipeworker.worker.transport.handshake import AuthenticationError
from pipeworker.worker.transport.links.link import OneLane, Pending, PendingReceive, peer_lost
from pipeworker.worker.transport.links.sending import RECORD_BYTES, Ancillary, PostedSender

_MAPPING_ERRORS = (RuntimeError, OSError, ValueError, TypeError)  # torch's, if it cannot map


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory of the receiver's device; `written` is None until the first copy into it."""

    number: int
    free: Signal
    written: Signal | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class _MappedBuffer(_Buffer):
    """A buffer as the sender maps it."""

    memory: torch.Tensor


class ReceivingLane(OneLane):
    """The target's end. One thread posts and waits."""

    mapped = True

    def __init__(
        self, edge: Edge, connection: socket.socket, accelerator: Accelerator, mapping: CudaIpc
    ) -> None:
        self.device = accelerator.device
        self._accelerator, self._mapping = accelerator, mapping
        self._edge, self._socket = edge, connection
        self._numbers = itertools.count()
        self._buffers: dict[int, _Buffer] = {}  # by the address of their storage
        self._freed: deque[tuple[int, int]] = deque()  # address and number
        self._posted: deque[tuple[PendingReceive, _Buffer]] = deque()

    def allocate(self, count: int) -> torch.Tensor:
        return self._accelerator.empty(count)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        """Post buffers of the device, to be written once the current stream has used them."""
        while self._freed:  # no tensor refers to these buffers any more
            address, number = self._freed.popleft()
            del self._buffers[address]
            self._send_record(number)
        pending = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            buffer = self._buffers.get(storage.data_ptr())
            handles: tuple[bytes, ...] = ()
            if buffer is None:
                buffer, handles = self._introduce(storage, tensor)
            buffer.free.record(self._accelerator.current)
            offset = tensor.data_ptr() - storage.data_ptr()
            self._send_record(buffer.number, offset, tensor.nbytes, *handles)
            receive = PendingReceive(self.complete, tensor)
            self._posted.append((receive, buffer))
            pending.append(receive)
        return pending

    def complete(self, receive: PendingReceive) -> None:
        """Make the current stream wait for the copy into a posted buffer."""
        while receive.work is None:
            self._read_notice()
        self._accelerator.current.wait_event(receive.work)

    def close(self) -> None:
        self._socket.close()

    def _introduce(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor
    ) -> tuple[_Buffer, tuple[bytes, ...]]:
        """Return a new buffer, and the handles by which the sender maps it and its event."""
        free, handle = self._mapping.signal()
        buffer = _Buffer(next(self._numbers), free)
        address = storage.data_ptr()
        self._buffers[address] = buffer
        weakref.finalize(storage, self._freed.append, (address, buffer.number)).atexit = False
        return buffer, (self._mapping.share(tensor), handle)

    def _send_record(self, *fields: Any) -> None:
        try:
            self._socket.send(msgpack.packb(fields))
        except OSError as error:
            raise peer_lost(self._edge, error) from error

    def _read_notice(self) -> None:
        """Wait for one notice, and note the event of the receive it is for."""
        try:
            record = self._socket.recv(RECORD_BYTES)
        except OSError as error:
            raise peer_lost(self._edge, error) from error
        if not record:
            raise peer_lost(self._edge, "the sender is gone")
        number, handle = read_notice(record)
        if not self._posted or self._posted[0][1].number != number:
            raise ProtocolError(f"the channel {self._edge}: buffer {number} was not posted")
        receive, buffer = self._posted.popleft()
        if handle:
            buffer.written = self._mapping.signal_of(handle)
        if buffer.written is None:
            raise ProtocolError(f"the channel {self._edge}: buffer {number} has no event")
        receive.work = buffer.written


class SendingLane(PostedSender):
    """The source's end. The device copies; the host only reports that the copy is submitted."""

    def __init__(
        self, edge: Edge, connection: socket.socket, accelerator: Accelerator, mapping: CudaIpc
    ) -> None:
        super().__init__(edge, connection)
        self.device = accelerator.device
        self._accelerator, self._mapping = accelerator, mapping
        self._buffers: dict[int, _MappedBuffer] = {}
        self._posts: dict[int, deque[tuple[_MappedBuffer, int, int]]] = {}  # offset, bytes
        self._computed: deque[Event] = deque()

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Submit a copy that waits for the current stream; complete once it is submitted."""
        accelerator = self._accelerator
        accelerator.used(tensor, accelerator.sends)
        self._computed.append(accelerator.event(accelerator.current))
        return super().send(tensor, 0)

    def _register(self, record: bytes, ancillary: Ancillary) -> None:
        number, location, handles = read_post(record)
        if location is None:
            self._buffers.pop(number, None)
            return
        if handles:
            try:
                memory = self._mapping.map(handles[0])
                free = self._mapping.signal_of(handles[1])
            except _MAPPING_ERRORS as error:
                raise self._invalid(f"memory that cannot be mapped: {error}") from error
            self._buffers[number] = _MappedBuffer(number, free, memory=memory)
        buffer = self._buffers.get(number)
        offset, count = location
        if buffer is None or offset + count > buffer.memory.nbytes:
            raise self._invalid(f"{count} bytes at {offset} of buffer {number}")
        self._posts.setdefault(0, deque()).append((buffer, offset, count))

    def _deliver(self, tensor: torch.Tensor, tag: int) -> None:
        buffer, offset, count = self._posts[tag].popleft()
        accelerator = self._accelerator
        handle = b""
        if buffer.written is None:
            buffer.written, handle = self._mapping.signal()
        sends, size = accelerator.sends, min(count, tensor.nbytes)
        target, source = buffer.memory, raw_bytes(tensor)
        if size < target.nbytes:  # a slice takes time as well
            target = target[offset : offset + size]
        if size < source.nbytes:
            source = source[:size]
        with accelerator.using(sends):
            sends.wait_event(self._computed.popleft())
            sends.wait_event(buffer.free)
            accelerator.copy(target, source)
            buffer.written.record(sends)
        try:
            self._socket.send(msgpack.packb((buffer.number, handle)))
        except OSError as error:
            raise peer_lost(self._edge, error) from error


def read_post(record: bytes) -> tuple[int, tuple[int, int] | None, tuple[bytes, ...]]:
    """Return the fields of a receiver's record; raise ProtocolError if it is invalid.

    They are the number of a buffer; the offset and bytes to write there, or None if the buffer is
    no longer used; and for a new buffer the handles of its memory and event.
    """
    place = (int,) * 3
    fields = _unpack(record, "a posted buffer", (int,), place, (*place, bytes, bytes))
    if min(fields[:3]) < 0:
        raise ProtocolError("not a posted buffer")
    return fields[0], fields[1:3] or None, fields[3:]


def read_notice(record: bytes) -> tuple[int, bytes]:
    """Return the number of a written buffer, and the handle of the event if it is new."""
    number, handle = _unpack(record, "a notice of a written buffer", (int, bytes))
    return number, handle


def _unpack(record: bytes, name: str, *types: tuple[type, ...]) -> tuple[Any, ...]:
    """Return the fields of a record, which must have one of these sequences of types."""
    try:
        fields = msgpack.unpackb(record, use_list=False)
    except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own types
        raise ProtocolError(f"not {name}: {type(error).__name__}") from error
    if type(fields) is not tuple or tuple(map(type, fields)) not in types:
        raise ProtocolError(f"not {name}")
    return fields


def negotiate(
    connection: socket.socket, edge: Edge, accelerator: Accelerator, *, sends: bool
) -> ReceivingLane | SendingLane | None:
    """Return this end's lane if the sender can map the receiver's memory, else log the reason.

    The timeout of `connection`, an authenticated socket to the other end, ends with this call.

    Raises:
        OSError: the other end is gone, or silent.
        AuthenticationError: the other end has sent an invalid record.
    """
    mapping = accelerator.mapping
    assert mapping
    try:
        reason = (_try_offer if sends else _offer)(connection, accelerator, mapping)
        connection.settimeout(None)
    except (OSError, AuthenticationError):
        connection.close()
        raise
    if reason:
        connection.close()
        streams.note(f"{edge}: tensors pass through the host, since devices cannot share: {reason}")
        return None
    lane_type = SendingLane if sends else ReceivingLane
    return lane_type(edge, connection, accelerator, mapping)


def _offer(connection: socket.socket, accelerator: Accelerator, mapping: CudaIpc) -> str:
    """Offer the sender memory and an event to map; return why that is impossible, or ""."""
    memory, signal, handles = accelerator.empty(1), None, (b"", b"")
    reason = ""
    try:
        signal, handle = mapping.signal()
        handles = mapping.share(memory), handle
    except _MAPPING_ERRORS as error:
        reason = first_line(error)[:500]
    connection.sendall(msgpack.packb((reason, *handles)))
    (reply,) = _receive_fields(connection, str)
    del memory, signal  # until the reply: a handle of what is freed cannot be opened
    return reason or reply


def _try_offer(connection: socket.socket, accelerator: Accelerator, mapping: CudaIpc) -> str:
    """Map the receiver's offer; return why that is impossible, or ""."""
    reason, memory, event = _receive_fields(connection, str, bytes, bytes)
    if not reason:
        try:
            mapping.map(memory)
            mapping.signal_of(event)
        except _MAPPING_ERRORS as error:
            reason = first_line(error)[:500]
    connection.sendall(msgpack.packb((reason,)))
    return str(reason)


def _receive_fields(connection: socket.socket, *types: type) -> tuple[Any, ...]:
    record = connection.recv(RECORD_BYTES)
    if not record:
        raise ConnectionError("the other end is gone")
    try:
        return _unpack(record, "an offer", types)
    except ProtocolError as error:
        raise AuthenticationError("its offer of memory to map is invalid") from error
