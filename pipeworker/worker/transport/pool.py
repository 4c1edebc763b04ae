"""Buffers to receive into, used again from step to step, and few whatever shapes there are."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence

import torch

from pipeworker.worker.internals import storage_uses
from pipeworker.worker.transport.frame import Layout, buffer_for, unpack

_SPARE = 4  # what a pool has besides what was out at once: this part of it

_Free = dict[Hashable, list[torch.Tensor]]
"""By what layouts that can share memory have in common."""


class BufferPool:
    """Buffers to receive into, by shape, dtype and alignment.

    A buffer is used again only when nothing refers to its storage any more: what the user's code
    kept of a received tensor stays as it was. When shapes change, free buffers make room for those
    of other shapes: a pool has at most a quarter more than was out at once.
    """

    in_place = True
    """Whether what was received is looked at where it is, as soon as it is there."""

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self._alone = 0
        self._free: _Free = {}  # of shapes that this step has seen
        self._rest: _Free = {}
        self._settled = False  # whether the rest is what may be kept of it
        self._held = 0  # bytes, out or free
        self._most = 0  # bytes out at once

    def begin(self) -> None:
        """A step starts: what it does not use makes room first."""
        for memory, some in self._rest.items():
            self._free[memory] = some + self._free.get(memory, [])
        self._free, self._rest, self._settled = {}, self._free, False

    def take(self, layout: Layout) -> torch.Tensor:
        free = self._free.get(layout.memory)
        while free:
            buffer = free.pop()
            if storage_uses(buffer) <= self._alone:
                return buffer
            self._held -= buffer.nbytes  # it is the user's now
        if layout.memory not in self._rest:
            return self._make(layout)
        self._free[layout.memory] = self._rest.pop(layout.memory)
        return self.take(layout)

    def give(self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]) -> None:
        """Take buffers back that were taken for these layouts."""
        for layout, buffer in zip(layouts, buffers, strict=True):
            self._free.setdefault(layout.memory, []).append(buffer)

    release = give
    """What was received is no longer needed."""

    def values(
        self, layouts: Sequence[Layout], buffers: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """The tensors of these layouts that were received."""
        return [unpack(buffer, layout) for buffer, layout in zip(buffers, layouts, strict=True)]

    def _make(self, layout: Layout) -> torch.Tensor:
        self._held += math.prod(layout.packed) * layout.dtype.itemsize
        if not self._settled:
            self._settled = True
            if (rest := _bytes(self._rest)) > self._most // _SPARE:
                self._let_go(rest)  # all at once, so that its memory is in one piece
        if self._held > self._most + self._most // _SPARE:
            out = self._held - _bytes(self._rest) - _bytes(self._free)
            self._most = max(self._most, out)
            self._let_go(self._held - self._most - self._most // _SPARE)
        buffer = buffer_for(layout, self._allocate)
        self._alone = storage_uses(buffer)
        return buffer

    def _let_go(self, size: int) -> None:
        """Of so many bytes of free buffers, those first that this step has not seen."""
        for free in (self._rest, self._free):
            for memory, some in list(free.items()):
                each = some[0].nbytes if some else 0
                count = max(0, min(len(some), -(-size // each))) if each else len(some)
                del some[:count]  # those that were used last are last
                self._held -= count * each
                size -= count * each
                if not some:
                    del free[memory]


def _bytes(free: _Free) -> int:
    """Bytes of free buffers; those of one layout are alike."""
    return sum([len(some) * some[0].nbytes for some in free.values() if some])
