"""Compute orders for tests, registered as schedules in the process that imports this module."""

from __future__ import annotations

from pipeworker.plan.orders import ORDERS, Order
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import Recomputed
from support import orders

SPLIT_BACKWARD = "test-split-backward"
LOOPED = "test-looped"
LOOPED_SPLIT_BACKWARD = "test-looped-split-backward"


def _zero_bubble(placement: Placement, microbatches: int, recomputed: Recomputed) -> orders.Orders:
    return orders.zero_bubble(placement, microbatches, lambda s, m: m in recomputed[s])


def _depth_first(placement: Placement, microbatches: int, recomputed: Recomputed) -> orders.Orders:
    return orders.depth_first(placement, microbatches, lambda s, m: m in recomputed[s])


for order in (
    Order(SPLIT_BACKWARD, _zero_bubble),
    Order(LOOPED, _depth_first, virtual_stages=2),
    Order(LOOPED_SPLIT_BACKWARD, _zero_bubble, virtual_stages=2),
):
    ORDERS[order.name] = order
