"""V-Half and V-Min (Qi et al. 2024, 2405.15362), which repeat the times of one micro-batch.

The memory of such a schedule is known from its block: a worker holds a stage's graph from the
stage's forward to its backward, and a new block begins every six units of time, so that the sum of
these times over the worker's two stages, divided by six, is the number of graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.orders.squeeze import squeeze
from pipeworker.plan.placement import Placement

_PERIOD = 6
"""Forward, input part and weight part of two stages, of one unit each."""
_Block = tuple[int, int, int, int]
"""The times at which a micro-batch's forwards (down, up the V) and gradients (up, down) begin."""


def v_half(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of V-Half: half of 1F1B's memory, and half of its bubble.

    A worker holds at most (K + 2) // 2 micro-batches. In the block, forwards take two units from
    worker to worker down the V and one up, and so do gradients.
    """
    workers = placement.workers
    gap = 0 if workers % 2 else 3  # so that forwards and gradients do not collide
    blocks = [
        (2 * w, 3 * workers - 2 - w, 3 * workers - 1 + gap + 2 * w, 6 * workers - 2 + gap - w)
        for w in range(workers)
    ]
    return _repeated(placement, microbatches, blocks, 2 * ((workers + 2) // 2))


def v_min(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of V-Min: a third of 1F1B's memory, and two thirds of its bubble.

    A worker holds at most (K + 4) // 3 micro-batches: each passes down the V, up, and back the same
    way without a wait, so it is held for the shortest time that there is.
    """
    workers = placement.workers
    gap = 0 if workers % 3 else 2  # so that forwards and gradients do not collide
    blocks = [
        (w, 2 * workers - 1 - w, 2 * workers + gap + w, 4 * workers - 1 + gap - w)
        for w in range(workers)
    ]
    return _repeated(placement, microbatches, blocks, 2 * ((workers + 4) // 3))


def _repeated(
    placement: Placement, microbatches: int, blocks: Sequence[_Block], limit: int
) -> list[list[Action]]:
    """Return the orders that repeat a block for each micro-batch, with weight parts in the gaps.

    `placement` is a V, the times of each worker's block are not equal modulo six, and `limit` is
    the number of graphs that a worker may hold.
    """
    orders = []
    for (down, up), block in zip(placement.held, blocks, strict=True):
        kinds = [
            (Kind.FORWARD, down),
            (Kind.FORWARD, up),
            (Kind.BACKWARD_INPUT, up),
            (Kind.BACKWARD_INPUT, down),
        ]
        timed = [
            (begin + _PERIOD * m, Action(kind, stage, m))
            for begin, (kind, stage) in zip(block, kinds, strict=True)
            for m in range(microbatches)
        ]
        orders.append([action for _, action in sorted(timed)])
    return squeeze(placement, orders, limit)
