"""Interleaved 1F1B: 1F1B with several stages per worker, which fill the pipeline sooner."""

from __future__ import annotations

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.orders.one_f_one_b import alternate
from pipeworker.plan.partition import block
from pipeworker.plan.placement import Placement


def interleaved_1f1b(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of interleaved 1F1B (Narayanan et al. 2021, section 2.2), by worker.

    Micro-batches run in rounds: each worker runs a whole round on its first stage, then on its
    next one, and so on. A round of at least as many micro-batches as there are workers has passed
    through all of them when the first worker begins its next stage, so nobody waits. Megatron-LM
    requires rounds of exactly K; here M micro-batches are M // K rounds whose sizes differ by at
    most one, so that any M fills the pipeline.
    """
    workers = placement.workers
    count = max(1, microbatches // workers)
    rounds = [block(microbatches, count, number) for number in range(count)]
    orders = []
    for worker, stages in enumerate(placement.held):
        forwards = [Action(Kind.FORWARD, s, m) for part in rounds for s in stages for m in part]
        backwards = [
            Action(Kind.BACKWARD, s, m) for part in rounds for s in reversed(stages) for m in part
        ]
        # The last stage's first forward, and those that run until its gradient has come back.
        # With one stage this is 1F1B; with several, a gradient overtakes no forward on its way.
        way = (workers - 1 - worker) * min(2, len(stages))
        ahead = (len(stages) - 1) * len(rounds[0]) + way + 1
        orders.append(alternate(forwards, backwards, ahead))
    return orders
