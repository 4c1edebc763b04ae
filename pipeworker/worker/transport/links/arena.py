"""Memory that two processes of a host map, page by page."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable

Pin = Callable[[int, int], "Callable[[], None] | None"]
"""Pins memory, given its address and bytes; returns what undoes it, or None where it cannot be."""


def address_of(memory: mmap.mmap) -> int:
    """Where it begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Arena:
    """Memory that both ends map; the system holds only those of its pages that were written to."""

    def __init__(self, number: int, size: int, pin: Pin | None) -> None:
        count = -(-size // mmap.PAGESIZE)
        self.number, self.size = number, count * mmap.PAGESIZE
        self.handle = os.memfd_create("pipeworker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.handle, self.size)
        fcntl.fcntl(self.handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # or no sender trusts it
        self.memory = mmap.mmap(self.handle, self.size)
        self.start = address_of(self.memory)
        self._pages = bytearray(count)  # 1 for each that may have been written to
        undo = pin(self.start, self.size) if pin else None
        self._pinned = undo is not None
        if undo is not None:
            weakref.finalize(self.memory, undo).atexit = False

    @property
    def held(self) -> int:
        """Bytes of memory, at most."""
        return self._pages.count(1) * mmap.PAGESIZE

    def use(self, start: int, size: int) -> memoryview:
        """A range that will be written to."""
        first = start - self.start
        pages = slice(first // mmap.PAGESIZE, -(-(first + size) // mmap.PAGESIZE))
        self._pages[pages] = b"\1" * (pages.stop - pages.start)
        return memoryview(self.memory)[first : first + size]

    def clear(self, start: int, size: int) -> None:
        """Give the whole pages of a free range back to the system, unless a device has them."""
        if self._pinned:
            return
        first = -(-(start - self.start) // mmap.PAGESIZE)
        count = (start - self.start + size) // mmap.PAGESIZE - first
        if count > 0:
            with contextlib.suppress(OSError):  # what the user locked into memory stays there
                where = first * mmap.PAGESIZE, count * mmap.PAGESIZE
                self.memory.madvise(mmap.MADV_REMOVE, *where)
            self._pages[first : first + count] = bytes(count)
