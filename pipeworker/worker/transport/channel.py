"""Values over a link. A frame both ends expect moves without a header, into posted buffers.

What is expected is keyed by the mini-batch's shape signature, which the coordinator tells everyone
with the step, and the micro-batch. The first step of a signature describes its frames; from then on
the receiver posts its buffers ahead. When a value nevertheless differs from what is expected (a
shape that depends on data, a plain value that changes), the sender still fills the posted buffers,
after a header that says what is really sent; the receiver finds the header filled when the posted
receive completes, because messages of one connection arrive in order. The edge is *dynamic* from
then on, and described every time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport.frame import Frame, Layout
from pipeworker.worker.transport.link import Link, Pending

_EXPECTED, _HEADER, _DESCRIBED = 0, 1, 2  # tags
_HEADER_BYTES = 1024
_LENGTH_BYTES = 8


class Sender:
    """The source's end of a channel.

    Args:
        capacity: sends that may be under way before the next one waits; None for no bound.
    """

    def __init__(self, link: Link, capacity: int | None) -> None:
        self._link = link
        self._capacity = capacity
        self._known: dict[tuple[int, int], Frame] = {}
        self._dynamic = False
        self._surprised = False
        self._signature = 0
        self._under_way: deque[tuple[Pending, torch.Tensor]] = deque()
        self._frames_under_way: deque[int] = deque()

    def begin(self, signature: int) -> None:
        """A step starts whose mini-batch has this shape signature."""
        self._signature = signature
        self._dynamic |= self._surprised
        self._surprised = False
        self.flush()

    def send(self, microbatch: int, value: Any) -> list[torch.Tensor]:
        """Start sending; returns the distinct tensors of the value that require grad.

        Waits only while the channel is at its capacity.
        """
        frame, tensors = frames.describe(value)
        key = (self._signature, microbatch)
        expected = None if self._dynamic else self._known.get(key)
        self._make_room()
        before = len(self._under_way)
        if frame == expected and not self._surprised:
            tag = _EXPECTED
        else:
            tag = _DESCRIBED
            self._send_header(frame)
            if expected is not None:
                self._surprised = True
                for layout in expected.tensors:
                    self._put(torch.zeros(frames.packed_shape(layout), dtype=layout.dtype), _EXPECTED)
            self._known[key] = frame
        for tensor in tensors:
            self._put(frames.pack(tensor), tag)
        self._frames_under_way.append(len(self._under_way) - before)
        return [tensor for tensor in tensors if tensor.requires_grad]

    def flush(self) -> None:
        """Wait until everything has left."""
        while self._frames_under_way:
            self._wait_oldest()

    def _make_room(self) -> None:
        if self._capacity is not None:
            while len(self._frames_under_way) >= self._capacity:
                self._wait_oldest()

    def _wait_oldest(self) -> None:
        for _ in range(self._frames_under_way.popleft()):
            pending, _ = self._under_way.popleft()
            pending.wait()

    def _put(self, tensor: torch.Tensor, tag: int) -> None:
        if tensor.numel() == 0:
            return
        if tensor.device != self._link.device:
            tensor = tensor.to(self._link.device)
        self._under_way.append((self._link.send(tensor, tag), tensor))

    def _send_header(self, frame: Frame) -> None:
        header = frames.to_bytes(frame)
        room = _HEADER_BYTES - _LENGTH_BYTES
        data = len(header).to_bytes(_LENGTH_BYTES, "little") + header[:room]
        first = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        first[: len(data)] = _bytes_tensor(data)
        self._put(first, _HEADER)
        if len(header) > room:
            self._put(_bytes_tensor(header[room:]), _DESCRIBED)


@dataclass(slots=True)
class _Posted:
    """A receive under way: the buffers, one a distinct tensor, and their completion."""

    frame: Frame
    buffers: list[torch.Tensor]
    pending: list[Pending]


class Receiver:
    """The target's end of a channel.

    Args:
        device: where received tensors are wanted.
        depth: receives posted ahead of need.
    """

    def __init__(self, link: Link, device: torch.device, depth: int) -> None:
        self._link = link
        self._device = device
        self._depth = depth
        self._known: dict[tuple[int, int], Frame] = {}
        self._dynamic = False
        self._surprised = False
        self._signature = 0
        self._ahead: deque[int] = deque()
        self._posted: dict[int, _Posted] = {}
        self._held: dict[int, list[torch.Tensor]] = {}
        self._pool = BufferPool(link.device)
        self._header = bytearray(_HEADER_BYTES)
        self._header_tensor = torch.frombuffer(self._header, dtype=torch.uint8)
        self._header_pending = link.receive(self._header_tensor, _HEADER)

    def begin(self, signature: int, microbatches: Sequence[int]) -> None:
        """A step starts; `microbatches` will be received in this order."""
        self._signature = signature
        self._dynamic |= self._surprised
        self._surprised = False
        self._ahead = deque(microbatches)
        for _ in range(self._depth):
            self._post_next()

    def receive(self, microbatch: int) -> Any:
        """Wait for a micro-batch's value; its tensors are valid until :meth:`release`.

        No tensor requires grad; :meth:`last_frame` tells which did at the other end.
        """
        posted = self._posted.pop(microbatch, None)
        if posted is not None:
            for pending in posted.pending:
                pending.wait()
            if self._surprised or self._header_length():
                self._surprised = True
                self._pool.give(posted.buffers)
                posted = None
        if posted is None:
            posted = self._receive_described()
            self._known[self._signature, microbatch] = posted.frame
        self._post_next()
        self._held[microbatch] = posted.buffers
        self.last_frame = posted.frame
        tensors = [
            self._placed(frames.unpack(buffer.detach(), layout))
            for buffer, layout in zip(posted.buffers, posted.frame.tensors, strict=True)
        ]
        return frames.assemble(posted.frame, tensors)

    def release(self, microbatch: int) -> None:
        """The value is no longer needed: its buffers may be used again."""
        self._pool.give(self._held.pop(microbatch))

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device == self._device else tensor.to(self._device)

    def _header_length(self) -> int:
        """Length of the header that has arrived, 0 if none has. No header is empty."""
        return int.from_bytes(self._header[:_LENGTH_BYTES], "little")

    def _post_next(self) -> None:
        """Post the receive of the next micro-batch whose frame is known."""
        if not self._ahead:
            return
        microbatch = self._ahead.popleft()
        frame = None if self._dynamic else self._known.get((self._signature, microbatch))
        if frame is not None:
            self._posted[microbatch] = self._post(frame, _EXPECTED)

    def _post(self, frame: Frame, tag: int) -> _Posted:
        buffers = [self._pool.take(layout) for layout in frame.tensors]
        pending = [self._link.receive(buffer, tag) for buffer in buffers if buffer.numel()]
        return _Posted(frame, buffers, pending)

    def _receive_described(self) -> _Posted:
        self._header_pending.wait()
        length = self._header_length()
        header = bytes(self._header[_LENGTH_BYTES : _LENGTH_BYTES + length])
        if len(header) < length:
            rest = bytearray(length - len(header))
            self._link.receive(torch.frombuffer(rest, dtype=torch.uint8), _DESCRIBED).wait()
            header += rest
        self._header[:_LENGTH_BYTES] = bytes(_LENGTH_BYTES)
        self._header_pending = self._link.receive(self._header_tensor, _HEADER)
        posted = self._post(frames.from_bytes(header), _DESCRIBED)
        for pending in posted.pending:
            pending.wait()
        return posted


class BufferPool:
    """Buffers to receive into, by shape and dtype.

    A buffer is used again only when nothing refers to its storage any more: what the user's code
    kept of a received tensor stays as it was.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    def take(self, layout: Layout) -> torch.Tensor:
        key = (frames.packed_shape(layout), layout.dtype)
        free = self._free.get(key)
        while free:
            buffer = free.pop()
            if _unshared(buffer):
                return buffer
        return torch.empty(key[0], dtype=key[1], device=self._device)

    def give(self, buffers: list[torch.Tensor]) -> None:
        for buffer in buffers:
            self._free.setdefault((tuple(buffer.shape), buffer.dtype), []).append(buffer)


def _unshared(buffer: torch.Tensor) -> bool:
    """Whether the buffer is the only tensor on its storage (the look itself counts as one)."""
    return int(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)) <= 2


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
