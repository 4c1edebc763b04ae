"""Values over a link. A frame both ends expect moves without a header, into posted buffers.

What is expected is keyed by the mini-batch's shape signature, which the coordinator tells everyone
with the step, and the micro-batch. The first step of a signature describes its frames; from then on
the receiver posts its buffers ahead. A frame without elements is described every time, for the
receiver would have nothing to wait for.

When a value nevertheless differs from what is expected (a shape that depends on data, a plain value
that changes), the sender still fills the posted buffers, after a header that says what is really
sent and for which micro-batch. The receiver finds the header filled when the posted receive
completes, because messages of one connection arrive in order. Over a link with two lanes, which
have no order between them, a notice on the control lane says it instead, one byte for each frame
that is expected. The edge is *dynamic* from then on, and described every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from struct import Struct
from typing import Any

import torch

from pipeworker.errors import ProtocolError
from pipeworker.plan.network import CHANNEL_CAPACITY
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport import staging
from pipeworker.worker.transport.courier import Courier, Errand
from pipeworker.worker.transport.frame import Frame, Layout
from pipeworker.worker.transport.links.link import COMPLETE, Lane, Link, Pending
from pipeworker.worker.transport.pool import BufferPool
from pipeworker.worker.transport.staging import Messages, StagingPool
from pipeworker.worker.transport.structure import NONE, Kinds

_EXPECTED, _HEADER, _DESCRIBED, _NOTICE = 0, 1, 2, 3  # tags; the first goes over the bulk lane
_HEADER_BYTES = 1024
_HEAD = Struct("<2q")  # length of the header, 0 for none; micro-batch
_PIECE_BYTES = 16 << 10
_SMALL_BYTES = 256 << 10
_MOST_FRAMES = 4096
_MOST_UNDER_WAY = 512
# A link may hold some 500 messages before it makes its ends wait for each other.
_MESSAGES_AHEAD = 128


class Sender:
    """The source's end of a channel.

    Args:
        capacity: frames that may be under way before the next one waits; None for as many as any
            number of stages needs, so that they only wait when they would pile up.
        courier: performs large sends; without one, the calling thread does.
        kinds: the classes of the job that may pass.
        accelerator: where the tensors are, if not on the host.
    """

    def __init__(
        self,
        link: Link,
        capacity: int | None,
        courier: Courier | None,
        kinds: Kinds = NONE,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._control, self._bulk = link.control, link.bulk
        self._capacity = _MOST_UNDER_WAY if capacity is None else capacity
        self._courier = courier
        self._kinds = kinds
        self._accelerator = accelerator
        self._among_devices = link.bulk.device.type != "cpu"
        self._known: _Known = {}
        self._dynamic = False
        self._surprised = False
        self._signature: int | None = 0
        self._under_way: deque[Errand | _Started] = deque()
        self._errand: Errand | None = None  # the last one

    def begin(self, signature: int | None) -> None:
        """A step starts whose mini-batch has this shape signature; with None, all is described."""
        self._signature = signature
        self._dynamic |= self._surprised
        self._surprised = False
        _bound(self._known)
        self.flush()

    def send(self, microbatch: int, value: Any) -> None:
        """Start sending; waits only while the channel is at its capacity.

        Raises:
            PipeworkerError: the value cannot pass between stages.
            PeerLost: the other end is gone.
        """
        under_way = self._under_way
        while len(under_way) >= self._capacity:
            under_way.popleft().wait()
        expected = None
        if not self._dynamic:
            expected = self._known.get((self._signature, microbatch))
        tensors = None
        if expected is not None and not self._surprised:
            tensors = frames.matches(expected, value, self._kinds)
        if tensors is not None:
            messages = [(_EXPECTED, tensor) for tensor in tensors]
        else:
            messages = self._describe(microbatch, value, expected)
        if expected is not None and self._control is not self._bulk:
            messages.insert(0, (_NOTICE, _bytes_tensor(b"\0" if tensors is not None else b"\1")))
        if self._accelerator is not None:
            messages = self._depart(messages, self._accelerator)
        # A small send costs less than waking a thread for it; sends keep their order.
        if self._courier is None or (
            sum([tensor.nbytes for _, tensor in messages]) <= _SMALL_BYTES
            and (self._errand is None or self._errand.issued)
        ):
            if started := self._start(messages):
                under_way.append(_Started(started))
        else:
            self._errand = self._courier.submit(lambda: self._start(messages))
            under_way.append(self._errand)

    def _depart(self, messages: Messages, accelerator: Accelerator) -> Messages:
        """Send what lies on the device as soon as it is computed; returns the rest."""
        if self._among_devices:
            messages = self._hand_over(messages, accelerator)
        if not any(accelerator.holds(tensor) for _, tensor in messages):
            return messages
        staged, copied = staging.departed(accelerator, messages)

        def start() -> list[Pending]:
            copied.synchronize()
            return self._start(staged)

        if self._courier is None:
            self._under_way.append(_Started(start()))
        else:
            self._errand = self._courier.submit(start)
            self._under_way.append(self._errand)
        return []

    def _hand_over(self, messages: Messages, accelerator: Accelerator) -> Messages:
        """What is expected passes between the devices; returns the rest."""
        tensors = [tensor for tag, tensor in messages if tag == _EXPECTED]
        if not all(map(accelerator.holds, tensors)):
            tensors, there = staging.brought(accelerator, tensors)
            accelerator.current.wait_event(there)
        if started := self._start([(_EXPECTED, tensor) for tensor in tensors]):
            self._under_way.append(_Started(started))
        return [message for message in messages if message[0] != _EXPECTED]

    def flush(self) -> None:
        """Wait until everything has left: what was sent may be changed from now on."""
        while self._under_way:
            self._under_way.popleft().wait()
        self._errand = None
        if self._accelerator is not None and self._among_devices:
            left = self._accelerator.event(self._accelerator.sends)
            self._accelerator.current.wait_event(left)  # who changes it then does so on the device

    def _describe(self, microbatch: int, value: Any, expected: Frame | None) -> Messages:
        """The messages for a value that the receiver does not expect."""
        frame, tensors = frames.describe(value, self._kinds)
        messages = _header_messages(microbatch, frames.to_bytes(frame))
        if expected is not None:
            self._surprised = True
            messages += [(_EXPECTED, _filler(layout)) for layout in expected.tensors]
        _learn(self._known, self._signature, microbatch, frame)
        return messages + [(_DESCRIBED, tensor) for tensor in tensors]

    def _start(self, messages: Messages) -> list[Pending]:
        started: list[Pending] = []
        for tag, tensor in messages:
            if tensor.numel():
                lane = self._control if tag else self._bulk
                pending = lane.send(frames.pack(tensor), tag)
                if pending is not COMPLETE:
                    started.append(pending)
        return started


_Known = dict[tuple[int | None, int], Frame]
"""Frames that both ends expect, by shape signature and micro-batch."""


def _learn(known: _Known, signature: int | None, microbatch: int, frame: Frame) -> None:
    """Expect a described frame from now on, if it has elements and its mini-batch a signature."""
    if signature is not None and frame.moves:
        last = next(reversed(known.values()), frame)
        known[signature, microbatch] = last if last == frame else frame  # most are alike: keep one
    else:
        known.pop((signature, microbatch), None)


def _bound(known: _Known) -> None:
    """Forget when shapes keep changing; both ends know the same frames, so they forget together."""
    if len(known) > _MOST_FRAMES:
        known.clear()


@dataclass(slots=True)
class _Started:
    """A send that the calling thread started."""

    pending: list[Pending]

    def wait(self) -> None:
        for pending in self.pending:
            pending.wait()


def _header_messages(microbatch: int, header: bytes) -> Messages:
    """A header in a frame of fixed size, and what does not fit in further ones."""
    room = _HEADER_BYTES - _HEAD.size
    data = _HEAD.pack(len(header), microbatch) + header[:room]
    messages = [(_HEADER, _bytes_tensor(data.ljust(_HEADER_BYTES, b"\0")))]
    pieces = [header[i : i + _PIECE_BYTES] for i in range(room, len(header), _PIECE_BYTES)]
    return messages + [(_DESCRIBED, _bytes_tensor(piece)) for piece in pieces]


def _filler(layout: Layout) -> torch.Tensor:
    """What completes a posted receive whose value turned out different."""
    return torch.zeros(layout.packed, dtype=layout.dtype)


@dataclass(slots=True)
class _Posted:
    """A receive under way and its buffers, one a distinct tensor, from a pool."""

    frame: Frame
    buffers: list[torch.Tensor]
    pending: list[Pending]
    pool: BufferPool

    def give_back(self) -> None:
        self.pool.give(self.frame.tensors, self.buffers)


class Receiver:
    """The target's end of a channel.

    Args:
        depth: frames whose receives are posted ahead of need, fewer when they have many tensors.
        kinds: the classes of the job that may pass; at both ends the same.
        accelerator: where received tensors are wanted; None: on the host.
    """

    def __init__(
        self,
        link: Link,
        depth: int,
        kinds: Kinds = NONE,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._control, self._bulk = link.control, link.bulk
        self._kinds = kinds
        self._low = max(0, depth - CHANNEL_CAPACITY)
        self._known: _Known = {}
        self._dynamic = False
        self._surprised = False
        self._signature: int | None = 0
        self._ahead: deque[int] = deque()
        self._posted: dict[int, _Posted] = {}
        self._held: dict[int, _Posted] = {}
        self._pools = {_EXPECTED: _pool(self._bulk, accelerator)}
        self._pools[_DESCRIBED] = self._pools[_EXPECTED]
        self._notices: deque[tuple[bytearray, Pending]] | None = None
        if self._control is not self._bulk:
            self._pools[_DESCRIBED] = _pool(self._control, accelerator)
            self._notices = deque()
        self._header = bytearray(_HEADER_BYTES)
        self._header_tensor = torch.frombuffer(self._header, dtype=torch.uint8)
        (self._header_pending,) = self._control.receive([self._header_tensor], _HEADER)
        self.wants_grad: Sequence[bool] = ()
        """Which distinct tensors of the value received last require grad at the other end."""

    def begin(self, signature: int | None, microbatches: Sequence[int]) -> None:
        """A step starts; `microbatches` will be received in this order.

        With a signature of None, whatever is described will be.
        """
        self._signature = signature
        self._dynamic |= self._surprised
        self._surprised = False
        _bound(self._known)
        for pool in self._pools.values():
            pool.begin()
        self._ahead = deque(microbatches)
        self._post_ahead()

    def receive(self, microbatch: int) -> Any:
        """Wait for a micro-batch's value; its tensors are valid until :meth:`release`.

        Raises:
            PeerLost: the other end is gone.
            ProtocolError: a header is not one.
            PipeworkerError: a class of the user's does not take what arrived.
        """
        posted = self._posted.pop(microbatch, None)
        if len(self._posted) <= self._low:
            self._post_ahead()
        value: Any = None
        if posted is not None:
            # What needs no data is done before the wait, when there is time for it.
            early = posted.pool.in_place and posted.frame.dense
            if early:
                value = self._assemble(posted)
            for pending in posted.pending:
                pending.wait()
            surprised = self._surprised_at(microbatch)
            if not self._surprised and not surprised:
                self._held[microbatch] = posted
                return value if early else self._assemble(posted)
            self._surprised = True
            posted.give_back()
        posted = self._receive_described(microbatch)
        _learn(self._known, self._signature, microbatch, posted.frame)
        self._held[microbatch] = posted
        return self._assemble(posted)

    def _assemble(self, posted: _Posted) -> Any:
        layouts = posted.frame.tensors
        self.wants_grad = [layout.requires_grad for layout in layouts]
        tensors = posted.pool.values(layouts, posted.buffers)
        return frames.assemble(posted.frame, tensors, self._kinds)

    def release(self, microbatch: int) -> None:
        """The value is no longer needed: its buffers may be used again."""
        posted = self._held.pop(microbatch)
        posted.pool.release(posted.frame.tensors, posted.buffers)

    def _surprised_at(self, microbatch: int) -> bool:
        """Whether a header for this micro-batch has arrived; the next one's may have, too."""
        if self._notices is not None:
            notice, pending = self._notices.popleft()
            pending.wait()
            return bool(notice[0])
        length, about = _HEAD.unpack_from(self._header)
        return bool(length) and bool(about == microbatch)

    def _post_ahead(self) -> None:
        """Post the receives of the next micro-batches whose frames are known, some at once."""
        chosen: list[tuple[int, Frame]] = []
        messages = sum([len(posted.pending) for posted in self._posted.values()])
        while self._ahead and len(chosen) < CHANNEL_CAPACITY:
            ahead = len(self._posted) + len(chosen)
            if ahead >= CHANNEL_CAPACITY and messages >= _MESSAGES_AHEAD:
                break
            microbatch = self._ahead.popleft()
            frame = None if self._dynamic else self._known.get((self._signature, microbatch))
            if frame is not None:
                chosen.append((microbatch, frame))
                messages += len(frame.tensors)
        posted = self._post([frame for _, frame in chosen], _EXPECTED)
        self._posted.update(zip([m for m, _ in chosen], posted, strict=True))

    def _post(self, chosen: Sequence[Frame], tag: int) -> list[_Posted]:
        lane, pool = self._control if tag else self._bulk, self._pools[tag]
        buffers = [[pool.take(layout) for layout in frame.tensors] for frame in chosen]
        moving = [[buffer for buffer in some if buffer.numel()] for some in buffers]
        if self._notices is not None and tag == _EXPECTED:
            self._post_notices(self._notices, len(chosen))
        pending = iter(lane.receive(list(chain.from_iterable(moving)), tag))
        return [
            _Posted(frame, some, list(islice(pending, len(those))), pool)
            for frame, some, those in zip(chosen, buffers, moving, strict=True)
        ]

    def _post_notices(self, notices: deque[tuple[bytearray, Pending]], count: int) -> None:
        memory = [bytearray(1) for _ in range(count)]
        tensors = [torch.frombuffer(one, dtype=torch.uint8) for one in memory]
        notices += zip(memory, self._control.receive(tensors, _NOTICE), strict=True)

    def _receive_described(self, microbatch: int) -> _Posted:
        self._header_pending.wait()
        length, about = _HEAD.unpack_from(self._header)
        if not 0 < length <= frames.MOST_HEADER_BYTES or about != microbatch:
            raise ProtocolError(
                f"a header of {length} bytes for micro-batch {about} came for {microbatch}"
            )
        header = self._header[_HEAD.size : _HEAD.size + length]
        while len(header) < length:
            piece = bytearray(min(_PIECE_BYTES, length - len(header)))
            (pending,) = self._control.receive(
                [torch.frombuffer(piece, dtype=torch.uint8)], _DESCRIBED
            )
            pending.wait()
            header += piece
        _HEAD.pack_into(self._header, 0, 0, 0)
        (self._header_pending,) = self._control.receive([self._header_tensor], _HEADER)
        (posted,) = self._post([frames.from_bytes(bytes(header), self._kinds)], _DESCRIBED)
        for pending in posted.pending:
            pending.wait()
        return posted


def _pool(lane: Lane, accelerator: Accelerator | None) -> BufferPool:
    """Buffers that are good to receive into, for who wants the tensors on an accelerator."""
    if accelerator is None or lane.device.type != "cpu":  # received where it is wanted
        return BufferPool(lane.allocate)
    return StagingPool(lane.allocate if lane.mapped else accelerator.pinned, accelerator)


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
