"""The allocator of ranges, against a model that marks single bytes as used or free."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from pipeworker.worker.transport.links.arena import Heap
from support.draws import draws


class HeapModel(RuleBasedStateMachine):
    """Every byte is free or used."""

    allocated = Bundle("allocated")

    @initialize(size=st.integers(1, 60))
    def begin(self, size: int) -> None:
        self.heap, self.size = Heap(size), size
        self.used: set[int] = set()

    def gaps(self) -> list[tuple[int, int]]:
        """Return start and size of each run of free bytes."""
        found = []
        run = 0
        for address in range(self.size + 1):
            if address < self.size and address not in self.used:
                run += 1
            elif run:
                found.append((address - run, run))
                run = 0
        return found

    @rule(target=allocated, size=st.integers(1, 8))
    def allocate(self, size: int) -> tuple[int, int]:
        fitting = [gap for gap in self.gaps() if gap[1] >= size]
        start = self.heap.allocate(size)
        assert (start is None) == (not fitting)
        if start is None:
            return 0, 0
        assert (start, min(gap[1] for gap in fitting)) in fitting  # the best fit
        self.used |= set(range(start, start + size))
        return start, size

    @rule(one=consumes(allocated))
    def release(self, one: tuple[int, int]) -> None:
        start, size = one
        if size:
            self.heap.release(start, size)
            self.used -= set(range(start, start + size))

    @invariant()
    def free_ranges_are_known_and_merged(self) -> None:
        assert sorted(self.heap.free.items()) == self.gaps()


HeapModel.TestCase.settings = settings(
    max_examples=draws(25), stateful_step_count=40, deadline=None
)
TestHeap = HeapModel.TestCase
