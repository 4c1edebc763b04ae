"""Channels: values over a link. An expected frame moves without a header, into posted buffers.

The data plane's page (docs/architecture) describes expected frames, and headers for values that
differ from them. Over a link of two lanes, which have no order between them, a notice on the
control lane precedes each expected frame: one byte, which is 1 if the frame differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch

from pipeworker.errors import ProtocolError
from pipeworker.host.task_thread import TaskThread
from pipeworker.plan.schedule import CHANNEL_CAPACITY
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport import staging
from pipeworker.worker.transport.frame import (
    DESCRIBED,
    EXPECTED,
    HEAD,
    HEADER,
    NOTICE,
    Frame,
    KnownFrames,
    Messages,
)
from pipeworker.worker.transport.layout import aligned_copy, pack
from pipeworker.worker.transport.links.link import COMPLETE, Lane, Link, Pending
from pipeworker.worker.transport.send_thread import SendTask
from pipeworker.worker.transport.staging import BufferPool, StagingPool
from pipeworker.worker.transport.structure import NO_TYPES, TypeRegistry
from pipeworker.worker.transport.unchanged import Unchanged, counted

_SMALL_BYTES = 256 << 10  # a send of so many takes less time than waking the thread
_MAX_UNDER_WAY = 512
# A link holds some 500 messages before it makes its ends wait for each other.
_MESSAGES_AHEAD = 128


class _End:
    """The state that both ends of a channel keep."""

    def __init__(self, link: Link, types: TypeRegistry) -> None:
        self._control, self._bulk = link.control, link.bulk
        self._types = types
        self._known = KnownFrames()
        self._dynamic = False
        self._surprised = False  # whether a frame of this step was not as expected
        self._signature: int | None = 0

    def _begin_step(self, signature: int | None) -> None:
        self._signature = signature
        self._dynamic |= self._surprised
        self._surprised = False
        self._known.limit()


class Sender(_End):
    """The source's end of a channel. Its methods raise PeerLost if the other end is gone.

    Args:
        capacity: frames that may be under way before the next one waits; None for as many as any
            number of stages needs, so that they wait only when they would pile up.
        send_thread: performs large sends; without one, the calling thread does.
        types: the classes of the job that may pass.
        accelerator: the device of the tensors, if it is not the host.
        source: what the values are, for the error that a layer has changed one while it was sent;
            "" for values that pipeworker itself changes only after :meth:`flush`.
    """

    def __init__(
        self,
        link: Link,
        capacity: int | None,
        send_thread: TaskThread | None,
        types: TypeRegistry = NO_TYPES,
        accelerator: Accelerator | None = None,
        source: str = "",
    ) -> None:
        super().__init__(link, types)
        self._accelerator, self._source = accelerator, source
        self._capacity = _MAX_UNDER_WAY if capacity is None else capacity
        self._send_thread = send_thread
        self._between_devices = link.bulk.device.type != "cpu"
        self._under_way: deque[_Sent] = deque()
        self._last_task: SendTask | None = None

    def begin(self, signature: int | None) -> None:
        """Begin a step whose mini-batch has a signature; with None every frame is described."""
        self._begin_step(signature)
        self.flush()

    def send(self, number: int, value: Any) -> None:
        """Start sending a value; wait only while the channel is at its capacity.

        A value's number is its micro-batch, or what both ends count by where it has none.
        """
        under_way = self._under_way
        while len(under_way) >= self._capacity:
            under_way.popleft().wait()
        expected = None
        if not self._dynamic:
            expected = self._known.get((self._signature, number))
        tensors = None
        if expected is not None and not self._surprised:
            tensors = frames.matches(expected, value, self._types)
        if tensors is not None:
            messages = [(EXPECTED, tensor) for tensor in tensors]
        else:
            messages = self._describe(number, value, expected)
        if self._source:
            messages = [(tag, counted(tensor)) for tag, tensor in messages]
        if expected is not None and self._control is not self._bulk:
            notice = frames.bytes_tensor(b"\0" if tensors is not None else b"\1")
            messages.insert(0, (NOTICE, notice))
        if self._accelerator is not None:
            messages = self._send_from_device(number, messages, self._accelerator)
        # A small send costs less than waking a thread for it; sends keep their order.
        if self._send_thread is None or (
            sum([tensor.nbytes for _, tensor in messages]) <= _SMALL_BYTES
            and (self._last_task is None or self._last_task.issued)
        ):
            if started := self._start(messages):
                self._keep(started, number, messages)
        else:
            self._last_task = SendTask(lambda: self._start(messages), self._send_thread)
            self._keep([self._last_task], number, messages)

    def _keep(self, sends: list[Pending], number: int, messages: Messages) -> None:
        """Keep sends that are under way, and the versions of what they read."""
        unchanged = None
        if self._source:
            what = f"{self._source} for micro-batch {number}"
            unchanged = Unchanged(what, [tensor for _, tensor in messages])
        self._under_way.append(_Sent(sends, unchanged))

    def _send_from_device(
        self, number: int, messages: Messages, accelerator: Accelerator
    ) -> Messages:
        """Send the device's tensors as soon as they are computed; return the other messages."""
        # The buffers that tensors were received into are written again once the compute stream has
        # used them, whether or not the stream of sends has read them.
        messages = [
            (tag, aligned_copy(tensor) if accelerator.is_arrived(tensor) else tensor)
            for tag, tensor in messages
        ]
        if self._between_devices:
            messages = self._send_to_device(number, messages, accelerator)
        if not any(accelerator.holds(tensor) for _, tensor in messages):
            return messages
        staged, copied = staging.copy_to_host(accelerator, messages)

        def start() -> list[Pending]:
            copied.synchronize()
            return self._start(staged)

        if self._send_thread is None:
            self._keep(start(), number, messages)
        else:
            self._last_task = SendTask(start, self._send_thread)
            self._keep([self._last_task], number, messages)
        return []

    def _send_to_device(
        self, number: int, messages: Messages, accelerator: Accelerator
    ) -> Messages:
        """Send expected tensors between the devices; return the other messages."""
        tensors = [tensor for tag, tensor in messages if tag == EXPECTED]
        if not all(map(accelerator.holds, tensors)):
            tensors, copied = staging.move_to_device(accelerator, tensors)
            accelerator.current.wait_event(copied)
        expected = [(EXPECTED, tensor) for tensor in tensors]
        # A send is complete when it is submitted; the device reads the tensor later.
        self._keep(self._start(expected), number, expected)
        return [message for message in messages if message[0] != EXPECTED]

    def flush(self) -> None:
        """Wait until all sends are complete: the tensors may be changed from now on."""
        while self._under_way:
            self._under_way.popleft().wait()
        self._last_task = None
        if self._accelerator is not None and self._between_devices:
            # The host does not wait: later work on the current stream does.
            left = self._accelerator.event(self._accelerator.sends)
            self._accelerator.current.wait_event(left)

    def _describe(self, number: int, value: Any, expected: Frame | None) -> Messages:
        """Return the messages for a value that the receiver does not expect."""
        frame, tensors = frames.describe(value, self._types)
        messages = frames.header_messages(number, frames.to_bytes(frame))
        if expected is not None:
            self._surprised = True
            # These complete the receives that are posted for the expected frame.
            fillers = [torch.zeros(t.packed, dtype=t.dtype, device="cpu") for t in expected.tensors]
            messages += [(EXPECTED, filler) for filler in fillers]
        self._known.learn(self._signature, number, frame)
        return messages + [(DESCRIBED, tensor) for tensor in tensors]

    def _start(self, messages: Messages) -> list[Pending]:
        started: list[Pending] = []
        for tag, tensor in messages:
            if tensor.numel():
                lane = self._control if tag else self._bulk
                pending = lane.send(pack(tensor), tag)
                if pending is not COMPLETE:
                    started.append(pending)
        return started


@dataclass(slots=True)
class _Sent:
    """Sends under way, of either thread, and the tensors that must not change until then."""

    sends: list[Pending]
    unchanged: Unchanged | None

    def wait(self) -> None:
        for pending in self.sends:
            pending.wait()
        if self.unchanged is not None:
            self.unchanged.check()


@dataclass(slots=True)
class _Posted:
    """A receive under way and its buffers, one a distinct tensor, from a pool."""

    frame: Frame
    buffers: list[torch.Tensor]
    pending: list[Pending]
    pool: BufferPool


class Receiver(_End):
    """The target's end of a channel. Its methods raise PeerLost if the other end is gone.

    Args:
        depth: frames whose receives are posted ahead of need; fewer if they have many tensors.
        types: the classes of the job that may pass; the same at both ends.
        accelerator: the device on which received tensors are wanted, if it is not the host.
    """

    def __init__(
        self,
        link: Link,
        depth: int,
        types: TypeRegistry = NO_TYPES,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(link, types)
        self._low = max(0, depth - CHANNEL_CAPACITY)
        self._ahead: deque[int] = deque()  # micro-batches whose receives are not posted yet
        self._posted: dict[int, _Posted] = {}
        self._received: dict[int, _Posted] = {}  # not released yet
        self._pool = self._described_pool = _pool(self._bulk, accelerator)
        self._notices: deque[tuple[bytearray, Pending]] | None = None
        if self._control is not self._bulk:
            self._described_pool = _pool(self._control, accelerator)
            self._notices = deque()
        self._header = bytearray(frames.HEADER_BYTES)
        self._header_tensor = torch.frombuffer(self._header, dtype=torch.uint8)
        (self._header_pending,) = self._control.receive([self._header_tensor], HEADER)
        self.wants_grad: Sequence[bool] = ()
        """Whether each distinct tensor of the value received last requires grad at the source."""
        self.common = False
        """Whether two of these tensors have elements in the same memory at the source."""

    def begin(self, signature: int | None, numbers: Sequence[int]) -> None:
        """Begin a step as the sender does, with values' numbers in the order of their receipt."""
        self._begin_step(signature)
        self._pool.begin_step()
        if self._described_pool is not self._pool:
            self._described_pool.begin_step()
        self._ahead = deque(numbers)
        self._post_ahead()

    def receive(self, number: int) -> Any:
        """Wait for the value of a number; its tensors are valid until :meth:`release`."""
        posted = self._posted.pop(number, None)
        if len(self._posted) <= self._low:
            self._post_ahead()
        value: Any = None
        if posted is not None:
            # Work that needs no data is done before the wait, when there is time for it.
            early = posted.pool.in_place and posted.frame.dense
            if early:
                value = self._assemble(posted)
            for pending in posted.pending:
                pending.wait()
            surprised = self._is_surprise(number)
            if not self._surprised and not surprised:
                self._received[number] = posted
                return value if early else self._assemble(posted)
            self._surprised = True
            posted.pool.reclaim(posted.frame.tensors, posted.buffers)
        posted = self._receive_described(number)
        self._known.learn(self._signature, number, posted.frame)
        self._received[number] = posted
        return self._assemble(posted)

    def _assemble(self, posted: _Posted) -> Any:
        layouts = posted.frame.tensors
        self.wants_grad = [layout.requires_grad for layout in layouts]
        self.common = posted.frame.common
        tensors = posted.pool.tensors_in(layouts, posted.buffers)
        return frames.assemble(posted.frame, tensors, self._types)

    def release(self, number: int) -> None:
        """Release a received value's buffers: the value is no longer needed."""
        posted = self._received.pop(number)
        posted.pool.release(posted.frame.tensors, posted.buffers)

    def _is_surprise(self, number: int) -> bool:
        """Return whether a header for this micro-batch has come; the next one's may have, too."""
        if self._notices is not None:
            notice, pending = self._notices.popleft()
            pending.wait()
            return bool(notice[0])
        length, described = HEAD.unpack_from(self._header)
        return bool(length) and bool(described == number)

    def _post_ahead(self) -> None:
        """Post the receives of the next micro-batches whose frames are known, some together."""
        chosen: list[tuple[int, Frame]] = []
        messages = sum([len(posted.pending) for posted in self._posted.values()])
        while self._ahead and len(chosen) < CHANNEL_CAPACITY:
            ahead = len(self._posted) + len(chosen)
            if ahead >= CHANNEL_CAPACITY and messages >= _MESSAGES_AHEAD:
                break
            number = self._ahead.popleft()
            frame = None if self._dynamic else self._known.get((self._signature, number))
            if frame is not None:
                chosen.append((number, frame))
                messages += len(frame.tensors)
        posted = self._post([frame for _, frame in chosen])
        self._posted.update(zip([m for m, _ in chosen], posted, strict=True))

    def _post(self, chosen: Sequence[Frame]) -> list[_Posted]:
        pool = self._pool
        buffers = [[pool.acquire(layout) for layout in frame.tensors] for frame in chosen]
        moving = [[buffer for buffer in some if buffer.numel()] for some in buffers]
        if self._notices is not None:
            memory = [bytearray(1) for _ in chosen]
            tensors = [torch.frombuffer(one, dtype=torch.uint8) for one in memory]
            self._notices += zip(memory, self._control.receive(tensors, NOTICE), strict=True)
        pending = iter(self._bulk.receive(list(chain.from_iterable(moving)), EXPECTED))
        return [
            _Posted(frame, some, list(islice(pending, len(those))), pool)
            for frame, some, those in zip(chosen, buffers, moving, strict=True)
        ]

    def _receive_described(self, number: int) -> _Posted:
        """Receive a header and the tensors of its frame."""
        self._header_pending.wait()
        length, described = HEAD.unpack_from(self._header)
        if not 0 < length <= frames.MAX_HEADER_BYTES or described != number:
            raise ProtocolError(
                f"received a header of {length} bytes for value {described}, where one for value "
                f"{number} was expected"
            )
        header = self._header[HEAD.size : HEAD.size + length]
        while len(header) < length:
            piece = bytearray(min(frames.PIECE_BYTES, length - len(header)))
            tensor = torch.frombuffer(piece, dtype=torch.uint8)
            self._control.receive([tensor], DESCRIBED)[0].wait()
            header += piece
        HEAD.pack_into(self._header, 0, 0, 0)
        (self._header_pending,) = self._control.receive([self._header_tensor], HEADER)
        frame, pool = frames.from_bytes(bytes(header), self._types), self._described_pool
        buffers = [pool.acquire(layout) for layout in frame.tensors]
        moving = [buffer for buffer in buffers if buffer.numel()]
        for start in range(0, len(moving), frames.MAX_POSTED):
            some = moving[start : start + frames.MAX_POSTED]
            for pending in self._control.receive(some, DESCRIBED):
                pending.wait()
        return _Posted(frame, buffers, [], pool)


def _pool(lane: Lane, accelerator: Accelerator | None) -> BufferPool:
    """Return a pool of buffers for a lane, staged if tensors are wanted on another device."""
    if accelerator is None:
        return BufferPool(lane.allocate)
    if lane.device.type != "cpu":
        return BufferPool(lambda count: accelerator.arriving(lane.allocate(count)))
    return StagingPool(lane.allocate if lane.mapped else accelerator.pinned, accelerator)
