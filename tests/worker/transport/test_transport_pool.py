"""Buffers are used again, but never while they are in use, and few are held."""

from __future__ import annotations

import weakref

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pipeworker.worker.transport.frame import ALIGNMENT, Layout, layout_of
from pipeworker.worker.transport.links.link import MemoryLink
from pipeworker.worker.transport.pool import BufferPool

allocate = MemoryLink().allocate


def test_a_pool_gives_the_buffers_of_a_shape_again_the_last_one_first() -> None:
    pool = BufferPool(allocate)
    layout = layout_of(torch.zeros(2, 3))
    buffers = [pool.take(layout) for _ in range(3)]
    pool.give([layout] * 3, buffers)
    for buffer in reversed(buffers):
        assert pool.take(layout) is buffer
    assert all(pool.take(layout) is not buffer for buffer in buffers)


class Pools(RuleBasedStateMachine):
    """What is out, or kept by the user, is in nobody else's memory; and little else is held."""

    taken, kept = Bundle("taken"), Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []
        self.pool = BufferPool(self.allocate)
        self.out: dict[int, torch.Tensor] = {}
        self.user: dict[int, torch.Tensor] = {}
        self.number = 0
        self.most = 0

    def allocate(self, count: int) -> torch.Tensor:
        memory = allocate(count)
        self.made.append(weakref.ref(memory.untyped_storage()))
        return memory

    @rule()
    def begin(self) -> None:
        self.pool.begin()

    @rule(
        target=taken,
        shape=st.sampled_from([(40, 5), (50, 4), (300,), (7, 90), (2000,), (0, 3)]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, Layout]:
        layout = layout_of(torch.empty(shape, dtype=dtype))
        buffer = self.pool.take(layout)
        assert (buffer.shape, buffer.dtype) == (shape, dtype)
        self.number += 1
        buffer.fill_(self.number)
        self.out[self.number] = buffer
        self.most = max(self.most, sum(b.nbytes for b in self.out.values()))
        return self.number, layout

    @rule(one=consumes(taken), target=kept, keeps=st.booleans())
    def give(self, one: tuple[int, Layout], keeps: bool) -> int:
        number, layout = one
        buffer = self.out.pop(number)
        if keeps:
            self.user[number] = buffer[1:]
        self.pool.give([layout], [buffer])
        return number

    @rule(number=consumes(kept))
    def forget(self, number: int) -> None:
        self.user.pop(number, None)

    @invariant()
    def nobody_writes_to_what_is_in_use(self) -> None:
        for number, tensor in [*self.out.items(), *self.user.items()]:
            assert bool((tensor == number).all())

    @invariant()
    def little_is_free(self) -> None:
        theirs = {t.untyped_storage().data_ptr() for t in self.user.values()}
        alive = [storage for ref in self.made if (storage := ref()) is not None]
        held = sum(s.nbytes() - ALIGNMENT for s in alive if s.data_ptr() not in theirs)
        assert held <= 1.25 * self.most


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
