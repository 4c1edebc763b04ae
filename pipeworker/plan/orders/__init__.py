"""Compute orders, one per file: in which order each worker runs forward, recompute and backward.

How to add a schedule
---------------------

Write a function in a file of this folder that returns, for each worker of a replica, its *compute*
actions in the order in which the worker is to run them, and register it in :data:`ORDERS`::

    def one_f_one_b(placement, microbatches, recomputed):
        orders = []
        for worker, stages in enumerate(placement.held):
            ...
        return orders  # [[0F0 0F1 0B0 0B1], [1F0 1B0 1F1 1B1]] for 2 workers, 2 micro-batches

    ORDERS["1f1b"] = Order(one_f_one_b)

``placement.held[worker]`` are the stages of a worker, ascending,
`microbatches` is M, and ``recomputed[stage]`` contains the micro-batches that need an ``R`` before
their backward. The actions are those of :mod:`pipeworker.plan.actions`: ``F`` and ``B`` once for
each stage and micro-batch, ``I`` and ``W`` instead of ``B`` where the backward is split, ``R`` for
each recomputed one. An order contains no other kind of action: around it,
:func:`pipeworker.plan.connect.connect` places sends, receives, the load of the next mini-batch and
the exchanges between replicas and of tied weights, and
:func:`pipeworker.plan.recompute.with_fetches` places offload's fetches.

Two rules, which :func:`pipeworker.plan.check.check` verifies for every schedule before it runs:

- Each action comes after those that it needs, on its own worker; on other workers the receives
  wait. The checker plays all channels once, so an order that can deadlock is refused.
- Each stage adds its weights' gradients in micro-batch order 0..M-1 (``B`` or ``W``), because that
  makes the numbers equal, bit for bit, under every schedule.

An order with several stages per worker specifies their default number and how they are placed:
``Order(compute, place=Placement.looped, virtual_stages=2)``. ``tests/plan/test_plan_orders.py``
runs every registered order through the checker for all recompute modes.
``tests/support/registered.py`` has orders that split the backward, and some with two stages a
worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeworker.errors import ScheduleError, UsageError
from pipeworker.plan.actions import Action
from pipeworker.plan.connect import connect
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import OFFLOAD, Recomputed, recomputed, with_fetches
from pipeworker.plan.schedule import Pairs, Schedule

Compute = list[list[Action]]
"""By worker of a replica, its compute actions in order."""


@dataclass(frozen=True, slots=True)
class Order:
    """A compute order that is registered by name.

    `compute` gets a placement, the number of micro-batches and the recomputed ones by stage;
    `place` the number of workers in a replica and of stages per worker.
    """

    compute: Callable[[Placement, int, Recomputed], Compute]
    place: Callable[[int, int], Placement] = Placement.looped
    virtual_stages: int = 1


ORDERS: dict[str, Order] = {"gpipe": Order(gpipe)}


@dataclass(frozen=True, slots=True)
class RegisteredOrder:
    """One of :data:`~pipeworker.plan.orders.ORDERS`: it makes schedules for any workers."""

    name: str
    order: Order

    def place(self, workers: int, replicas: int = 1) -> Placement:
        """Return which worker holds which stages."""
        return self.order.place(workers, self.order.virtual_stages).copies(replicas)

    def build(
        self,
        placement: Placement,
        microbatches: int,
        modes: Sequence[str],
        skips: Pairs = (),
        ties: Pairs = (),
    ) -> Schedule:
        """Make the schedule of a replica, with the recompute mode of each stage; unchecked.

        One of several replicas may have no micro-batch: it only takes part in the sum of gradients.

        Raises:
            ScheduleError: a recompute mode is unknown, or a count is not positive.
        """
        if placement.workers < 1 or microbatches < (placement.replicas == 1):
            raise ScheduleError("a schedule needs at least one stage and one micro-batch")
        by_stage = [recomputed(mode, microbatches) for mode in modes]
        compute = self.order.compute(placement, microbatches, by_stage)
        if offloads := {stage for stage, mode in enumerate(modes) if mode == OFFLOAD}:
            compute = [with_fetches(order, offloads) for order in compute]
        return connect(self.name, microbatches, placement, compute, skips, ties)


def resolve(schedule: str) -> RegisteredOrder:
    """Return the order that the value of ``--schedule`` names; raise UsageError if none has it."""
    if schedule not in ORDERS:
        raise UsageError(f"--schedule {schedule}: must be one of {', '.join(ORDERS)}")
    return RegisteredOrder(schedule, ORDERS[schedule])
