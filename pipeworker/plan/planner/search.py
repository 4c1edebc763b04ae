"""The search for the schedule: every known order and orders made for the network, by step time.

Each order gets the balance and the recompute modes that suit it best. For the placements of the
best of them, orders are made by list scheduling (:mod:`pipeworker.plan.planner.listing`). An order
that was made is used only if it is proven, fits and is faster than the best known one. Everything
is bounded by counts, never by a clock, so that every host finds the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from pipeworker.errors import ScheduleError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.actions import Action
from pipeworker.plan.check import check
from pipeworker.plan.figures import seconds_text
from pipeworker.plan.orders import AUTO, ORDERS, Order
from pipeworker.plan.partition import block, even, most_stages, ranges
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner.balance import lacking, search_balance
from pipeworker.plan.planner.costs import stage_costs
from pipeworker.plan.planner.listing import RULES, Play, Room
from pipeworker.plan.planner.planner import planned, reasons, whole_text
from pipeworker.plan.planner.stages import Divisions, Judged

_VIRTUAL_STAGES = (2, 3, 4)
"""The numbers of stages per worker that are tried under an order that allows any."""
_NODES = 700_000
"""Nodes of graphs of steps that the search for the balance of one order evaluates at most."""
_ACTIONS = 150_000
"""Actions of the orders that are made at most: of the placements of the fastest known orders."""
_PROVEN = 3
"""Orders that were made, of which the fastest are proven and judged."""
_SAME = 1e-9
"""The share of a step by which two step times may differ and still count as equal."""


@dataclass(frozen=True, slots=True)
class _Found:
    """An order with its best balance; `number` is its place in the search."""

    divisions: Divisions
    judged: Judged
    number: int

    @property
    def name(self) -> str:
        """The order's name, with the number of stages on each worker if the user may choose it."""
        order = self.divisions.order
        return (
            f"{order.name} with {order.virtual_stages} stages a worker"
            if order.varies
            else order.name
        )


def search(
    facts: NetworkFacts,
    workers: int,
    microbatches: int,
    *,
    replicas: int = 1,
    recompute: str = "auto",
    orders: Iterable[Order] | None = None,
    strict: bool = True,
    makes: bool = True,
) -> Planned:
    """Return the plan of the fastest order for a network.

    Args:
        facts: facts of the layers, for a micro-batch, and of the workers of a replica.
        workers: number of workers of a replica.
        microbatches: number of micro-batches of a mini-batch, over all replicas.
        replicas: number of replicas.
        recompute: recompute mode of all stages, or ``auto``.
        orders: the known orders; by default all that are registered.
        strict: whether a plan must fit into the memory.
        makes: whether orders are made, which run no more than `microbatches`.

    Raises:
        UsageError: there are fewer layers than workers, or nothing fits although it must.
    """
    even(len(facts.layers), workers, shared=facts.shared_buffers)  # raises if there are too few
    most = most_stages(len(facts.layers), facts.shared_buffers)
    count = len(block(microbatches, replicas, 0))
    known: list[_Found] = []
    for order in known_orders(orders):
        placement = order.place(workers)
        if placement.stages <= most:
            modes = () if recompute == "auto" else (recompute,) * placement.stages
            divisions = Divisions(facts, order, placement, count, modes)
            if divisions.unsplit is not None:
                continue
            judged = search_balance(divisions, _NODES)
            known.append(_Found(divisions, judged, len(known)))
    known.sort(key=_rank)
    best = known[0]
    if best.judged.excess and strict:
        raise lacking(best.divisions, best.judged)
    if best.judged.excess:
        why = [f"schedule {best.name}: lacks the least memory"]
        return planned(best.divisions, best.judged, best.divisions.placement.copies(replicas), why)
    fitting = [found for found in known if not found.judged.excess]
    makes = makes and all(layer.splits for layer in facts.layers)  # as all that are made do
    made: _Found | None = min(_made(fitting), key=_rank, default=None) if makes else None
    if made is not None and made.judged.seconds < best.judged.seconds * (1 - _SAME):
        improved = search_balance(made.divisions, _NODES)
        fitting = [_Found(made.divisions, min(improved, made.judged), made.number), *fitting]
    best = fitting[0]
    why = [_why(fitting), *reasons(best.divisions, best.judged, chosen=True)]
    placement = best.divisions.placement.copies(replicas)
    plan = planned(best.divisions, best.judged, placement, why)
    if best.name != AUTO:
        return plan
    return replace(plan, order=whole_text(plan, best.divisions.order, AUTO))


def known_orders(orders: Iterable[Order] | None) -> Iterator[Order]:
    """Yield the known orders, with each number of stages per worker that is tried."""
    for order in ORDERS.values() if orders is None else orders:
        if order.varies:
            for virtual_stages in _VIRTUAL_STAGES:
                yield replace(order, virtual_stages=virtual_stages)
        else:
            yield order


def _rank(found: _Found) -> tuple[int, float, int, int]:
    """Return what orders plans: memory that lacks, step time, fullest worker, place in the search.

    Step times are rounded, so that of orders that take the same time the one with less memory wins.
    """
    judged = found.judged
    fullest = max(found.divisions.peaks(judged.balance))
    return judged.excess, float(f"{judged.seconds:.9g}"), fullest, found.number


def _made(known: Sequence[_Found]) -> Iterator[_Found]:
    """Yield the orders made for the placements of the fastest known orders."""
    bases: dict[tuple[tuple[int, ...], ...], _Found] = {}
    for found in known:
        bases.setdefault(found.divisions.placement.held, found)
    # One stage on each worker suits many networks, whatever the known orders make of it.
    simple = [held for held in bases if max(map(len, held)) == 1]
    played: list[tuple[float, int, _Found, list[list[Action]]]] = []
    left = _ACTIONS
    for held in dict.fromkeys([*simple, *bases]):
        base = bases[held]
        left -= 3 * base.divisions.stages * base.divisions.microbatches * len(RULES)
        if left < 0 and played:
            break
        for time, order in _listed(base):
            played.append((time, len(known) + len(played), base, order))
    played.sort(key=lambda one: one[:2])
    for _, number, base, order in played[:_PROVEN]:
        if (proven := _proven(base, order, number)) is not None:
            yield proven


def _listed(base: _Found) -> Iterator[tuple[float, list[list[Action]]]]:
    """Yield what list scheduling makes for the stages of a known order, and how long it takes."""
    divisions, judged = base.divisions, base.judged
    placement, divided = divisions.placement, ranges(judged.balance)
    costs = stage_costs(divisions.costs, divided, placement)
    sizes = [divisions.stage(stage, layers)[1] for stage, layers in enumerate(divided)]
    again = [mode != "never" for mode in judged.modes]
    held = [
        size.input + (0 if recomputed else size.graph)
        for size, recomputed in zip(sizes, again, strict=True)
    ]
    room = []
    for limit, stages in zip(divisions.limits, placement.held, strict=True):
        fixed = divisions.facts.base_bytes + max(sizes[s].working for s in stages)
        fixed += sum(sizes[s].lasting(0) for s in stages)
        fixed += 2 * max(sizes[s].graph * again[s] for s in stages)
        room.append(inf if limit is None else limit - fixed)
    for rule in RULES:
        play = Play(placement, divisions.microbatches, costs, again, Room(room, held), rule)
        if play.run():
            yield play.end, play.orders


def _proven(base: _Found, order: list[list[Action]], number: int) -> _Found | None:
    """Return an order that was made, judged with the balance of its base; None if not proven."""
    divisions, modes = base.divisions, base.judged.modes
    placement, microbatches = divisions.placement, divisions.microbatches
    held = max(map(len, placement.held))
    made = Order(AUTO, lambda _, count: order, lambda workers, virtual_stages: placement, held)
    try:
        check(made.build(placement, microbatches, modes))
    except ScheduleError:
        return None
    own = Divisions(divisions.facts, made, placement, microbatches, divisions.recompute)
    judged = own.judge(base.judged.balance)
    return None if judged.excess else _Found(own, judged, number)


def _why(found: Sequence[_Found]) -> str:
    """Return the choice and the runner-up in a sentence."""
    best = found[0]
    shown = f"schedule {best.name} is the fastest"
    if len(found) > 1:
        shown += f", before {found[1].name} ({seconds_text(found[1].judged.seconds)})"
    return shown
