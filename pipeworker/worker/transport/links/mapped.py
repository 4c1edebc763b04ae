"""A lane between two processes of a host whose devices reach each other's memory.

The receiver's buffers lie in memory of its device that the sender maps. The receiver says over a
Unix socket which buffer it has posted, and an event says when its own work has done with it; the
sender's device copies straight into it, and another event says when that is done. Neither host
waits for a device, and nothing is ordered between two edges: a copy waits for what was given to
the devices before it, so there is no way for them to wait for each other in a circle.

A buffer and its two events are introduced once, with the first post and the first copy, and are
known by a number from then on. All messages are expected ones (see the channel): of one tag, and
each as long as its buffer.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from pipeworker.errors import PeerLost, ProtocolError
from pipeworker.host import streams
from pipeworker.plan.actions import Edge
from pipeworker.worker.device.accelerator import Accelerator, Event
from pipeworker.worker.device.mapping import Mapping, Signal
from pipeworker.worker.transport.links import shared
from pipeworker.worker.transport.links.link import Link, Pending, TwoLanes, bytes_of
from pipeworker.worker.transport.proof import Place, Stranger

_RECORD_BYTES = 2048
_FAILURES = (RuntimeError, OSError, ValueError, TypeError)  # of torch's, where it cannot map


@dataclass(slots=True, eq=False)
class _Buffer:
    """Of the receiver's device; `written` is known once the sender has copied to it."""

    number: int
    free: Signal
    written: Signal | None = None


@dataclass(slots=True, eq=False)
class _Receiving:
    lane: ReceivingLane
    buffer: _Buffer
    done: bool = False

    def wait(self) -> None:
        """The current stream goes on when the tensor is there."""
        while not self.done:
            self.lane.take()
        self.lane.accelerator.current.wait_event(self.buffer.written)


class ReceivingLane:
    """The target's end. One thread posts and waits."""

    mapped = True

    def __init__(
        self, edge: Edge, connection: socket.socket, accelerator: Accelerator, mapping: Mapping
    ) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self._edge, self._socket, self._mapping = edge, connection, mapping
        self._numbers = itertools.count()
        self._buffers: dict[int, _Buffer] = {}  # by the address of their storage
        self._freed: deque[tuple[int, int]] = deque()  # address and number
        self._posted: deque[_Receiving] = deque()

    def allocate(self, count: int) -> torch.Tensor:
        return self.accelerator.empty(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        raise AssertionError(f"{self._edge} ends here")

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        self._forget()
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            buffer = self._buffers.get(storage.data_ptr())
            handles: tuple[bytes, ...] = ()
            if buffer is None:
                buffer, handles = self._introduced(storage, tensor)
            buffer.free.record(self.accelerator.current)
            offset = tensor.data_ptr() - storage.data_ptr()
            self._say(buffer.number, offset, tensor.nbytes, *handles)
            found.append(_Receiving(self, buffer))
        self._posted += found
        return found

    def _introduced(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor
    ) -> tuple[_Buffer, tuple[bytes, ...]]:
        free, handle = self._mapping.signal()
        buffer = _Buffer(next(self._numbers), free)
        address = storage.data_ptr()
        self._buffers[address] = buffer
        weakref.finalize(storage, self._freed.append, (address, buffer.number)).atexit = False
        return buffer, (self._mapping.share(tensor), handle)

    def _forget(self) -> None:
        """What nobody has any more, at both ends."""
        while self._freed:
            address, number = self._freed.popleft()
            del self._buffers[address]
            self._say(number)

    def _say(self, *what: Any) -> None:
        try:
            self._socket.send(msgpack.packb(what))
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error

    def take(self) -> None:
        """Wait for one message and complete the receive it is for."""
        try:
            record = self._socket.recv(_RECORD_BYTES)
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error
        if not record:
            raise PeerLost(f"the channel {self._edge} closed: the sender is gone")
        number, handle = read_done(record)
        if not self._posted or self._posted[0].buffer.number != number:
            raise ProtocolError(f"the channel {self._edge}: buffer {number} was not posted")
        receiving = self._posted.popleft()
        if handle:
            receiving.buffer.written = self._mapping.signal_of(handle)
        if receiving.buffer.written is None:
            raise ProtocolError(f"the channel {self._edge}: buffer {number} has no event")
        receiving.done = True

    def close(self) -> None:
        self._socket.close()


@dataclass(slots=True, eq=False)
class _Mapped:
    """A buffer of the receiver's."""

    memory: torch.Tensor
    free: Signal
    written: Signal | None = None


class SendingLane(shared.SendingLink):
    """The source's end. A send that finds no posted buffer is finished by a thread."""

    def __init__(
        self, edge: Edge, connection: socket.socket, accelerator: Accelerator, mapping: Mapping
    ) -> None:
        super().__init__(edge, connection)
        self.device = accelerator.device
        self._accelerator, self._mapping = accelerator, mapping
        self._mapped_buffers: dict[int, _Mapped] = {}
        self._ready: deque[tuple[int, int, int]] = deque()  # number, offset, bytes
        self._computed: deque[Event] = deque()

    def allocate(self, count: int) -> torch.Tensor:
        return self._accelerator.empty(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """What the current stream computes, behind it; complete when it is given to the device."""
        accelerator = self._accelerator
        accelerator.used(tensor, accelerator.sends)
        self._computed.append(accelerator.event(accelerator.current))
        return super().send(tensor, 0)

    def _register(self, record: bytes, ancillary: list[tuple[int, int, bytes]]) -> None:
        number, place, handles = read_post(record)
        if place is None:
            self._mapped_buffers.pop(number, None)
            return
        if handles:
            try:
                memory = self._mapping.map(handles[0])
                free = self._mapping.signal_of(handles[1])
            except _FAILURES as error:
                raise self._wrong(f"memory that cannot be mapped: {error}") from error
            self._mapped_buffers[number] = _Mapped(memory, free)
        buffer = self._mapped_buffers.get(number)
        offset, count = place
        if buffer is None or offset + count > buffer.memory.nbytes:
            raise self._wrong(f"{count} bytes at {offset} of buffer {number}")
        self._posts.setdefault(0, deque()).append((number, count, None))
        self._ready.append((number, offset, count))

    def _deliver(self, tensor: torch.Tensor, tag: int) -> None:
        self._posts[tag].popleft()
        number, offset, count = self._ready.popleft()
        buffer, accelerator = self._mapped_buffers[number], self._accelerator
        handle = b""
        if buffer.written is None:
            buffer.written, handle = self._mapping.signal()
        sends, size = accelerator.sends, min(count, tensor.nbytes)
        with accelerator.using(sends):
            sends.wait_event(self._computed.popleft())
            sends.wait_event(buffer.free)
            accelerator.copy(buffer.memory[offset : offset + size], bytes_of(tensor)[:size])
            buffer.written.record(sends)
        try:
            self._socket.send(msgpack.packb((number, handle)))
        except OSError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error


def read_post(record: bytes) -> tuple[int, tuple[int, int] | None, tuple[bytes, ...]]:
    """The number of a buffer, where in it how many bytes are to go, and handles of it and its event
    when it is new. A number alone: it is gone.

    Raises:
        ProtocolError: it is none.
    """
    parts = _unpacked(record)
    if len(parts) not in (1, 3, 5) or not all(type(n) is int and n >= 0 for n in parts[:3]):
        raise ProtocolError("not a posted buffer")
    if not all(type(handle) is bytes for handle in parts[3:]):
        raise ProtocolError("not a posted buffer")
    return parts[0], parts[1:3] or None, parts[3:]


def read_done(record: bytes) -> tuple[int, bytes]:
    """The number of a buffer that is written to, and the handle of the event when that is new.

    Raises:
        ProtocolError: it is none.
    """
    parts = _unpacked(record)
    if [type(part) for part in parts] != [int, bytes]:
        raise ProtocolError("not a buffer that was written to")
    return parts[0], parts[1]


def _unpacked(record: bytes) -> tuple[Any, ...]:
    try:
        parts = msgpack.unpackb(record, use_list=False)
    except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own kinds
        raise ProtocolError(f"not a record: {type(error).__name__}") from error
    if type(parts) is not tuple:
        raise ProtocolError("not a record")
    return parts


def connect(
    host: Link, edge: Edge, secret: bytes, where: Place, accelerator: Accelerator, *, sends: bool
) -> Link:
    """A link between the devices of two workers; see :func:`over`.

    Args:
        secret: what the two ends alone know.

    Raises:
        as :func:`over`, and :func:`pipeworker.worker.transport.links.shared.meet`.
    """
    connection = shared.meet(edge, secret, where, sends=sends)
    connection.settimeout(where.left())
    return over(connection, host, edge, accelerator, sends=sends)


def over(
    connection: socket.socket, host: Link, edge: Edge, accelerator: Accelerator, *, sends: bool
) -> Link:
    """A link whose bulk lane is between the devices; or the one through the host, where they do not
    reach each other's memory: the log says why.

    Args:
        connection: to the other end, which has proven itself. It has a timeout until both agree.
        host: the link through the host.

    Raises:
        OSError: the other end is gone, or silent.
        Stranger: it says something else.
    """
    mapping = accelerator.mapping
    assert mapping
    try:
        reason = (_tried if sends else _offered)(connection, accelerator, mapping)
        connection.settimeout(None)
    except (OSError, Stranger):
        connection.close()
        raise
    if reason:
        connection.close()
        streams.note(f"{edge}: tensors pass through the host, since devices cannot share: {reason}")
        return host
    kind = SendingLane if sends else ReceivingLane
    lane = kind(edge, connection, accelerator, mapping)
    closing = contextlib.ExitStack()
    closing.callback(host.close)
    closing.callback(lane.close)
    return TwoLanes(host.control, lane, closing.close)


def _offered(connection: socket.socket, accelerator: Accelerator, mapping: Mapping) -> str:
    """Offer the sender something to map; returns why it cannot."""
    memory, offer = accelerator.empty(1), (b"", b"")
    reason = ""
    try:
        offer = mapping.share(memory), mapping.signal()[1]
    except _FAILURES as error:
        reason = _said(error)
    connection.sendall(msgpack.packb((reason, *offer)))
    reply, *_ = _heard(connection, 1)
    return reason or reply


def _tried(connection: socket.socket, accelerator: Accelerator, mapping: Mapping) -> str:
    """Map what the receiver offers; returns why it cannot be."""
    reason, memory, signal = _heard(connection, 3)
    if not reason:
        try:
            mapping.map(memory)
            mapping.signal_of(signal)
        except _FAILURES as error:
            reason = _said(error)
    connection.sendall(msgpack.packb((reason,)))
    return str(reason)


def _said(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:500]


def _heard(connection: socket.socket, count: int) -> tuple[Any, ...]:
    """Text, and handles."""
    record = connection.recv(_RECORD_BYTES)
    if not record:
        raise ConnectionError("the other end is gone")
    with contextlib.suppress(ProtocolError):
        parts = _unpacked(record)
        if [type(part) for part in parts] == [str, bytes, bytes][:count]:
            return parts
    raise Stranger("it does not say what can be mapped")
