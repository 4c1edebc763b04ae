"""1F1B: forwards and backwards in turn, so that few micro-batches are held at once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.placement import Placement


def one_f_one_b(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of 1F1B (PipeDream-Flush, Narayanan et al. 2021), by worker.

    Worker w of K runs K - w forwards, and from then on a backward and a forward in turn. A step
    takes as long as under GPipe, but the worker holds at most K - w micro-batches instead of M.
    """
    orders = []
    for worker, (stage,) in enumerate(placement.held):
        forwards = [Action(Kind.FORWARD, stage, m) for m in range(microbatches)]
        backwards = [Action(Kind.BACKWARD, stage, m) for m in range(microbatches)]
        orders.append(alternate(forwards, backwards, placement.workers - worker))
    return orders


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """Return `ahead` forwards, and then a backward and a forward in turn, as long as there are."""
    pairs = zip_longest(backwards, forwards[ahead:])
    return [*forwards[:ahead], *(action for pair in pairs for action in pair if action)]
