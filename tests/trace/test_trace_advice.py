"""Advice about a run: the change that helps most, with its gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.partition import ranges
from pipeworker.plan.planner.choices import PlanRequest
from pipeworker.plan.planner.costs import LayerCosts
from pipeworker.plan.simulate import Costs, simulate
from pipeworker.plan.text import format_compute
from pipeworker.trace.advice import advise, measured_facts
from pipeworker.trace.causes import DATA, OTHER, RECOVERY, Breakdown, WorkerTime, breakdown
from pipeworker.trace.mini_batches import costs_of, mini_batches
from support.pure.timelines import lives_of

NOTHING = "no change is known that would make a step 2% faster"
BALANCE = (2, 4, 1, 1)
OWNERS = (0, 1, 2, 3)


def measured(name: str, balance: tuple[int, ...]) -> tuple[Breakdown, Costs]:
    """Return what is recorded of layers that all take the same time."""
    order = ORDERS[name]
    schedule = order.build(order.place(4), 16, ["never"] * 4)
    forward = tuple(0.010 * layers for layers in balance)
    costs = Costs(forward, tuple(2 * each for each in forward), forward)
    lives = lives_of(schedule, costs, late=0.001)
    recorded = list(mini_batches(lives))
    return breakdown(lives, recorded), costs_of(recorded)


def test_an_uneven_balance_is_evened() -> None:
    found, costs = measured("zb-h1", BALANCE)
    facts = measured_facts(None, ranges(BALANCE), OWNERS, costs)
    assert [layer.forward for layer in facts.layers] == pytest.approx([0.010] * 8)
    request = PlanRequest("zb-h1", 4, 16, "never", BALANCE)
    advice = advise(facts, request, BALANCE, found, 2)
    assert advice.option == "--balance 2,2,2,2"
    assert "stage 1 takes 100% longer than the mean" in advice.text
    unknown = advise(facts, request, BALANCE, found, 2, known=False)
    assert unknown.text == f"{advice.text}, if the layers of each stage take equally long"
    better, _ = measured("zb-h1", (2, 2, 2, 2))
    assert advice.gain == pytest.approx(found.seconds / better.seconds, rel=0.02)


def test_an_idle_schedule_is_replaced() -> None:
    even = (2, 2, 2, 2)
    found, costs = measured("gpipe", even)
    facts = measured_facts(None, ranges(even), OWNERS, costs)
    advice = advise(facts, PlanRequest("gpipe", 4, 16, "never"), even, found, 2)
    assert advice.option in ("--schedule zb-h1", "--schedule zbv", "--schedule dualpipev")
    assert advice.gain > 1.1
    typed = PlanRequest("gpipe", 4, 16, "never", virtual_stages=1)
    virtual_stages = ORDERS[advice.option.split()[1]].virtual_stages
    both = f"{advice.option} --virtual-stages {virtual_stages}"
    assert advise(facts, typed, even, found, 2).option == both


def test_a_schedule_that_evens_the_stages_is_advised_for_that() -> None:
    layers = tuple(LayerFacts("", forward=each, backward=2 * each) for each in (1, 1, 2, 2, 4, 4))
    even, order = (2, 2, 2), ORDERS["gpipe"]
    schedule = order.build(order.place(3), 24, ["never"] * 3)
    costs = Costs((2.0, 4.0, 8.0), (4.0, 8.0, 16.0), (2.0, 4.0, 8.0))
    lives = lives_of(schedule, costs, late=0.001)
    found = breakdown(lives, list(mini_batches(lives)))
    request = PlanRequest("gpipe", 3, 24, "never", "even")
    advice = advise(NetworkFacts(layers), request, even, found, 2)
    assert advice.option.startswith("--schedule ")
    assert advice.text.startswith("stage 2 takes 71% longer than the mean: --schedule ")


def test_a_schedule_that_was_chosen_is_replaced_by_no_other() -> None:
    """A search has compared all balances and schedules, and a file is what the user wants."""
    found, costs = measured("gpipe", BALANCE)
    facts = measured_facts(None, ranges(BALANCE), OWNERS, costs)
    searched = advise(facts, PlanRequest("auto", 4, 16, "never"), BALANCE, found, 2)
    assert searched.text == NOTHING
    order = ORDERS["gpipe"]
    written = format_compute(order.build(order.place(4), 16, ["never"] * 4), "own")
    advice = advise(facts, PlanRequest(written, 4, 16, "never"), BALANCE, found, 2)
    assert advice.option == "--balance 2,2,2,2"
    even = (2, 2, 2, 2)
    found, costs = measured("gpipe", even)
    facts = measured_facts(None, ranges(even), OWNERS, costs)
    advice = advise(facts, PlanRequest(written, 4, 16, "never"), even, found, 2)
    assert advice.text == NOTHING


def test_a_plan_without_enough_memory_is_no_advice() -> None:
    found, costs = measured("zb-h1", BALANCE)
    facts = measured_facts(None, ranges(BALANCE), OWNERS, costs)
    heavy = [
        replace(layer, parameter_bytes=1 + 9 * (n == 6)) for n, layer in enumerate(facts.layers)
    ]
    facts = replace(facts, layers=tuple(heavy), limits=(10,) * 4)
    advice = advise(facts, PlanRequest("zb-h1", 4, 16, "never"), BALANCE, found, 2)
    assert advice.option == "--balance 3,3,1,1"


def test_a_run_that_was_predicted_not_to_fit_gets_advice() -> None:
    """It has run, so its steps can be compared; of other plans those count that fit."""
    found, costs = measured("zb-h1", BALANCE)
    facts = measured_facts(None, ranges(BALANCE), OWNERS, costs)
    heavy = tuple(replace(layer, parameter_bytes=3) for layer in facts.layers)
    request = PlanRequest("zb-h1", 4, 16, "never", BALANCE)
    for limit, expected in ((10, "--balance 2,2,2,2"), (5, "")):
        tight = replace(facts, layers=heavy, limits=(limit,) * 4)
        assert advise(tight, request, BALANCE, found, 2).option == expected


def test_no_plan_is_predicted_to_save_all_of_a_step() -> None:
    _, costs = measured("zb-h1", BALANCE)
    facts = measured_facts(None, ranges(BALANCE), OWNERS, costs)
    workers = tuple(WorkerTime(n, (n,), forward=1e-6) for n in range(4))
    found = Breakdown(1e-6, (1,), workers)
    advice = advise(facts, PlanRequest("zb-h1", 4, 16, "never"), BALANCE, found, 1)
    assert advice.gain == pytest.approx(100)


def test_data_that_takes_long_is_named() -> None:
    time = WorkerTime(0, (0,), forward=1.0, backward=2.0)
    time.idle[DATA] = 3.0
    request = PlanRequest("gpipe", 1, 4, "never")
    facts = NetworkFacts((LayerFacts("Linear", forward=0.25, backward=0.5),))
    advice = advise(facts, request, (1,), Breakdown(6.0, (1,), (time,)), 1)
    assert advice.text == (
        "data() takes 50% of a step, while nothing computes: without that time the rate would be "
        "2.00 times as high"
    )
    assert (advice.option, advice.gain) == ("", 2.0)
    # A recovery, and time for which the job was suspended, are no part of a step.
    time.idle[RECOVERY], time.idle[OTHER] = 50.0, 4.0
    assert advise(facts, request, (1,), Breakdown(60.0, (1,), (time,), 4.0), 1) == advice
    twice = advise(facts, request, (1,), Breakdown(60.0, (1,), (time,), 4.0), 2)  # mini-batches
    assert twice == advice
    still = WorkerTime(0, (0,))
    still.idle[DATA] = 3.0
    assert advise(facts, request, (1,), Breakdown(3.0, (1,), (still,)), 1).text == NOTHING


def test_where_nothing_helps_that_is_said() -> None:
    time = WorkerTime(0, (0,), forward=1.0, backward=2.0)
    facts = NetworkFacts((LayerFacts("Linear", forward=0.25, backward=0.5),))
    request = PlanRequest("gpipe", 1, 4, "never")
    advice = advise(facts, request, (1,), Breakdown(3.0, (1,), (time,)), 1)
    assert advice.text == NOTHING


def test_layers_share_a_stages_seconds_as_they_did_when_they_were_measured() -> None:
    layers = tuple(
        LayerFacts("Linear", forward=each, backward=2 * each, backward_input=each)
        for each in (1.0, 3.0, 2.0)
    )
    costs = Costs((8.0, 3.0), (16.0, 6.0), (8.0, 3.0))
    found = measured_facts(NetworkFacts(layers), ranges((2, 1)), (0, 1), costs)
    assert [layer.forward for layer in found.layers] == [2.0, 6.0, 3.0]
    assert [layer.backward_input for layer in found.layers] == [2.0, 6.0, 3.0]
    order = ORDERS["gpipe"]
    schedule = order.build(order.place(2), 1, ["never"] * 2)
    assert simulate(schedule, costs).makespan == 33


def test_a_faster_worker_is_predicted_to_take_less_time() -> None:
    facts = NetworkFacts((LayerFacts("", forward=1.0, backward=2.0),) * 2, speeds=(1.0, 2.0))
    found = measured_facts(facts, ranges((1, 1)), (0, 1), Costs((3.0, 3.0), (6.0, 6.0), (0.0,) * 2))
    assert [layer.forward for layer in found.layers] == [3.0, 6.0]
    assert [layer.backward for layer in found.layers] == [6.0, 12.0]


def test_what_was_not_measured_or_predicted_stays_as_it_is() -> None:
    facts = NetworkFacts((LayerFacts("", forward=1.0, backward=0.0), LayerFacts("", forward=2.0)))
    found = measured_facts(facts, ranges((1, 1)), (0, 1), Costs((0.0, 4.0), (6.0, 0.0), (0.0,) * 2))
    assert [(layer.forward, layer.backward) for layer in found.layers] == [(1.0, 0.0), (4.0, 0.0)]


def test_counted_operations_are_not_taken_for_seconds() -> None:
    layers = tuple(LayerFacts("", forward=768, backward=1536, update=each) for each in (4e3, 1e3))
    counted = NetworkFacts(layers, measured=False)
    costs = Costs((3.0, 1.0), (0.0, 2.0), (0.0, 0.0))
    found = measured_facts(counted, ranges((1, 1)), (0, 1), costs)
    times = [(layer.forward, layer.backward, layer.update) for layer in found.layers]
    assert times == [(3.0, 0.0, 0.0), (1.0, 2.0, 0.0)]


def test_facts_of_another_number_of_layers_are_not_used() -> None:
    others = NetworkFacts((LayerFacts("", forward=9.0, backward=1.0),) * 2)
    costs = Costs((2.0, 2.0), (6.0, 4.0), (0.0, 1.0))
    found = measured_facts(others, ranges((2, 1)), (0, 1), costs)
    assert found == measured_facts(None, ranges((2, 1)), (0, 1), costs)
    assert all(layer.passes_gradient for layer in found.layers)


def test_half_of_a_backward_that_was_not_split_is_for_the_input() -> None:
    costs = Costs((2.0, 2.0), (6.0, 4.0), (0.0, 1.0))
    found = measured_facts(None, ranges((2, 1)), (0, 1), costs)
    assert [layer.backward_input for layer in found.layers] == [1.5, 1.5, 1.0]


@pytest.mark.parametrize("slower", [0.5, 4.0])
def test_a_large_loss_is_slower_than_predicted_as_its_stage_is(slower: float) -> None:
    facts = NetworkFacts((LayerFacts("Linear", forward=1.0, backward=2.0),) * 4, loss=12.0)
    costs = Costs((2 * slower, 6 * slower), (4 * slower, 12 * slower), (0.0, 0.0))
    found = measured_facts(facts, ranges((2, 2)), (0, 1), costs)
    last = LayerCosts(found).seconds((2, 4))
    assert (last.forward, last.backward) == pytest.approx((6 * slower, 12 * slower))
