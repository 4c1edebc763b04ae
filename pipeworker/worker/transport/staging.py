"""Tensors of an accelerator on their way through the host's memory, where a link needs them there.

Nobody but the courier waits for the device: copies are given to streams of their own, behind the
events of what they need, and the memory they use is used again behind theirs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pipeworker.worker.device.accelerator import Accelerator, Event
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport.frame import Layout
from pipeworker.worker.transport.pool import BufferPool

Messages = list[tuple[int, torch.Tensor]]
"""Tags and tensors."""


def departed(accelerator: Accelerator, messages: Messages) -> tuple[Messages, Event]:
    """The messages with what lies on the device copied to the host, as soon as it is computed.

    The event says when they are there.
    """
    sends = accelerator.sends
    computed = accelerator.event(accelerator.current)
    staged: Messages = []
    with accelerator.using(sends):
        sends.wait_event(computed)
        for tag, tensor in messages:
            if accelerator.holds(tensor):
                accelerator.used(tensor, sends)
                packed = frames.pack(tensor)
                there = _room(packed, accelerator)
                accelerator.copy(there, packed)
                staged.append((tag, there))
            else:
                staged.append((tag, tensor))
    return staged, accelerator.event(sends)


def arrived(
    accelerator: Accelerator, packed: Sequence[torch.Tensor], layouts: Sequence[Layout]
) -> tuple[list[torch.Tensor], Event]:
    """Tensors of these layouts on the device, from their elements in pinned memory.

    The event says when they are there: who uses them waits for it.
    """
    receives = accelerator.receives
    tensors = []
    with accelerator.using(receives):
        for source, layout in zip(packed, layouts, strict=True):
            memory = frames.buffer_for(layout, accelerator.empty)
            accelerator.copy(memory, source)
            tensors.append(frames.unpack(memory, layout))
    for tensor in tensors:
        accelerator.used(tensor, accelerator.current)
    return tensors, accelerator.event(receives)


def brought(accelerator: Accelerator, value: Any) -> tuple[Any, Event]:
    """A nested value with what lies on the host on the device, as soon as the event says so."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    found = {id(leaf): leaf for leaf in leaves if not accelerator.holds(leaf)}
    layouts = [replace(frames.layout_of(tensor), offset=0) for tensor in found.values()]
    packed = [frames.pack(tensor) for tensor in found.values()]
    pinned = [_room(tensor, accelerator).copy_(tensor) for tensor in packed]
    tensors, copied = arrived(accelerator, pinned, layouts)
    there = {
        key: tensor.requires_grad_(layout.requires_grad)
        for key, tensor, layout in zip(found, tensors, layouts, strict=True)
    }
    return pytree.tree_map(lambda leaf: there.get(id(leaf), leaf), value), copied


def _room(packed: torch.Tensor, accelerator: Accelerator) -> torch.Tensor:
    """Pinned memory for as many elements."""
    return accelerator.pinned(packed.nbytes).view(packed.dtype).view(packed.shape)


class StagingPool(BufferPool):
    """Pinned buffers to receive into, from which the device copies; then they are used again.

    Args:
        allocate: pinned memory.
    """

    in_place = False

    def __init__(self, allocate: Callable[[int], torch.Tensor], accelerator: Accelerator) -> None:
        super().__init__(allocate)
        self._accelerator = accelerator
        self._read: deque[tuple[Event, Sequence[Layout], Sequence[torch.Tensor]]] = deque()

    def take(self, layout: Layout) -> torch.Tensor:
        while self._read and self._read[0][0].query():
            _, layouts, buffers = self._read.popleft()
            self.give(layouts, buffers)
        return super().take(layout)

    def values(
        self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        tensors, copied = arrived(self._accelerator, buffers, layouts)
        self._accelerator.current.wait_event(copied)
        self._read.append((copied, layouts, buffers))
        return tensors

    def release(self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]) -> None:
        """The buffers are given back when they have been copied from."""
