"""Fill and drain."""

from __future__ import annotations

from collections.abc import Iterable

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.placement import Placement


def gpipe(placement: Placement, microbatches: int, recomputed: Iterable[int]) -> list[list[Action]]:
    """The fill-drain compute order of GPipe (Huang et al. 2019, section 2.3).

    All forwards, then all backwards, both in micro-batch order 0..M-1. A micro-batch in
    `recomputed` is forwarded again before its backward (torchgpipe, Kim et al. 2020, section 3.2).
    A worker with several stages runs one after the other, forwards ascending, backwards descending.
    """
    again = frozenset(recomputed)
    orders = []
    for held in placement.held:
        order = [Action(Kind.FORWARD, s, m) for s in held for m in range(microbatches)]
        for s in reversed(held):
            for m in range(microbatches):
                if m in again:
                    order.append(Action(Kind.RECOMPUTE, s, m))
                order.append(Action(Kind.BACKWARD, s, m))
        orders.append(order)
    return orders
