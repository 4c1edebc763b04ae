"""ZB-H1: 1F1B with split backwards, whose weight parts fill the gaps."""

from __future__ import annotations

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.orders.one_f_one_b import alternate
from pipeworker.plan.orders.squeeze import squeeze
from pipeworker.plan.placement import Placement


def zb_h1(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of ZB-H1 (Qi et al. 2023, section 2.1), by worker.

    Every worker holds at most K micro-batches, as 1F1B's first worker does: later workers have the
    memory to defer weight parts until they would wait for gradients.
    """
    numbers = range(microbatches)
    orders = [
        alternate(
            [Action(Kind.FORWARD, stage, m) for m in numbers],
            [Action(Kind.BACKWARD_INPUT, stage, m) for m in numbers],
            placement.workers - worker,
        )
        for worker, (stage,) in enumerate(placement.held)
    ]
    return squeeze(placement, orders, placement.workers)
