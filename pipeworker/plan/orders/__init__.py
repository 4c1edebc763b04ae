"""Compute orders, one per file: in which order each worker runs forward, recompute and backward.

To add a schedule, write a function in a file of this folder that returns, for each worker of a
replica, its *compute* actions in order, and add it to :data:`ORDERS`::

    def zigzag(placement, microbatches):
        return [...]  # [[0F0 0F1 0B0 0B1], [1F0 1B0 1F1 1B1]] for 2 workers, 2 micro-batches

    Order("zigzag", zigzag)

``placement.held[worker]`` are the stages of a worker, ascending, and `microbatches` is M. The
actions are those of :mod:`pipeworker.plan.actions`: ``F`` and ``B`` once for each stage and
micro-batch, ``I`` and ``W`` instead of ``B`` where the backward is split.
:mod:`pipeworker.plan.recompute` and :func:`pipeworker.plan.connect.connect` add all other kinds.

Two rules, which :func:`pipeworker.plan.check.check` verifies for every schedule before it runs:

- Each action comes after those that it needs, on its own worker; on other workers the receives
  wait. The checker plays all channels once, so an order that can deadlock is refused.
- Each stage adds its weights' gradients in micro-batch order 0..M-1 (``B`` or ``W``), because that
  makes the numbers equal, bit for bit, under every schedule.

The tests run every registered order: ``tests/plan/test_plan_formulae.py`` through the checker and
the simulator, ``tests/worker/step/test_step_orders.py`` on real layers, whose bits it compares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pipeworker.errors import ScheduleError, UsageError
from pipeworker.plan import text
from pipeworker.plan.actions import Action
from pipeworker.plan.connect import connected
from pipeworker.plan.figures import plural
from pipeworker.plan.frozen import without_backwards
from pipeworker.plan.orders.building_block import v_half, v_min
from pipeworker.plan.orders.dualpipev import dualpipev
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.orders.interleaved_1f1b import interleaved_1f1b
from pipeworker.plan.orders.one_f_one_b import one_f_one_b
from pipeworker.plan.orders.zb_h1 import zb_h1
from pipeworker.plan.orders.zbv import zbv
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import OFFLOAD, recomputed, with_fetches, with_recomputes
from pipeworker.plan.schedule import Pairs, Schedule

AUTO = "auto"
"""The value of ``--schedule`` that searches for the fastest order, and the name of one it made."""


@dataclass(frozen=True, slots=True)
class Order:
    """A compute order, which makes schedules for any workers.

    `compute` gets a placement and the number of micro-batches, and returns the compute actions of
    each worker of a replica. `arrange` gets the number of workers in a replica and of stages per
    worker. The user may choose that number of stages (``V``) if it `varies`; `virtual_stages` is
    then the default. `microbatches` is the number that a written order is for, None for any; a
    written order has its recomputes.
    """

    name: str
    compute: Callable[[Placement, int], list[list[Action]]]
    arrange: Callable[[int, int], Placement] = Placement.looped
    virtual_stages: int = 1
    varies: bool = False
    microbatches: int | None = None

    def place(self, workers: int, replicas: int = 1) -> Placement:
        """Return which worker holds which stages."""
        return self.arrange(workers, self.virtual_stages).copies(replicas)

    def build(
        self,
        placement: Placement,
        microbatches: int,
        modes: Sequence[str],
        skips: Pairs = (),
        ties: Pairs = (),
        frozen: tuple[int, ...] = (),
    ) -> Schedule:
        """Make the schedule of a replica, with the recompute mode of each stage; unchecked.

        The `frozen` stages have nothing to train (:mod:`pipeworker.plan.frozen`).

        One of several replicas may have no micro-batch: it only takes part in the sum of gradients.

        Raises:
            ScheduleError: a recompute mode is unknown, or a count is not positive.
        """
        if placement.workers < 1 or microbatches < (placement.replicas == 1):
            raise ScheduleError("a schedule needs at least one stage and one micro-batch")
        workers = tuple(
            self.actions(worker, placement, microbatches, modes, skips, ties, frozen)
            for worker in range(placement.workers)
        )
        return Schedule(self.name, microbatches, placement, workers, skips, ties, frozen=frozen)

    def actions(
        self,
        worker: int,
        placement: Placement,
        microbatches: int,
        modes: Sequence[str],
        skips: Pairs = (),
        ties: Pairs = (),
        frozen: tuple[int, ...] = (),
    ) -> tuple[Action, ...]:
        """Return the actions of one worker in the schedule that :meth:`build` makes.

        Of the `modes`, those of its own stages count.
        """
        order = self.line(worker, placement, microbatches, modes)
        if frozen:
            order = without_backwards(order, frozen, placement.stages)
        if offloads := {stage for stage in placement.held[worker] if modes[stage] == OFFLOAD}:
            order = with_fetches(order, offloads)
        return connected(order, worker, placement, skips, ties, frozen)

    def line(
        self, worker: int, placement: Placement, microbatches: int, modes: Sequence[str]
    ) -> list[Action]:
        """Return the compute actions of one worker, with its recomputes."""
        order = _computed(self.compute, placement.copies(1), microbatches)[worker]
        by_stage = {
            stage: recomputed(modes[stage], microbatches) for stage in placement.held[worker]
        }
        return order if self.microbatches is not None else with_recomputes(order, by_stage)


@functools.lru_cache(maxsize=2)
def _computed(
    compute: Callable[[Placement, int], list[list[Action]]], placement: Placement, microbatches: int
) -> list[list[Action]]:
    """Return the result of `compute`; the planner builds schedules of one order many times."""
    return compute(placement, microbatches)


ORDERS = {
    order.name: order
    for order in [
        Order("gpipe", gpipe),
        Order("1f1b", one_f_one_b),
        Order("interleaved-1f1b", interleaved_1f1b, virtual_stages=2, varies=True),
        Order("zb-h1", zb_h1),
        Order("zbv", zbv, Placement.v_shaped, virtual_stages=2),
        Order("v-half", v_half, Placement.v_shaped, virtual_stages=2),
        Order("v-min", v_min, Placement.v_shaped, virtual_stages=2),
        Order("dualpipev", dualpipev, Placement.v_shaped, virtual_stages=2),
    ]
}


DEFAULT_SCHEDULE = "gpipe"
"""The order of a job that names none."""


def resolve(schedule: str, virtual_stages: int | None = None) -> Order:
    """Return the order of ``--schedule``, with the ``--virtual-stages`` of each worker, if given.

    For ``auto`` it is the default one, which a job runs until the fastest is known, or if there are
    no facts to find it by.

    Raises:
        UsageError: no order has this name, or it cannot have so many stages per worker.
        ScheduleError: `schedule` is the text of one, and malformed.
    """
    if schedule == AUTO:
        if virtual_stages is not None:
            raise UsageError(
                f"--virtual-stages {virtual_stages} and --schedule {AUTO}: it chooses the number "
                "of stages on each worker; leave --virtual-stages out"
            )
        return ORDERS[DEFAULT_SCHEDULE]
    if not text.is_text(schedule) and schedule not in ORDERS:
        names = ", ".join((*ORDERS, AUTO))
        raise UsageError(f"--schedule {schedule}: must be one of {names}")
    order = _written(schedule) if text.is_text(schedule) else ORDERS[schedule]
    if virtual_stages is None or virtual_stages == order.virtual_stages:
        return order
    if order.varies:
        return replace(order, virtual_stages=virtual_stages)
    few = "one stage" if order.virtual_stages == 1 else f"{order.virtual_stages} stages"
    those = [name for name, other in ORDERS.items() if other.varies]
    raise UsageError(
        f"--virtual-stages {virtual_stages}: --schedule {order.name} has {few} on each worker; "
        f"leave the option out, or choose --schedule {' or '.join(those)}"
    )


@functools.lru_cache(maxsize=4)
def _written(schedule: str) -> Order:
    """Return the order of a text; of a mini-batch with fewer micro-batches it runs the first ones.

    The text alone decides which micro-batches are recomputed.
    """
    order = text.compute_order(text.parse(schedule))
    workers, most = order.placement.workers, order.microbatches

    def compute(_: Placement, microbatches: int) -> list[list[Action]]:
        if microbatches > most:
            raise ScheduleError(
                f"--schedule {order.name}: is for {plural(most, 'micro-batch')}, not "
                f"{microbatches}; use --microbatches {most}"
            )
        if microbatches == most:  # also those that are not of the step, which the checker names
            return [list(actions) for actions in order.workers]
        return [text.without(actions, microbatches) for actions in order.workers]

    def arrange(count: int, _: int) -> Placement:
        if count != workers:
            raise UsageError(
                f"--schedule {order.name}: has lines for {plural(workers, 'worker')}, and the job "
                f"has {count}; use --stages {workers}, or another schedule"
            )
        return order.placement

    held = max(map(len, order.placement.held))
    return Order(order.name, compute, arrange, held, microbatches=most)
