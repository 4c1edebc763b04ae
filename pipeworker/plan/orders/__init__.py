"""Compute orders, one a file: when each worker runs forward, recompute and backward.

:func:`pipeworker.plan.connect.connect` places the sends and receives around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import Action
from pipeworker.plan.connect import connect
from pipeworker.plan.offload import fetched
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import OFFLOAD, Pairs, Schedule, recomputed

Compute = list[list[Action]]
"""By worker, its compute actions in order."""


@dataclass(frozen=True, slots=True)
class Order:
    """A way to run a step.

    Attributes:
        compute: from a placement, a number of micro-batches and those that are recomputed.
        place: where stages are, for a number of workers.
    """

    compute: Callable[[Placement, int, Iterable[int]], Compute]
    place: Callable[[int], Placement] = Placement.identity


ORDERS: dict[str, Order] = {"gpipe": Order(gpipe)}


def order(name: str) -> Order:
    """The order of this name.

    Raises:
        ScheduleError: there is none.
    """
    if name not in ORDERS:
        raise ScheduleError(f"unknown schedule {name!r}: choose from {', '.join(ORDERS)}")
    return ORDERS[name]


def placement(name: str, workers: int, replicas: int = 1) -> Placement:
    """Where stages are under the named schedule, for a number of workers a replica.

    Raises:
        ScheduleError: there is none of this name.
    """
    return order(name).place(workers).copies(replicas)


def build(
    name: str,
    workers: int,
    microbatches: int,
    recompute: str,
    skips: Pairs = (),
    ties: Pairs = (),
) -> Schedule:
    """Make the named schedule where it puts stages by itself; see :func:`arrange`."""
    return arrange(name, placement(name, workers), microbatches, recompute, skips, ties)


def arrange(
    name: str,
    where: Placement,
    microbatches: int,
    recompute: str,
    skips: Pairs = (),
    ties: Pairs = (),
) -> Schedule:
    """Make the named schedule for a placement and a number of micro-batches.

    Among several replicas one may have no micro-batch: it takes part in adding up gradients alone.

    Args:
        microbatches: of this replica.
        skips, ties: see :class:`Schedule`.

    Raises:
        ScheduleError: the name or the recompute mode is unknown, or a count is not positive.
    """
    chosen = order(name)
    if where.workers < 1 or microbatches < (where.replicas == 1):
        raise ScheduleError("a schedule needs at least one stage and one micro-batch")
    compute = chosen.compute(where, microbatches, recomputed(recompute, microbatches))
    if recompute == OFFLOAD:
        compute = [fetched(order) for order in compute]
    return connect(name, microbatches, where, compute, skips, ties)
