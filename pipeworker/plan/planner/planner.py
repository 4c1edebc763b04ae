"""The plan for one order: balance, recompute modes, step time and memory, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pipeworker.errors import UsageError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan import text
from pipeworker.plan.check import check
from pipeworker.plan.figures import bytes_text
from pipeworker.plan.orders import Order
from pipeworker.plan.partition import EVEN, block, check_balance, ranges
from pipeworker.plan.placement import Placement
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner.balance import lacking, search_balance
from pipeworker.plan.planner.costs import stage_costs
from pipeworker.plan.planner.stages import Divisions, Judged
from pipeworker.plan.simulate import simulate


def plan_order(
    facts: NetworkFacts,
    order: Order,
    placement: Placement,
    microbatches: int,
    *,
    balance: Sequence[int] | Literal["even"] | None = None,
    recompute: Sequence[str] = (),
    strict: bool = True,
) -> Planned:
    """Plan a network under an order: the shortest simulated step that fits into the memory.

    Args:
        facts: facts of the layers, for a micro-batch, and of the workers of a replica.
        order: the order in which the stages run.
        placement: which worker of which replica holds which stages.
        microbatches: number of micro-batches of a mini-batch, over all replicas.
        balance: layers of each stage, or ``even``; None to choose them.
        recompute: recompute mode of each stage; empty to choose them.
        strict: whether the plan must fit into the memory, if anything of it is chosen.

    Raises:
        UsageError: nothing fits although it must, there are more stages than layers, or a backward
            cannot be split as the order requires.
    """
    count = len(block(microbatches, placement.replicas, 0))
    divisions = Divisions(facts, order, placement.copies(1), count, recompute)
    if divisions.unsplit is not None:
        kind = facts.layers[divisions.unsplit].kind
        raise UsageError(
            f"--schedule {order.name}: the backward of layer {divisions.unsplit} ({kind}) cannot "
            "be split (a checkpoint with use_reentrant=True, or on the CPU a GroupNorm in "
            "channels_last?); use 1f1b"
        )
    chosen = balance is None
    if balance is None:
        found = search_balance(divisions)
    elif balance == EVEN:
        found = divisions.judge(divisions.even)
    else:
        kinds = [layer.kind for layer in facts.layers]
        given = check_balance(tuple(balance), kinds, divisions.stages, facts.shared_buffers)
        found = divisions.judge(given)
    if found.excess and strict and (chosen or not recompute):
        raise lacking(divisions, found)
    return planned(divisions, found, placement, list(reasons(divisions, found, chosen=chosen)))


def planned(
    divisions: Divisions, found: Judged, placement: Placement, why: Sequence[str]
) -> Planned:
    """Return the plan of a judged balance, with its checked schedule."""
    divided = ranges(found.balance)
    schedule = divisions.order.build(
        placement,
        divisions.microbatches,
        found.modes,
        *divisions.pairs(found.balance),
        divisions.frozen(divided),
    )
    check(schedule)
    costs = stage_costs(divisions.costs, divided, placement)
    updates = [
        sum(divisions.stage(stage, divided[stage])[0].update for stage in held)
        for held in placement.held
    ]
    return Planned(
        schedule,
        divisions.order.name,
        found.balance,
        found.modes,
        costs,
        simulate(schedule, costs),
        max(updates),
        divisions.peaks(found.balance),
        divisions.limits,
        tuple(why),
        str(lacking(divisions, found)) if found.excess else "",
    )


def whole_text(planned: Planned, order: Order, name: str) -> str:
    """Return the text of a plan's order, with the backwards that frozen stages leave out.

    A file with a schedule has them: it is proven before any layer is known.
    """
    schedule = planned.schedule
    built = order.build(schedule.placement, schedule.microbatches, planned.recompute)
    return text.format_compute(built, name)


def reasons(divisions: Divisions, found: Judged, *, chosen: bool) -> Iterator[str]:
    """Yield what decided the balance and the recompute modes."""
    if chosen and len(found.balance) > 1:
        usual = divisions.even
        other = divisions.judge(usual)
        if found.balance == usual:
            yield "even stages: no other balance makes a step shorter"
        elif other.excess:
            yield "balance: even stages would not fit into the memory"
        else:
            gain = 1 - found.seconds / other.seconds
            share = f"{gain:.0%}" if gain >= 0.01 else "less than 1%"
            by = "" if divisions.facts.measured else ", by counted operations"
            yield f"balance: a step takes {share} less time than with even stages{by}"
    if not divisions.recompute:
        again = [stage for stage, mode in enumerate(found.modes) if mode != "never"]
        if again:
            yield _why_recompute(divisions, found, again)


def _why_recompute(divisions: Divisions, found: Judged, again: Sequence[int]) -> str:
    """Return which stages recompute, and what the fullest of their workers would need without."""
    divided, placement = ranges(found.balance), divisions.placement
    lacks = []
    for worker in sorted({placement.owners[stage] for stage in again}):
        limit = divisions.limits[worker]
        if limit is not None:
            layers = [divided[stage] for stage in placement.held[worker]]
            without = divisions.peak(worker, layers, ["never"] * len(layers))
            lacks.append((without - limit, -worker, without, limit))
    _, _, without, limit = max(lacks)
    stages = f"stage{'s' * (len(again) > 1)} {listed(again)}"
    return f"recompute on {stages}: {bytes_text(without)} without, of {bytes_text(limit)}"


def listed(numbers: Sequence[int]) -> str:
    """Return numbers for people: ``0``, ``0 and 1``, ``0, 1 and 5``, or ``0 to 5``."""
    if len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]} to {numbers[-1]}"
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last
