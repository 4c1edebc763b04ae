"""Plans from the options of a job: its own, those beside it, and the largest job that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from pipeworker.errors import UsageError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.actions import Kind
from pipeworker.plan.orders import AUTO, ORDERS, Order, resolve
from pipeworker.plan.partition import most_stages
from pipeworker.plan.placement import Placement
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner.memory import LayerBytes
from pipeworker.plan.planner.planner import plan_order
from pipeworker.plan.planner.search import search
from pipeworker.plan.text import is_text

WORKERS = (1, 2, 4, 8)
"""Numbers of workers that are planned beside the chosen one."""
MOST_MICROBATCHES = 256
"""The largest number of micro-batches that is tried."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The options of a job that its plan must satisfy.

    Attributes:
        schedule: the name of an order, the text of a schedule, or ``auto``.
        workers: workers of a replica.
        microbatches: over all replicas.
        recompute: a recompute mode for all stages, or ``auto``.
        balance: layers of each stage, or ``even``; None to choose them.
        shard_optimizer: whether each replica has a part of the optimizer's state.
    """

    schedule: str
    workers: int
    microbatches: int
    recompute: str = "auto"
    balance: tuple[int, ...] | Literal["even"] | None = None
    virtual_stages: int | None = None
    replicas: int = 1
    shard_optimizer: bool = False

    @property
    def order(self) -> Order:
        """The order of the schedule."""
        return resolve(self.schedule, self.virtual_stages)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan for another request; without one, the `problem` says why there is none."""

    request: PlanRequest
    planned: Planned | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        """The name of its order."""
        return self.planned.name if self.planned else self.request.order.name

    @property
    def virtual_stages(self) -> int:
        """The largest number of stages that one worker holds."""
        return (self.planned or self.request.order).virtual_stages


def plan_request(facts: NetworkFacts, request: PlanRequest, *, strict: bool = True) -> Planned:
    """Plan a network as requested; `strict` says whether it must fit into the memory.

    A mini-batch of fewer samples than micro-batches has a micro-batch for each sample, as in a job.

    Raises:
        UsageError: nothing fits although it must, or the request does not fit the network.
    """
    facts = _with_options(facts, request)
    count = min(request.microbatches, facts.batch_samples or request.microbatches)
    if request.schedule == AUTO:
        return search(
            facts,
            request.workers,
            count,
            replicas=request.replicas,
            recompute=request.recompute,
            strict=strict,
            makes=count == request.microbatches,  # a later mini-batch may have more samples
        )
    order = request.order
    placement = order.place(request.workers, request.replicas)
    modes: tuple[str, ...] = ()
    if is_text(request.schedule) and request.recompute == "auto":
        modes = written_modes(order, placement)
    elif request.recompute != "auto":
        modes = (request.recompute,) * placement.stages
    planned = plan_order(
        facts,
        order,
        placement,
        count,
        balance=request.balance,
        recompute=modes,
        strict=strict,
    )
    return replace(planned, order=request.schedule)


def written_modes(order: Order, placement: Placement) -> tuple[str, ...]:
    """Return recompute modes under which a written schedule is planned as it is.

    Its actions say which micro-batches are recomputed. A stage that recomputes any is ``always``,
    which takes a schedule as it is; see :func:`pipeworker.plan.planner.memory.moments`.
    """
    schedule = order.build(
        placement.copies(1), order.microbatches or 0, ("never",) * placement.stages
    )
    again = {a.stage for some in schedule.workers for a in some if a.kind is Kind.RECOMPUTE}
    return tuple("always" if stage in again else "never" for stage in range(placement.stages))


def _with_options(facts: NetworkFacts, request: PlanRequest) -> NetworkFacts:
    """Return the facts of a network for the workers and replicas of a request."""
    return replace(
        for_workers(facts, request.workers),
        replicas=request.replicas,
        shards_optimizer=request.shard_optimizer,
    )


def for_workers(facts: NetworkFacts, workers: int) -> NetworkFacts:
    """Return the facts of a network for another number of workers like those that are known."""
    speeds, limits = facts.speeds, facts.limits
    return replace(
        facts,
        speeds=tuple(speeds[worker % len(speeds)] for worker in range(workers if speeds else 0)),
        limits=tuple(limits[worker % len(limits)] for worker in range(workers if limits else 0)),
    )


def alternatives(facts: NetworkFacts, request: PlanRequest) -> Iterator[Alternative]:
    """Yield plans for other schedules with as many workers, and for other numbers of workers."""
    for name in ORDERS:
        if name != request.schedule:
            yield _tried(facts, replace(request, schedule=name, virtual_stages=None, balance=None))
    if not is_text(request.schedule):
        for workers in WORKERS:
            if workers != request.workers:
                yield _tried(facts, replace(request, workers=workers, balance=None))


def largest_microbatches(facts: NetworkFacts, request: PlanRequest) -> int:
    """Return the most micro-batches of the measured size that fit; 0 if none do.

    MOST_MICROBATCHES means that as many or more fit.
    """
    facts = replace(facts, batch_samples=0)  # a mini-batch of any size

    def fits(count: int) -> bool:
        return _fits(facts, replace(request, microbatches=count * request.replicas))

    if not fits(1):
        return 0
    least = 1
    while least < MOST_MICROBATCHES and fits(2 * least):
        least *= 2
    over = 2 * least
    while least < MOST_MICROBATCHES and over - least > 1:
        middle = (least + over) // 2
        least, over = (middle, over) if fits(middle) else (least, middle)
    return least


def fewest_workers(facts: NetworkFacts, request: PlanRequest) -> int:
    """Return the fewest workers that the network fits on, with a layer each at least; else 0."""
    stages = request.order.place(1).stages
    parts = most_stages(len(facts.layers), facts.shared_buffers)
    numbers = range(1, parts // stages + 1)
    unlimited = replace(request, balance=None)
    requests = (replace(unlimited, workers=n) for n in numbers)
    fitting = (one for one in requests if _has_room(facts, one) and _fits(facts, one))
    return next((one.workers for one in fitting), 0)


def _has_room(facts: NetworkFacts, request: PlanRequest) -> bool:
    """Return whether the workers have room for what the layers hold all the time.

    A plan for many workers takes long, and most numbers of workers are too few by this alone.
    """
    facts, count = _with_options(facts, request), len(facts.layers)
    if not facts.limits:
        return True
    rooms = [inf if limit is None else limit - facts.base_bytes for limit in facts.limits]
    state = LayerBytes(facts, request.microbatches).state
    largest = max(state((layer, layer + 1)) for layer in range(count))
    return state((0, count)) <= sum(rooms) and largest <= max(rooms)


def _fits(facts: NetworkFacts, request: PlanRequest) -> bool:
    planned = _tried(facts, request).planned
    return planned is not None and planned.fits


def _tried(facts: NetworkFacts, request: PlanRequest) -> Alternative:
    try:
        return Alternative(request, plan_request(facts, request))
    except UsageError as error:
        return Alternative(request, problem=str(error))
