"""GPipe's fill and drain: all forwards, then all backwards."""

from __future__ import annotations

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.placement import Placement


def gpipe(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the fill-drain compute order of GPipe (Huang et al. 2019, section 2.3), by worker.

    Forwards and backwards both run in micro-batch order 0..M-1. A worker with several stages runs
    one after the other: forwards ascending, backwards descending.
    """
    orders = []
    for stages in placement.held:
        order = [Action(Kind.FORWARD, s, m) for s in stages for m in range(microbatches)]
        order += [
            Action(Kind.BACKWARD, s, m) for s in reversed(stages) for m in range(microbatches)
        ]
        orders.append(order)
    return orders
