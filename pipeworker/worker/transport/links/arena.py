"""Shared memory to receive into, which two processes of a host map."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable

import torch

from pipeworker.worker.transport.layout import ALIGNMENT


class Heap:
    """Used and free ranges of some memory, by offset; it neither reads nor writes the memory.

    Allocation is best fit, with adjacent free ranges merged (Knuth, The Art of Computer
    Programming, volume 1, section 2.5).
    """

    def __init__(self, size: int) -> None:
        self.free: dict[int, int] = {}
        """The sizes of the free ranges, by start."""
        self._ends: dict[int, int] = {}  # starts of free ranges, by end
        self._sizes: list[tuple[int, int]] = []  # sizes and starts of free ranges, in order
        self._insert(0, size)

    def allocate(self, size: int) -> int | None:
        """Return the start of `size` bytes of the smallest free range that has them, or None."""
        index = bisect_left(self._sizes, (size, 0))
        if index == len(self._sizes):
            return None
        found, start = self._sizes[index]
        self._delete(start)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def release(self, start: int, size: int) -> None:
        """Free an allocated range."""
        for neighbour in (self._ends.get(start, -1), start + size):
            if neighbour in self.free:
                size += self._delete(neighbour)
                start = min(start, neighbour)
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
        self.heap = Heap(self.size)
        self._pages = bytearray(count)  # 1 for each that may have been written to
        undo = pin(self.start, self.size) if pin else None
        self._pinned = undo is not None
        if undo is not None:
            weakref.finalize(self.memory, undo).atexit = False

    @property
    def resident(self) -> int:
        """The bytes of its pages that may have been written to."""
        return self._pages.count(1) * mmap.PAGESIZE

    def use(self, offset: int, size: int) -> memoryview:
        """Return the range of `size` bytes at an offset, which will be written to."""
        pages = slice(offset // mmap.PAGESIZE, -(-(offset + size) // mmap.PAGESIZE))
        self._pages[pages] = b"\1" * (pages.stop - pages.start)
        return memoryview(self.memory)[offset : offset + size]

    def clear(self, offset: int, size: int) -> None:
        """Return the whole pages of a free range to the system, unless a device has pinned them."""
        first = -(-offset // mmap.PAGESIZE)
        count = (offset + size) // mmap.PAGESIZE - first
        if count > 0 and not self._pinned:
            with contextlib.suppress(OSError):  # memory that the user has locked stays
                self.memory.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, count * mmap.PAGESIZE)
            self._pages[first : first + count] = bytes(count)


class ArenaAllocator:
    """Memory that a sender maps and writes to, allocated in ranges of arenas.

    A range is free when no tensor refers to it any more, and then serves any size that fits.
    However the sizes change, at most an eighth more is resident than was in use at once. Free
    memory beyond that returns to the system, page by page, for both ends.

    Args:
        report: reports an arena to the sender: a new one before its memory is used (True), and one
            that is no longer used (False).
        pin: pins arenas for an accelerator, if there is one.
    """

    def __init__(self, report: Callable[[Arena, bool], None], pin: Pin | None) -> None:
        self._report, self._pin = report, pin
        self._arenas: list[Arena] = []
        self._numbers = itertools.count()
        self._used = 0  # bytes
        self._limit = 0  # bytes: the most that was in use at once, and an eighth
        self._touched = 0  # bytes, at most, of pages that were written to
        # In use, by address: the arena, the size, and the watcher.
        self._ranges: dict[int, tuple[Arena, int, weakref.ref[memoryview]]] = {}
        self._freed: deque[int] = deque()  # appended to by the thread that drops the last reference
        self.locations: dict[int, tuple[int, int]] = {}
        """The arena's number and the offset in it of each range in use, by its address."""

    def allocate(self, count: int) -> torch.Tensor:
        """Return a uint8 tensor of `count` bytes that the sender can write to.

        Raises:
            OSError: the system has no memory for it, or the sender is gone.
        """
        while self._freed:
            address = self._freed.popleft()
            arena, size, _ = self._ranges.pop(address)
            arena.heap.release(self.locations.pop(address)[1], size)
            self._used -= size
        size = max(1, -(-count // ALIGNMENT)) * ALIGNMENT
        if not self._used and self._total() > max(self._limit, _ARENA_BYTES):
            self._drop_arenas()
        arena, offset = self._take(size)
        self._used += size
        self._limit = max(self._limit, self._used + self._used // _SPARE)
        self._touched += size
        if self._touched > self._limit:
            self._trim()
        # The range has a storage of its own; when that ends, the range is noted as freed.
        address, freed = arena.start + offset, self._freed
        view = arena.use(offset, size)
        self._ranges[address] = arena, size, weakref.ref(view, lambda _: freed.append(address))
        self.locations[address] = arena.number, offset
        return torch.frombuffer(view, dtype=torch.uint8)[:count]

    def _total(self) -> int:
        return sum([arena.size for arena in self._arenas])

    def _take(self, size: int) -> tuple[Arena, int]:
        """Allocate a range; return its arena and its offset there.

        If no arena has room, a new one replaces all unused ones.
        """
        for arena in self._arenas:
            if (offset := arena.heap.allocate(size)) is not None:
                return arena, offset
        self._drop_arenas()
        room = max(size, self._limit - self._total(), self._used, _ARENA_BYTES)  # each doubles: few
        arena = Arena(next(self._numbers), room, self._pin)
        try:
            self._report(arena, True)
        finally:
            os.close(arena.descriptor)
        self._arenas.append(arena)
        return arena, arena.heap.allocate(size) or 0

    def _drop_arenas(self) -> None:
        """Unmap the arenas that are not in use, at both ends."""
        for arena in [a for a in self._arenas if a.heap.free.get(0) == a.size]:
            arena.clear(0, arena.size)  # the sender may unmap it only later
            self._arenas.remove(arena)
            self._report(arena, False)

    def _trim(self) -> None:
        """Return free memory to the system if more is resident than the limit."""
        self._touched = sum([arena.resident for arena in self._arenas])
        if self._touched > self._limit:
            for arena in self._arenas:
                for offset, size in arena.heap.free.items():
                    arena.clear(offset, size)
            self._touched = self._used
