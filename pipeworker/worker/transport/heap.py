"""Which ranges of memory are free: best fit, and free neighbours are one range (Knuth, 2.5)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator


class Heap:
    """Ranges of regions, by address. Nothing is read or written here."""

    def __init__(self) -> None:
        self._regions: dict[int, int] = {}  # sizes, by start
        self._starts: list[int] = []  # of regions, in order
        self._free: dict[int, int] = {}  # sizes, by start
        self._ends: dict[int, int] = {}  # starts of what is free, by end
        self._sizes: list[tuple[int, int]] = []  # sizes and starts of what is free, in order
        self.used = 0

    @property
    def total(self) -> int:
        """Bytes of all regions."""
        return sum(self._regions.values())

    def free(self) -> Iterator[tuple[int, int]]:
        """Start and size of each free range."""
        yield from self._free.items()

    def add(self, start: int, size: int) -> None:
        """A new region, all of it free."""
        self._regions[start] = size
        insort(self._starts, start)
        self._insert(start, size)

    def remove(self, start: int) -> bool:
        """Forget a region if all of it is free; whether it was."""
        if self._free.get(start) != self._regions[start]:
            return False
        self._delete(start)
        del self._regions[start]
        self._starts.remove(start)
        return True

    def region(self, address: int) -> int:
        """The start of the region an address is in."""
        return self._starts[bisect_right(self._starts, address) - 1]

    def take(self, size: int) -> int | None:
        """The start of so many bytes, of the smallest free range that has them."""
        place = bisect_left(self._sizes, (size, 0))
        if place == len(self._sizes):
            return None
        found, start = self._sizes[place]
        self._delete(start)
        if found > size:
            self._insert(start + size, found - size)
        self.used += size
        return start

    def give(self, start: int, size: int) -> None:
        """A range is free again. Regions are not joined, though their addresses may meet."""
        self.used -= size
        after = start + size
        if after in self._free and after not in self._regions:
            size += self._delete(after)
        if start in self._ends and start not in self._regions:
            before = self._ends[start]
            size += self._delete(before)
            start = before
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        self._free[start] = size
        self._ends[start + size] = start
        insort(self._sizes, (size, start))

    def _delete(self, start: int) -> int:
        size = self._free.pop(start)
        del self._ends[start + size]
        del self._sizes[bisect_left(self._sizes, (size, start))]
        return size
