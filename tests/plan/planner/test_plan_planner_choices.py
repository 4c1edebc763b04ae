"""Plans beside the requested one, and the largest job that fits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from pipeworker.errors import UsageError
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.actions import COMPUTE, Kind
from pipeworker.plan.orders import ORDERS, resolve
from pipeworker.plan.planned import Planned
from pipeworker.plan.planner import choices
from pipeworker.plan.planner.choices import (
    MOST_MICROBATCHES,
    PlanRequest,
    alternatives,
    fewest_workers,
    for_workers,
    largest_microbatches,
    plan_request,
)
from pipeworker.plan.planner.planner import plan_order, whole_text
from support.pure.facts import layer, network

LAYERS = [layer(1.0 + n % 3, 2.0, parameter_bytes=100, saved_bytes=10) for n in range(8)]
GPIPE = PlanRequest("gpipe", 2, 4, recompute="never")
OWN = "mine stages=2 microbatches=2\n0: 0F0 0R0 0F1 0B0 0R1 0B1\n1: 1F0 1B0 1F1 1R1 1B1\n"


def test_a_request_is_planned_as_its_options_say() -> None:
    facts = network(LAYERS)
    found = plan_request(facts, GPIPE)
    order = GPIPE.order
    assert found == plan_order(facts, order, order.place(2), 4, recompute=("never",) * 2)
    given = plan_request(facts, replace(GPIPE, balance=(6, 2), recompute="always"))
    assert (given.balance, given.recompute) == ((6, 2), ("always",) * 2)
    looped = replace(GPIPE, schedule="interleaved-1f1b", virtual_stages=3)
    assert plan_request(facts, looped).schedule.placement.stages == 6


@pytest.mark.parametrize("schedule", ["gpipe", "auto"])
def test_a_plan_has_no_more_micro_batches_than_the_mini_batch_had_samples(schedule: str) -> None:
    request = PlanRequest(schedule, 2, 10**9, replicas=2)
    facts = replace(network(LAYERS), batch_samples=6)
    found = plan_request(facts, request)
    assert found == plan_request(facts, replace(request, microbatches=6))
    assert found.schedule.microbatches == 3  # of each replica
    written = plan_request(replace(facts, batch_samples=1), PlanRequest(OWN, 2, 2))
    assert written.schedule.microbatches == 1
    limits = tuple(size + 20 for size in written.memory)
    small = replace(facts, batch_samples=1, limits=limits)
    assert largest_microbatches(small, GPIPE) == largest_microbatches(
        replace(small, batch_samples=0), GPIPE
    )


def test_an_order_is_made_only_where_the_mini_batch_had_all_micro_batches() -> None:
    """An order that is made runs no more than it was made for; a later mini-batch may have all."""
    facts = replace(network(LAYERS), batch_samples=4)
    for microbatches in (4, 5):
        found = plan_request(facts, PlanRequest("auto", 2, microbatches))
        assert (found.name == "auto") is (microbatches == 4)
        order = resolve(found.order, found.virtual_stages)
        order.build(found.schedule.placement, microbatches, found.recompute)


def test_a_search_for_the_schedule_keeps_to_the_other_options() -> None:
    asked = PlanRequest("auto", 2, 4, recompute="always", replicas=2)
    found = plan_request(network(LAYERS), asked)
    assert {*found.recompute} == {"always"}
    assert found.schedule.placement.replicas == 2
    small = network(LAYERS, 1, 2)
    assert "does not fit into the memory" in plan_request(small, asked, strict=False).lacking
    with pytest.raises(UsageError, match="does not fit into the memory"):
        plan_request(small, asked)


def test_many_virtual_stages_are_planned_in_little_time() -> None:
    """Their modes are a power of their number: 43 million for 16 stages a worker."""
    layers = [layer(1.0, 2.0, saved_bytes=10)] * 32
    asked = PlanRequest("interleaved-1f1b", 2, 4, virtual_stages=16)
    found = plan_request(network(layers), asked)
    assert found.recompute == ("never",) * 32
    limits = found.memory[0] - 1, found.memory[1]
    tight = plan_request(replace(network(layers), limits=limits), asked)
    assert {*tight.recompute[0::2]} == {"never", "except_first"}
    assert {*tight.recompute[1::2]} == {"never"}


def test_a_written_schedule_decides_what_is_recomputed() -> None:
    found = plan_request(network(LAYERS), PlanRequest(OWN, 2, 2))
    assert found.recompute == ("always", "always")
    assert "0R1" in str(found.schedule)
    found = plan_request(network(LAYERS), PlanRequest(OWN.replace("1R1 ", ""), 2, 2))
    assert found.recompute == ("always", "never")


def test_a_written_schedule_that_recomputes_some_is_counted_as_it_is() -> None:
    facts = network([layer(1.0, 2.0, saved_bytes=10)])
    some = "some stages=1 microbatches=3\n0: 0F0 0F1 0F2 0B0 0R1 0B1 0R2 0B2\n"
    found = plan_request(facts, PlanRequest(some, 1, 3))
    assert found.step_seconds == 3 * 1.0 + 2 * 1.0 + 3 * 2.0
    # The graph of micro-batch 0 is kept beside that of a first forward.
    assert found.memory == (2 * 10,)
    again = found.schedule.workers[0]
    assert [a.microbatch for a in again if a.kind is Kind.RECOMPUTE] == [1, 2]


def test_alternatives_are_other_schedules_and_other_numbers_of_workers() -> None:
    facts = network(LAYERS)
    found = list(alternatives(facts, GPIPE))
    assert [(one.request.schedule, one.request.workers) for one in found] == [
        *((name, 2) for name in ORDERS if name != "gpipe"),
        *(("gpipe", workers) for workers in (1, 4, 8)),
    ]
    for one in found:
        assert (one.planned is None) == bool(one.problem)
        if one.planned:
            assert one.planned == plan_request(facts, one.request)
    eight = found[-1].planned
    assert eight is not None
    assert eight.balance == (1,) * 8


def test_an_alternative_has_a_balance_and_virtual_stages_of_its_own() -> None:
    asked = PlanRequest("interleaved-1f1b", 2, 4, "never", (1, 1, 1, 1, 1, 3), virtual_stages=3)
    found = list(alternatives(network(LAYERS), asked))
    assert not [a for a in found if (a.request.schedule, a.request.workers) == (asked.schedule, 2)]
    assert {a.request.workers for a in found if a.planned is None} == {4, 8}  # 12 and 24 stages
    assert {a.request.virtual_stages for a in found if a.request.workers == 2} == {None}


def test_replicas_may_share_the_state_of_the_optimizer() -> None:
    facts = network([layer(optimizer_bytes=100)] * 2)
    whole = plan_request(facts, replace(GPIPE, replicas=2))
    shared = plan_request(facts, replace(GPIPE, replicas=2, shard_optimizer=True))
    assert (whole.memory, shared.memory) == ((100, 100), (50, 50))
    assert whole.schedule.placement.replicas == 2


def test_an_alternative_that_cannot_be_says_why() -> None:
    (found,) = [a for a in alternatives(network(LAYERS[:4]), GPIPE) if a.request.workers == 8]
    assert found.planned is None
    assert found.problem.startswith("--stages 8: more than the layers of model(), 4")


def test_a_written_schedule_has_no_other_number_of_workers() -> None:
    found = list(alternatives(network(LAYERS), PlanRequest(OWN, 2, 2)))
    assert [one.request.schedule for one in found] == [*ORDERS]


def test_other_numbers_of_workers_are_like_those_that_are_known() -> None:
    facts = replace(network(LAYERS), speeds=(1.0, 2.0), limits=(10, None))
    found = for_workers(facts, 3)
    assert (found.speeds, found.limits) == ((1.0, 2.0, 1.0), (10, None, 10))
    assert for_workers(network(LAYERS), 3).limits == ()


@pytest.mark.parametrize("limit", [900, 1200, 2000])
def test_the_most_micro_batches_that_fit(limit: int) -> None:
    facts = network(LAYERS, limit, 2)
    found = largest_microbatches(facts, GPIPE)
    assert 0 < found < MOST_MICROBATCHES
    assert plan_request(facts, replace(GPIPE, microbatches=found)).fits
    with pytest.raises(UsageError, match="memory"):
        plan_request(facts, replace(GPIPE, microbatches=found + 1))
    twice = replace(GPIPE, replicas=2)
    assert largest_microbatches(facts, twice) == found


def test_where_one_micro_batch_does_not_fit_none_do() -> None:
    assert largest_microbatches(network(LAYERS, 20, 2), GPIPE) == 0


def test_without_a_limit_any_number_fits() -> None:
    assert largest_microbatches(network(LAYERS), GPIPE) == MOST_MICROBATCHES


def test_the_fewest_workers_that_the_network_fits_on() -> None:
    assert fewest_workers(network(LAYERS), GPIPE) == 1
    for limit in (260, 520, 1000):
        facts = network(LAYERS, limit, 1)
        found = fewest_workers(facts, GPIPE)
        if found:
            plan_request(facts, replace(GPIPE, workers=found))
        if found != 1:
            with pytest.raises(UsageError, match="memory"):
                plan_request(facts, replace(GPIPE, workers=(found or 9) - 1))
    assert fewest_workers(network(LAYERS, 20, 1), GPIPE) == 0


@pytest.mark.parametrize("sizes", [[100] * 24, [5000] + [10] * 23])
def test_numbers_of_workers_without_room_for_the_parameters_are_not_planned(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def counted(facts: NetworkFacts, request: PlanRequest) -> Planned:
        planned.append(request.workers)
        return plan_request(facts, request)

    monkeypatch.setattr(choices, "plan_request", counted)
    facts = network([layer(parameter_bytes=size) for size in sizes], 1000, 1)
    found = fewest_workers(replace(facts, base_bytes=700), GPIPE)
    assert (found, planned) == ((8, [8]) if max(sizes) < 300 else (0, []))


FROZEN = replace(
    network(
        [
            *[layer(1.0, 0.0, backward_input=0.0, passes_gradient=False)] * 4,
            *[layer(1.0, 2.0, gradient_bytes=4)] * 4,
        ]
    ),
    frozen=(0, 1, 2, 3),
)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_frozen_stages_in_front_run_no_backward(name: str) -> None:
    found = plan_request(FROZEN, PlanRequest(name, 2, 16, recompute="always", balance=(4, 4)))
    assert found.schedule.frozen == (0,)
    first, last = found.schedule.workers
    assert {a.kind for a in first if a.kind in COMPUTE} == {Kind.FORWARD}
    assert not any(a.kind in (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT) for a in (*first, *last))
    # The last stage waits for one forward of the first; each micro-batch recomputes there.
    assert found.step_seconds == pytest.approx(4 * 1.0 + 16 * 4 * (1.0 + 1.0 + 2.0))


@pytest.mark.parametrize("stages", [2, 3])
def test_the_balance_of_a_frozen_network_is_the_best_of_all(stages: int) -> None:
    asked = PlanRequest("1f1b", stages, 8, recompute="always")
    found = plan_request(FROZEN, asked)
    others = [
        plan_request(FROZEN, replace(asked, balance=balance)).step_seconds
        for balance in product(range(1, 8), repeat=stages)
        if sum(balance) == 8
    ]
    assert found.step_seconds == pytest.approx(min(others))
    assert bool(found.schedule.frozen) is (stages == 3)


def test_the_text_of_a_frozen_networks_plan_has_all_backwards() -> None:
    asked = PlanRequest("1f1b", 2, 16, recompute="never", balance=(4, 4))
    found = plan_request(FROZEN, asked)
    written = whole_text(found, asked.order, "mine")
    assert " 0B15" in written
    again = plan_request(FROZEN, replace(asked, schedule=written, recompute="auto"))
    assert again.step_seconds == found.step_seconds
