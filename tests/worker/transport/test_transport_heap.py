"""Ranges of memory: a model of single bytes says what is free."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pipeworker.worker.transport.heap import Heap

_GAP = 1000


class Ranges(RuleBasedStateMachine):
    """Bytes are free or used, and regions may lie side by side."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.heap = Heap()
        self.regions: dict[int, int] = {}
        self.used: set[int] = set()
        self.end = _GAP

    def gaps(self) -> list[tuple[int, int]]:
        """Start and size of each run of free bytes within a region."""
        found = []
        for start, size in sorted(self.regions.items()):
            run = 0
            for place in range(start, start + size + 1):
                if place < start + size and place not in self.used:
                    run += 1
                elif run:
                    found.append((place - run, run))
                    run = 0
        return found

    @rule(size=st.integers(1, 12), apart=st.booleans())
    def add(self, size: int, apart: bool) -> None:
        start = self.end + _GAP * apart
        self.heap.add(start, size)
        self.regions[start] = size
        self.end = start + size

    @rule(target=taken, size=st.integers(1, 8))
    def take(self, size: int) -> tuple[int, int]:
        fitting = [gap for gap in self.gaps() if gap[1] >= size]
        start = self.heap.take(size)
        assert (start is None) == (not fitting)
        if start is None:
            return 0, 0
        assert (start, min(gap[1] for gap in fitting)) in fitting  # where least is left over
        self.used |= set(range(start, start + size))
        inside = self.heap.region(start)
        assert inside <= start
        assert start + size <= inside + self.regions[inside]
        return start, size

    @rule(one=consumes(taken))
    def give(self, one: tuple[int, int]) -> None:
        start, size = one
        if size:
            self.heap.give(start, size)
            self.used -= set(range(start, start + size))

    @rule()
    def remove(self) -> None:
        for start, size in list(self.regions.items()):
            unused = self.used.isdisjoint(range(start, start + size))
            assert self.heap.remove(start) == unused
            if unused:
                del self.regions[start]

    @invariant()
    def what_is_free_is_known_and_in_one_piece(self) -> None:
        assert sorted(self.heap.free()) == self.gaps()
        assert self.heap.used == len(self.used)
        assert self.heap.total == sum(self.regions.values())


Ranges.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRanges = Ranges.TestCase
