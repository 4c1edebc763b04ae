"""The allocator of ranges, against a model that marks single bytes as used or free."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pipeworker.worker.transport.links.arena import Heap

_GAP = 1000


class HeapModel(RuleBasedStateMachine):
    """Every byte is free or used; regions may be adjacent."""

    allocated = Bundle("allocated")

    def __init__(self) -> None:
        super().__init__()
        self.heap = Heap()
        self.regions: dict[int, int] = {}
        self.used: set[int] = set()
        self.end = _GAP

    def gaps(self) -> list[tuple[int, int]]:
        """Return start and size of each run of free bytes within a region."""
        found = []
        for start, size in sorted(self.regions.items()):
            run = 0
            for address in range(start, start + size + 1):
                if address < start + size and address not in self.used:
                    run += 1
                elif run:
                    found.append((address - run, run))
                    run = 0
        return found

    @rule(size=st.integers(1, 12), apart=st.booleans())
    def add_region(self, size: int, apart: bool) -> None:
        start = self.end + _GAP * apart
        self.heap.add_region(start, size)
        self.regions[start] = size
        self.end = start + size

    @rule(target=allocated, size=st.integers(1, 8))
    def allocate(self, size: int) -> tuple[int, int]:
        fitting = [gap for gap in self.gaps() if gap[1] >= size]
        start = self.heap.allocate(size)
        assert (start is None) == (not fitting)
        if start is None:
            return 0, 0
        assert (start, min(gap[1] for gap in fitting)) in fitting  # the best fit
        self.used |= set(range(start, start + size))
        region = self.heap.region_of(start)
        assert region <= start
        assert start + size <= region + self.regions[region]
        return start, size

    @rule(one=consumes(allocated))
    def release(self, one: tuple[int, int]) -> None:
        start, size = one
        if size:
            self.heap.release(start, size)
            self.used -= set(range(start, start + size))

    @rule()
    def remove_regions(self) -> None:
        for start, size in list(self.regions.items()):
            unused = self.used.isdisjoint(range(start, start + size))
            assert self.heap.remove_region(start) == unused
            if unused:
                del self.regions[start]

    @invariant()
    def free_ranges_are_known_and_merged(self) -> None:
        assert sorted(self.heap.free.items()) == self.gaps()
        assert self.heap.used == len(self.used)
        assert self.heap.total == sum(self.regions.values())


HeapModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHeap = HeapModel.TestCase
