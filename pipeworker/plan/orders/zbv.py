"""ZB-V: two stages per worker in a V, with split backwards."""

from __future__ import annotations

from collections.abc import Iterator

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.orders.squeeze import numbered, squeeze
from pipeworker.plan.placement import Placement


def zbv(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of ZB-V (Qi et al. 2023, section 6), by worker.

    Each worker holds at most K micro-batches, as 1F1B's first worker does. The gradient of a
    micro-batch arrives at the first worker as soon as its last forward ends there, because that
    worker holds the last stage too; so the workers only wait while the pipeline fills.
    """
    workers = placement.workers
    count = max(microbatches, 2 * workers - 1)  # that fill the pipeline
    orders = [numbered(_steps(w, workers, count), microbatches) for w in range(workers)]
    return squeeze(placement, orders, 2 * workers)


def _steps(worker: int, workers: int, count: int) -> Iterator[tuple[Kind, int]]:
    """Yield the kinds and stages of a worker's forwards and input gradients, in order."""
    behind = workers - 1 - worker  # workers on the way to the turn of the V
    down, up = worker, 2 * workers - 1 - worker
    forward_down, forward_up = (Kind.FORWARD, down), (Kind.FORWARD, up)
    input_down, input_up = (Kind.BACKWARD_INPUT, down), (Kind.BACKWARD_INPUT, up)
    # Fill: down to the turn, up again, and gradients from the first worker on.
    yield from [forward_down] * (2 * behind + 1)
    yield from [forward_up, forward_down] * worker
    yield from [forward_up, input_up] * (behind + 1)
    # Steady state: one of each, and without forwards down where they have run out.
    yield from [forward_down, input_down, forward_up, input_up] * (count - workers - behind)
    yield from [input_down, forward_up, input_up] * behind
    # Drain.
    yield from [input_down, input_up] * worker
    yield from [input_down] * (behind + 1)
