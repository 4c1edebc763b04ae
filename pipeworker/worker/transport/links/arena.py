"""Shared memory to receive into, which two processes of a host map."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable

import torch

from pipeworker.worker.transport.layout import ALIGNMENT


class Heap:
    """Used and free ranges of regions, by address; it neither reads nor writes the memory.

    Allocation is best fit, with adjacent free ranges merged (Knuth, The Art of Computer
    Programming, volume 1, section 2.5).
    """

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}  # sizes, by start
        self._starts: list[int] = []  # of regions, in order
        self.free: dict[int, int] = {}
        """The sizes of the free ranges, by start."""
        self._ends: dict[int, int] = {}  # starts of free ranges, by end
        self._sizes: list[tuple[int, int]] = []  # sizes and starts of free ranges, in order
        self.used = 0
        """The bytes that are allocated."""

    @property
    def total(self) -> int:
        """The bytes of all regions."""
        return sum(self._regions.values())

    def add_region(self, start: int, size: int) -> None:
        """Add a region, all of it free."""
        self._regions[start] = size
        insort(self._starts, start)
        self._insert(start, size)

    def remove_region(self, start: int) -> bool:
        """Remove a region if all of it is free; return whether it was removed."""
        if self.free.get(start) != self._regions[start]:
            return False
        self._delete(start)
        del self._regions[start]
        self._starts.remove(start)
        return True

    def region_of(self, address: int) -> int:
        """Return the start of the region that has an address."""
        return self._starts[bisect_right(self._starts, address) - 1]

    def allocate(self, size: int) -> int | None:
        """Return the start of `size` bytes of the smallest free range that has them, or None."""
        index = bisect_left(self._sizes, (size, 0))
        if index == len(self._sizes):
            return None
        found, start = self._sizes[index]
        self._delete(start)
        if found > size:
            self._insert(start + size, found - size)
        self.used += size
        return start

    def release(self, start: int, size: int) -> None:
        """Free an allocated range. Regions are not merged, even where their addresses meet."""
        self.used -= size
        after = start + size
        if after in self.free and after not in self._regions:
            size += self._delete(after)
        if start in self._ends and start not in self._regions:
            before = self._ends[start]
            size += self._delete(before)
            start = before
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        self.free[start] = size
        self._ends[start + size] = start
        insort(self._sizes, (size, start))

    def _delete(self, start: int) -> int:
        size = self.free.pop(start)
        del self._ends[start + size]
        del self._sizes[bisect_left(self._sizes, (size, start))]
        return size


_ARENA_BYTES = 1 << 20
_SPARE = 8  # the part of the peak use that is kept besides it

Pin = Callable[[int, int], "Callable[[], None] | None"]
"""Pins memory, given its address and bytes; returns the undo, or None if it cannot be pinned."""


def address_of(memory: mmap.mmap) -> int:
    """Return the address in this process at which mapped memory begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Arena:
    """Memory that both ends map; only those of its pages that were written to are resident.

    Both ends refer to it by its number; its size is rounded up to whole pages.

    Raises:
        OSError: the system has no memory or descriptor for it.
    """

    def __init__(self, number: int, size: int, pin: Pin | None) -> None:
        count = -(-size // mmap.PAGESIZE)
        self.number, self.size = number, count * mmap.PAGESIZE
        self.descriptor = os.memfd_create("pipeworker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.size)
        # The sender maps only memory that cannot shrink: it would fault in the middle of a copy.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.memory = mmap.mmap(self.descriptor, self.size)
        self.start = address_of(self.memory)
        self._pages = bytearray(count)  # 1 for each that may have been written to
        undo = pin(self.start, self.size) if pin else None
        self._pinned = undo is not None
        if undo is not None:
            weakref.finalize(self.memory, undo).atexit = False

    @property
    def resident(self) -> int:
        """The bytes of its pages that may have been written to."""
        return self._pages.count(1) * mmap.PAGESIZE

    def use(self, start: int, size: int) -> memoryview:
        """Return the range of `size` bytes at address `start`, which will be written to."""
        first = start - self.start
        pages = slice(first // mmap.PAGESIZE, -(-(first + size) // mmap.PAGESIZE))
        self._pages[pages] = b"\1" * (pages.stop - pages.start)
        return memoryview(self.memory)[first : first + size]

    def clear(self, start: int, size: int) -> None:
        """Return the whole pages of a free range to the system, unless a device has pinned them."""
        if self._pinned:
            return
        first = -(-(start - self.start) // mmap.PAGESIZE)
        count = (start - self.start + size) // mmap.PAGESIZE - first
        if count > 0:
            with contextlib.suppress(OSError):  # memory that the user has locked stays
                self.memory.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, count * mmap.PAGESIZE)
            self._pages[first : first + count] = bytes(count)


class ArenaAllocator:
    """Memory that a sender maps and writes to, allocated in ranges of arenas.

    A range is free when no tensor refers to it any more, and then serves any size that fits.
    However the sizes change, at most an eighth more is resident than was in use at once. Free
    memory beyond that returns to the system, page by page, for both ends.

    Args:
        announce: reports a new arena to the sender, before its memory is used.
        retire: reports to the sender that an arena is no longer used.
        pin: pins arenas for an accelerator, if there is one.
    """

    def __init__(
        self,
        announce: Callable[[Arena], None],
        retire: Callable[[Arena], None],
        pin: Pin | None = None,
    ) -> None:
        self._announce, self._retire, self._pin = announce, retire, pin
        self._arenas: dict[int, Arena] = {}  # by start
        self._numbers = itertools.count()
        self._heap = Heap()
        self._limit = 0  # bytes: the most that was in use at once, and an eighth
        self._touched = 0  # bytes, at most, of pages that were written to
        self._ranges: dict[int, tuple[int, weakref.ref[memoryview]]] = {}  # in use: size, watcher
        self._freed: deque[int] = deque()  # appended to by the thread that drops the last reference
        self.locations: dict[int, tuple[int, int]] = {}
        """The arena's number and the offset in it of each range in use, by its address."""

    def allocate(self, count: int) -> torch.Tensor:
        """Return a uint8 tensor of `count` bytes that the sender can write to.

        Raises:
            OSError: the system has no memory for it, or the sender is gone.
        """
        while self._freed:
            start = self._freed.popleft()
            del self.locations[start]
            self._heap.release(start, self._ranges.pop(start)[0])
        size = max(1, -(-count // ALIGNMENT)) * ALIGNMENT
        if not self._heap.used and self._heap.total > max(self._limit, _ARENA_BYTES):
            self._drop_arenas()
        start = self._heap.allocate(size) or self._add_arena(size)
        self._limit = max(self._limit, self._heap.used + self._heap.used // _SPARE)
        self._touched += size
        if self._touched > self._limit:
            self._trim()
        # The range has a storage of its own; when that ends, the range is noted as freed.
        arena, freed = self._arenas[self._heap.region_of(start)], self._freed
        view = arena.use(start, size)
        self._ranges[start] = size, weakref.ref(view, lambda _: freed.append(start))
        self.locations[start] = arena.number, start - arena.start
        return torch.frombuffer(view, dtype=torch.uint8)[:count]

    def _add_arena(self, size: int) -> int:
        """Return the start of `size` bytes in a new arena, which replaces all unused ones."""
        self._drop_arenas()
        heap = self._heap
        room = max(size, self._limit - heap.total, heap.used, _ARENA_BYTES)  # few, as each doubles
        arena = Arena(next(self._numbers), room, self._pin)
        try:
            self._announce(arena)
        finally:
            os.close(arena.descriptor)
        self._arenas[arena.start] = arena
        heap.add_region(arena.start, arena.size)
        return heap.allocate(size) or 0

    def _drop_arenas(self) -> None:
        """Unmap the arenas that are not in use, at both ends."""
        for arena in [a for start, a in self._arenas.items() if self._heap.remove_region(start)]:
            arena.clear(arena.start, arena.size)  # the sender may unmap it only later
            del self._arenas[arena.start]
            self._retire(arena)

    def _trim(self) -> None:
        """Return free memory to the system if more is resident than the limit."""
        self._touched = sum(arena.resident for arena in self._arenas.values())
        if self._touched > self._limit:
            for start, size in self._heap.free.items():
                self._arenas[self._heap.region_of(start)].clear(start, size)
            self._touched = self._heap.used
