"""The explanation of a deadlock: first the action that is stuck first, then what it waits for."""

from __future__ import annotations

import pytest

from pipeworker.errors import ScheduleError
from pipeworker.plan.orders import resolve
from pipeworker.plan.simulate import simulate
from pipeworker.plan.text import parse


def explained(text: str, capacity: int = 4) -> str:
    """Return what an order of compute actions deadlocks by."""
    order = resolve(text)
    workers = text.count("\n") - 1
    schedule = order.build(order.place(workers), order.microbatches or 0, ("never",) * 8)
    with pytest.raises(ScheduleError, match="deadlocks") as raised:
        simulate(schedule, capacity=capacity)
    return str(raised.value).partition(" frames: ")[2]


def test_workers_outside_of_the_circle_are_left_out() -> None:
    """Worker 3 waits for worker 2, which waits for the circle of 0 and 1: it is not named."""
    assert explained(
        "stuck stages=4 microbatches=2\n"
        "0: 0F0 0B0 0F1 0B1\n"
        "1: 1F0 1F1 1B0 1B1\n"
        "2: 2F0 2F1 2B0 2B1\n"
        "3: 3F0 3B0 3F1 3B1\n"
    ) == (
        "worker 0 cannot run 0B0: it waits for 1B0 of worker 1; "
        "worker 1 cannot run 1F1: it waits for 0F1 of worker 0"
    )


def test_a_full_channel_names_the_forward_that_would_empty_it() -> None:
    """Worker 0 fills the channel, while worker 1 waits for its second stage's micro-batch."""
    forwards = " ".join(f"0F{m}" for m in range(6)), " ".join(f"2F{m}" for m in range(6))
    backwards = " ".join(f"2B{m} 0B{m}" for m in range(6))
    other = " ".join(f"1F{m} 3F{m} 3B{m} 1B{m}" for m in range(6))
    assert explained(
        "full stages=4 microbatches=6 placement=0,2/1,3\n"
        f"0: {forwards[0]} {forwards[1]} {backwards}\n"
        f"1: {other}\n"
    ) == (
        "worker 1 cannot run 3F0: it waits for 2F0 of worker 0; "
        "worker 0 cannot send 0>A5, because 4 frames wait for 1F1 of worker 1"
    )


def test_a_receive_that_nothing_sends_is_named() -> None:
    lost = parse("lost stages=2 microbatches=1\n0: 0F0 0<G0 0B0\n1: 1F0 1B0")
    with pytest.raises(ScheduleError, match="cannot run 0B0: it waits for 1>G0, which no worker"):
        simulate(lost)


def test_exchanges_of_tied_weights_are_named_with_their_peer() -> None:
    tied = parse(
        "tied stages=2 microbatches=1 ties=0>1,1>0\n0: 0<TIE0@1 0>TIE0@1\n1: 1<TIE0@0 1>TIE0@0"
    )
    with pytest.raises(ScheduleError) as raised:
        simulate(tied)
    assert str(raised.value).endswith(
        "worker 0 cannot run 0<TIE0@1: it waits for 1>TIE0@0 of worker 1; "
        "worker 1 cannot run 1<TIE0@0: it waits for 0>TIE0@1 of worker 0"
    )
