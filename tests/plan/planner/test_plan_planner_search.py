"""``--schedule auto``: no known order is faster than the one that the search finds."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeworker.errors import UsageError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.actions import Edge, Kind, Payload
from pipeworker.plan.check import check
from pipeworker.plan.connect import connect
from pipeworker.plan.orders import ORDERS, Order, resolve
from pipeworker.plan.placement import Placement
from pipeworker.plan.planner.listing import RULES, Play, Room, Rule
from pipeworker.plan.planner.planner import plan_order
from pipeworker.plan.planner.search import known_orders, search
from pipeworker.plan.schedule import CHANNEL_CAPACITY
from pipeworker.plan.simulate import Costs, simulate
from support.draws import draws
from support.pure.facts import DRAWN_ORDERS, layer, network, networks
from support.slow import slow

KNOWN = [order for name, order in ORDERS.items() if not name.startswith("test-")]


@settings(max_examples=draws(4))
@given(facts=networks(), workers=st.integers(1, 4), microbatches=st.integers(1, 6))
def test_no_known_order_is_faster_than_the_one_that_is_found(
    facts: NetworkFacts, workers: int, microbatches: int
) -> None:
    found = search(facts, workers, microbatches, orders=KNOWN)
    check(found.schedule)
    assert found.timing == simulate(found.schedule, found.costs)
    for order in known_orders(KNOWN):
        placement = order.place(workers)
        if placement.stages <= len(facts.layers):
            other = plan_order(facts, order, placement, microbatches)
            assert found.step_seconds <= other.step_seconds * (1 + 1e-8)


@settings(max_examples=draws(4))
@given(
    facts=networks(),
    microbatches=st.integers(1, 6),
    share=st.sampled_from([0.6, 0.9]),
)
def test_the_order_that_is_found_fits_into_the_memory(
    facts: NetworkFacts, microbatches: int, share: float
) -> None:
    free = search(facts, 2, microbatches, orders=KNOWN)
    limited = replace(facts, limits=tuple(int(share * used) for used in free.memory))
    try:
        found = search(limited, 2, microbatches, orders=KNOWN)
    except UsageError:  # nothing fits
        return
    for used, limit in zip(found.memory, found.limits, strict=True):
        assert limit is not None
        assert used <= limit


@settings(max_examples=draws(12))
@given(
    order=DRAWN_ORDERS,
    workers=st.integers(1, 4),
    microbatches=st.integers(1, 7),
    rule=st.sampled_from(RULES),
    data=st.data(),
)
def test_every_order_that_a_rule_makes_is_proven(
    order: Order, workers: int, microbatches: int, rule: object, data: st.DataObject
) -> None:
    placement = order.place(workers)
    stages = placement.stages
    seconds = [data.draw(st.integers(1, 9)) / 4 for _ in range(stages)]
    costs = Costs(tuple(seconds), tuple(2 * s for s in seconds), tuple(s for s in seconds))
    room = Room([inf] * workers, [1] * stages)
    assert isinstance(rule, type(RULES[0]))
    play = Play(placement, microbatches, costs, [False] * stages, room, rule)
    assert play.run()
    check(connect("made", microbatches, placement, play.orders))


@settings(max_examples=draws(30))
@given(
    order=st.sampled_from([resolve(name) for name in ("1f1b", "interleaved-1f1b", "zbv")]),
    workers=st.integers(1, 4),
    microbatches=st.integers(1, CHANNEL_CAPACITY),  # no channel is ever full
    rule=st.sampled_from(RULES),
    data=st.data(),
)
def test_the_played_step_takes_as_long_as_the_simulated_one(
    order: Order, workers: int, microbatches: int, rule: Rule, data: st.DataObject
) -> None:
    placement = order.place(workers)
    stages = placement.stages
    seconds, *transfers = (
        tuple(data.draw(st.integers(least, 9)) / 8 for _ in range(stages)) for least in (1, 0, 0)
    )
    down = {Edge(s, s + 1, Payload.ACTIVATION): transfers[0][s] for s in range(stages - 1)}
    up = {Edge(s + 1, s, Payload.GRADIENT): transfers[1][s] for s in range(stages - 1)}
    costs = Costs(seconds, tuple(2 * s for s in seconds), seconds, transfers={**down, **up})
    room = Room([inf] * workers, [1] * stages)
    play = Play(placement, microbatches, costs, [False] * stages, room, rule)
    assert play.run()
    simulated = simulate(connect("made", microbatches, placement, play.orders), costs)
    assert simulated.makespan == play.end  # all times are sums of eighths


def test_an_order_that_is_made_meets_the_lower_bound_of_a_step() -> None:
    # m(F+B+W) + (p-1)F for F = B = W: no order with one stage a worker is faster.
    facts = network([layer(1.0, 2.0, saved_bytes=1)] * 4)
    found = search(facts, 4, 8, orders=[resolve("gpipe"), resolve("1f1b")])
    assert found.timing.makespan == 8 * 3 + 3
    assert found.schedule.name == "auto"


def test_memory_bounds_what_an_order_holds() -> None:
    placement, costs = Placement.identity(2), Costs.even(2)
    play = Play(placement, 8, costs, [False] * 2, Room([3, 2], [1, 1]), RULES[2])
    assert play.run()
    live = check(connect("made", 8, placement, play.orders))
    assert live.activations[0] <= 3
    assert live.activations[1] <= 2


def test_a_made_order_is_a_schedule_that_a_job_can_name() -> None:
    facts = network([layer(1.0, 2.0, saved_bytes=1)] * 4)
    found = search(facts, 4, 8, orders=[resolve("1f1b")])
    order = resolve(found.order)
    again = order.build(found.schedule.placement, 8, found.recompute)
    assert again == found.schedule
    fewer = order.build(found.schedule.placement, 3, found.recompute)
    check(fewer)
    kinds = [action.kind for actions in fewer.workers for action in actions]
    assert kinds.count(Kind.FORWARD) == 4 * 3


def test_the_choice_and_the_runner_up_are_said_in_a_line() -> None:
    facts = network([layer()] * 2)
    found = search(facts, 1, 4, orders=[resolve("1f1b"), resolve("gpipe")])
    assert found.why[0] == "schedule 1f1b is the fastest, before gpipe (24.0 s)"


def test_of_orders_that_take_the_same_time_the_one_with_less_memory_is_chosen() -> None:
    facts = network([layer(saved_bytes=100)] * 2)
    found = search(facts, 2, 8, orders=[resolve("gpipe"), resolve("1f1b")])
    plans = [plan_order(facts, resolve(n), Placement.identity(2), 8) for n in ("gpipe", "1f1b")]
    assert max(plans[1].memory) < max(plans[0].memory)
    assert max(found.memory) <= max(plans[1].memory) or found.step_seconds < plans[1].step_seconds


@slow
def test_the_plan_is_the_same_each_time() -> None:
    layers = [layer(1 + n % 5 / 4, 2 + n % 7 / 3, saved_bytes=n, output_bytes=3) for n in range(12)]
    facts = replace(network(layers), latency=0.02)
    assert search(facts, 3, 6, orders=KNOWN) == search(facts, 3, 6, orders=KNOWN)


def test_a_fixed_recompute_mode_holds_for_every_order() -> None:
    facts = network([layer(saved_bytes=10)] * 6)
    found = search(facts, 2, 4, recompute="always", orders=KNOWN)
    assert set(found.recompute) == {"always"}
    assert any(a.kind is Kind.RECOMPUTE for actions in found.schedule.workers for a in actions)


def test_a_layer_whose_backward_cannot_be_split_gets_an_order_that_splits_none() -> None:
    facts = network([layer(), layer(splits=False), *[layer()] * 4])
    found = search(facts, 2, 4, orders=KNOWN)
    assert not any(
        a.kind is Kind.BACKWARD_INPUT for actions in found.schedule.workers for a in actions
    )
    with pytest.raises(UsageError, match=r"--schedule zb-h1: the backward of layer 1 \(Linear\)"):
        plan_order(facts, resolve("zb-h1"), Placement.identity(2), 4)


def test_nothing_that_fits_is_an_error_with_the_least_that_lacks() -> None:
    facts = network([layer(parameter_bytes=100)] * 4, 10, 2)
    with pytest.raises(UsageError, match="does not fit into the memory"):
        search(facts, 2, 4, orders=KNOWN)
    with pytest.raises(UsageError, match="--stages 5: more than the layers"):
        search(facts, 5, 4, orders=KNOWN)


def test_a_search_that_need_not_fit_returns_the_order_that_lacks_the_least() -> None:
    facts = network([layer(saved_bytes=100)] * 4, 120, 2)
    orders = [resolve("gpipe"), resolve("1f1b")]
    found = search(facts, 2, 8, replicas=2, recompute="never", strict=False, orders=orders)
    assert found.order == "1f1b"  # holds fewer micro-batches
    assert found.why == ("schedule 1f1b: lacks the least memory",)
    assert found.lacking.startswith("--stages 2: does not fit into the memory; with balance 1,3")
    assert found.schedule.placement.replicas == 2


def test_each_replica_gets_its_part_of_the_micro_batches() -> None:
    found = search(network([layer()] * 4), 2, 8, replicas=2, orders=KNOWN)
    assert found.schedule.microbatches == 4
    assert found.schedule.placement.replicas == 2


@slow
def test_sixteen_workers_and_64_micro_batches_are_searched() -> None:
    layers = [layer(1 + n % 5 / 4, 2 + n % 7 / 3, saved_bytes=1) for n in range(64)]
    orders = [resolve("gpipe"), resolve("1f1b"), resolve("interleaved-1f1b")]
    found = search(network(layers), 16, 64, orders=[replace(o, varies=False) for o in orders])
    plan = plan_order(network(layers), resolve("1f1b"), Placement.identity(16), 64)
    assert found.step_seconds < plan.step_seconds
