"""Registers orders of the tests as schedules, in the process that imports it."""

from __future__ import annotations

from collections.abc import Iterable

from pipeworker.plan.orders import ORDERS, Order
from pipeworker.plan.placement import Placement
from support import orders

WITH_HALVES = "test-halves"
LOOPED = "test-looped"
LOOPED_HALVES = "test-looped-halves"


def _halves(placement: Placement, microbatches: int, again: Iterable[int]) -> orders.Orders:
    some = set(again)
    return orders.zero_bubble(placement, microbatches, lambda _, m: m in some)


def _deep(placement: Placement, microbatches: int, again: Iterable[int]) -> orders.Orders:
    some = set(again)
    return orders.depth_first(placement, microbatches, lambda _, m: m in some)


def _twice(workers: int) -> Placement:
    return Placement.looped(workers, 2)


ORDERS.update(
    {
        WITH_HALVES: Order(_halves),
        LOOPED: Order(_deep, _twice),
        LOOPED_HALVES: Order(_halves, _twice),
    }
)
