"""V-Min: a third of 1F1B's memory, and two thirds of its bubble."""

from __future__ import annotations

from pipeworker.plan.actions import Action
from pipeworker.plan.orders.building_block import Block, repeated
from pipeworker.plan.placement import Placement


def v_min(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of V-Min (Qi et al. 2024, 2405.15362), by worker.

    A worker holds at most (K + 4) // 3 micro-batches: each passes down the V, up, and back the same
    way without a wait, so it is held for the shortest time that there is.
    """
    limit = 2 * ((placement.workers + 4) // 3)
    return repeated(placement, microbatches, _block, limit)


def _block(worker: int, workers: int) -> Block:
    gap = 0 if workers % 3 else 2  # so that forwards and gradients do not collide
    return (
        worker,
        2 * workers - 1 - worker,
        2 * workers + gap + worker,
        4 * workers - 1 + gap - worker,
    )
