"""Buffers to receive into, and an accelerator's copies from and to pinned memory of the host.

Only the send thread waits for the device. Copies run on streams of their own, behind the events of
the work they depend on, and their memory is reused behind their own events.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from pipeworker.worker.device.accelerator import Accelerator, Event
from pipeworker.worker.internals import map_tensor_leaves, pytree, storage_uses
from pipeworker.worker.transport.frame import Messages
from pipeworker.worker.transport.layout import Layout, buffer_for, layout_of, pack, unpack

_SPARE = 4  # the part of the peak use that a pool keeps besides it

_Free = dict[Hashable, list[torch.Tensor]]
"""Free buffers by their layouts' ``buffer_key``."""


class BufferPool:
    """Buffers to receive into, by shape, dtype and alignment.

    A buffer is reused only when no tensor refers to its storage any more: whatever part of a
    received tensor the user's code keeps does not change. When shapes change, free buffers make
    room for those of other shapes: a pool has at most a quarter more bytes than were out at once.

    Args:
        allocate: returns a uint8 tensor of so many bytes.
    """

    in_place = True
    """Whether received tensors are views of the buffers, valid as soon as the data is there."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._uses_when_free = 0
        self._free: _Free = {}  # of shapes that this step has used
        self._unused: _Free = {}  # of other shapes
        self._trimmed = False  # whether this step has trimmed the unused ones
        self._total = 0  # bytes, out or free
        self._most = 0  # bytes out at once

    def begin_step(self) -> None:
        """Begin a step: buffers that it does not use are the first to make room."""
        for key, buffers in self._unused.items():
            self._free[key] = buffers + self._free.get(key, [])
        self._free, self._unused, self._trimmed = {}, self._free, False

    def acquire(self, layout: Layout) -> torch.Tensor:
        """Return a buffer of the layout's packed shape, dtype and offset."""
        free = self._free.get(layout.buffer_key)
        while free:
            buffer = free.pop()
            if storage_uses(buffer) <= self._uses_when_free:
                return buffer
            self._total -= buffer.nbytes  # the user's code keeps it
        if layout.buffer_key not in self._unused:
            return self._make(layout)
        self._free[layout.buffer_key] = self._unused.pop(layout.buffer_key)
        return self.acquire(layout)

    def reclaim(self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]) -> None:
        """Make buffers that were acquired for these layouts free again."""
        for layout, buffer in zip(layouts, buffers, strict=True):
            self._free.setdefault(layout.buffer_key, []).append(buffer)

    release = reclaim
    """Make the buffers of tensors that are no longer needed free again."""

    def tensors_in(
        self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the received tensors of these layouts.

        Each counts its own changes in place (``.data``): a send of one that was received into the
        same buffer before may not be complete yet, and is then compared with its count.
        """
        both = zip(buffers, layouts, strict=True)
        return [unpack(buffer.data, layout) for buffer, layout in both]

    def _make(self, layout: Layout) -> torch.Tensor:
        self._total += math.prod(layout.packed) * layout.dtype.itemsize
        if not self._trimmed:
            self._trimmed = True
            if (unused := _bytes(self._unused)) > self._most // _SPARE:
                self._drop(unused)  # all together, so that their memory is in one piece
        if self._total > self._most + self._most // _SPARE:
            out = self._total - _bytes(self._unused) - _bytes(self._free)
            self._most = max(self._most, out)
            self._drop(self._total - self._most - self._most // _SPARE)
        buffer = buffer_for(layout, self._allocate)
        self._uses_when_free = storage_uses(buffer)
        return buffer

    def _drop(self, size: int) -> None:
        """Drop free buffers of `size` bytes, first those that this step has not used."""
        for free in (self._unused, self._free):
            for key, buffers in list(free.items()):
                each = buffers[0].nbytes if buffers else 0
                count = max(0, min(len(buffers), -(-size // each))) if each else len(buffers)
                del buffers[:count]  # the last are those used last
                self._total -= count * each
                size -= count * each
                if not buffers:
                    del free[key]


def _bytes(free: _Free) -> int:
    """Return the bytes of free buffers; those of one key are of equal size."""
    return sum([len(buffers) * buffers[0].nbytes for buffers in free.values() if buffers])


def copy_to_host(accelerator: Accelerator, messages: Messages) -> tuple[Messages, Event]:
    """Copy the device's tensors among messages to pinned memory, once they are computed.

    Returns:
        The messages with the copies, and the event of their completion.
    """
    sends = accelerator.sends
    computed = accelerator.event(accelerator.current)
    staged: Messages = []
    with accelerator.using(sends):
        sends.wait_event(computed)
        for tag, tensor in messages:
            copy = tensor
            if accelerator.holds(tensor):
                accelerator.used(tensor, sends)
                packed = pack(tensor)
                copy = _pinned_like(packed, accelerator)
                accelerator.copy(copy, packed)
            staged.append((tag, copy))
    return staged, accelerator.event(sends)


def copy_to_device(
    accelerator: Accelerator, packed: Sequence[torch.Tensor], layouts: Sequence[Layout]
) -> tuple[list[torch.Tensor], Event]:
    """Copy tensors to the device, from contiguous pinned memory of the layouts' packed shapes.

    Returns:
        The tensors, and the event of their completion, for which their user waits.
    """
    receives = accelerator.receives
    tensors = []
    with accelerator.using(receives):
        for source, layout in zip(packed, layouts, strict=True):
            memory = buffer_for(layout, accelerator.empty)
            accelerator.copy(memory, source)
            tensors.append(unpack(memory, layout))
    for tensor in tensors:
        accelerator.used(tensor, accelerator.current)
    return tensors, accelerator.event(receives)


def move_to_device(accelerator: Accelerator, value: Any) -> tuple[Any, Event]:
    """Return a nested value with all tensors on the device, and the event of their completion."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    found = {id(leaf): leaf for leaf in leaves if not accelerator.holds(leaf)}
    layouts = [layout_of(tensor) for tensor in found.values()]
    packed = [pack(tensor) for tensor in found.values()]
    pinned = [_pinned_like(tensor, accelerator).copy_(tensor) for tensor in packed]
    tensors, copied = copy_to_device(accelerator, pinned, layouts)
    moved = {
        key: tensor.requires_grad_(layout.requires_grad)
        for key, tensor, layout in zip(found, tensors, layouts, strict=True)
    }
    return map_tensor_leaves(lambda tensor: moved.get(id(tensor), tensor), value), copied


def _pinned_like(packed: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    return accelerator.pinned(packed.nbytes).view(packed.dtype).view(packed.shape)


class StagingPool(BufferPool):
    """Pinned buffers to receive into; they are reused once the device has copied from them."""

    in_place = False

    def __init__(self, allocate: Callable[[int], torch.Tensor], accelerator: Accelerator) -> None:
        super().__init__(allocate)
        self._accelerator = accelerator
        self._copying: deque[tuple[Event, Sequence[Layout], Sequence[torch.Tensor]]] = deque()

    def acquire(self, layout: Layout) -> torch.Tensor:
        """Return a buffer, after reclaiming those that the device has copied from."""
        while self._copying and self._copying[0][0].query():
            _, layouts, buffers = self._copying.popleft()
            self.reclaim(layouts, buffers)
        return super().acquire(layout)

    def tensors_in(
        self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the received tensors of these layouts, copied to the device."""
        tensors, copied = copy_to_device(self._accelerator, buffers, layouts)
        self._accelerator.current.wait_event(copied)
        self._copying.append((copied, layouts, buffers))
        return tensors

    def release(self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]) -> None:
        """Do nothing: they are reclaimed once the device has copied from them."""
