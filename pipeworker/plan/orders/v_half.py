"""V-Half: half of 1F1B's memory, and half of its bubble."""

from __future__ import annotations

from pipeworker.plan.actions import Action
from pipeworker.plan.orders.building_block import Block, repeated
from pipeworker.plan.placement import Placement


def v_half(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of V-Half (Qi et al. 2024, 2405.15362), by worker.

    A worker holds at most (K + 2) // 2 micro-batches. In the block, forwards take two units from
    worker to worker down the V and one up, and so do gradients.
    """
    limit = 2 * ((placement.workers + 2) // 2)
    return repeated(placement, microbatches, _block, limit)


def _block(worker: int, workers: int) -> Block:
    gap = 0 if workers % 2 else 3  # so that forwards and gradients do not collide
    return (
        2 * worker,
        3 * workers - 2 - worker,
        3 * workers - 1 + gap + 2 * worker,
        6 * workers - 2 + gap - worker,
    )
