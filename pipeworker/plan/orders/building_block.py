"""Building blocks: schedules that repeat the times of one micro-batch (Qi et al. 2024).

The memory of such a schedule is known from its block: a worker holds a stage's graph from the
stage's forward to its backward, and a new block begins every six units of time, so that the sum of
these times over the worker's two stages, divided by six, is the number of graphs.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.orders.squeeze import squeeze
from pipeworker.plan.placement import Placement

_PERIOD = 6
"""Forward, input part and weight part of two stages, of one unit each."""
Block = tuple[int, int, int, int]
"""The times at which a micro-batch's forwards (down, up the V) and gradients (up, down) begin."""


def repeated(
    placement: Placement,
    microbatches: int,
    block: Callable[[int, int], Block],
    limit: int,
) -> list[list[Action]]:
    """Return the orders that repeat a block for each micro-batch, with weight parts in the gaps.

    `placement` is a V, `block` returns the times of a worker among so many, no two of which are
    equal modulo six, and `limit` is the number of graphs that a worker may hold.
    """
    orders = []
    for worker, (down, up) in enumerate(placement.held):
        kinds = [
            (Kind.FORWARD, down),
            (Kind.FORWARD, up),
            (Kind.BACKWARD_INPUT, up),
            (Kind.BACKWARD_INPUT, down),
        ]
        timed = [
            (begin + _PERIOD * m, Action(kind, stage, m))
            for begin, (kind, stage) in zip(block(worker, placement.workers), kinds, strict=True)
            for m in range(microbatches)
        ]
        orders.append([action for _, action in sorted(timed)])
    return squeeze(placement, orders, limit)
