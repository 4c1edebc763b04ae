"""The predicted memory of workers, from the facts of layers and the order of actions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.facts.layer_facts import LayerSkip, NetworkFacts
from pipeworker.plan.actions import Kind
from pipeworker.plan.check import check
from pipeworker.plan.orders import Order, resolve
from pipeworker.plan.partition import even, ranges
from pipeworker.plan.placement import Placement
from pipeworker.plan.planner.costs import stage_costs
from pipeworker.plan.planner.memory import Ends, LayerBytes, StageBytes, moments, peak
from pipeworker.plan.planner.stages import Divisions
from pipeworker.plan.simulate import simulate
from support.pure.facts import DRAWN_ORDERS, SPLIT_ORDERS, layer, network, networks


@given(
    order=DRAWN_ORDERS, workers=st.integers(1, 3), microbatches=st.integers(1, 6), mode=st.data()
)
def test_the_graphs_and_inputs_are_those_that_the_checker_counts(
    order: Order, workers: int, microbatches: int, mode: st.DataObject
) -> None:
    placement = order.place(workers)
    modes = [
        mode.draw(st.sampled_from(["never", "except_first", "always"]))
        for _ in range(placement.stages)
    ]
    live = check(order.build(placement, microbatches, modes))
    most = moments(order.build(placement, microbatches, ["always"] * placement.stages))
    for worker, held in enumerate(placement.held):
        for place, stage in enumerate(held):
            found = [moment[place] for moment in most[worker]]
            assert max(h.inputs for h in found) == live.inputs[stage]
            graphs = max(h.graphs(modes[stage]) for h in found)
            # The first of two forwards builds a graph, too, beside those that the checker counts.
            transient = modes[stage] != "never"
            assert live.activations[stage] <= graphs <= live.activations[stage] + transient


@given(
    order=DRAWN_ORDERS,
    microbatches=st.integers(1, 6),
    mode=st.sampled_from(["never", "except_first", "always"]),
)
def test_the_moments_of_one_schedule_serve_every_recompute_mode(
    order: Order, microbatches: int, mode: str
) -> None:
    placement = order.place(2)
    modes = [mode] * placement.stages
    general = moments(order.build(placement, microbatches, ["always"] * placement.stages))
    special = moments(order.build(placement, microbatches, modes))
    sizes = [StageBytes(5, 3, 7 + stage, 1) for stage in range(placement.stages)]
    for worker, held in enumerate(placement.held):
        own = [sizes[stage] for stage in held]
        count = len(held)
        # A schedule as it is counts as always, whatever it recomputes.
        as_it_is = peak(0, special[worker], own, ["always"] * count)
        assert peak(0, general[worker], own, [mode] * count) == as_it_is


@given(
    name=st.sampled_from(SPLIT_ORDERS),
    microbatches=st.integers(1, 6),
    modes=st.lists(st.sampled_from(["never", "except_first", "always"]), min_size=2, max_size=2),
)
def test_an_order_that_splits_backwards_is_counted_and_timed_in_its_own_modes(
    name: str, microbatches: int, modes: list[str]
) -> None:
    order = resolve(name)
    placement = order.place(2)
    own = [modes[place] for place in range(order.virtual_stages)]
    by_stage = [""] * placement.stages
    for held in placement.held:
        for stage, mode in zip(held, own, strict=True):
            by_stage[stage] = mode
    facts = network([layer(saved_bytes=7, output_bytes=3)] * (2 * placement.stages))
    divisions = Divisions(facts, order, placement, microbatches, by_stage)
    balance = even(len(facts.layers), placement.stages)
    built = order.build(placement, microbatches, by_stage)
    found = moments(built)
    for worker, held in enumerate(placement.held):
        sizes = [divisions.stage(stage, ranges(balance)[stage])[1] for stage in held]
        as_it_is = peak(0, found[worker], sizes, ["always"] * len(held))
        assert divisions.peaks(balance)[worker] == as_it_is
    costs = stage_costs(divisions.costs, ranges(balance), placement)
    assert divisions.judge(balance).seconds == pytest.approx(simulate(built, costs).makespan)


def test_a_worker_holds_its_state_and_what_its_micro_batches_keep() -> None:
    one = layer(
        parameter_bytes=100,
        gradient_bytes=90,
        optimizer_bytes=200,
        saved_bytes=7,
        saved_input_bytes=3,
        saved_output_bytes=5,
        working_bytes=40,
        output_bytes=10,
    )
    facts = NetworkFacts(
        (one,) * 4,
        input_bytes=20,
        target_bytes=2,
        base_bytes=1000,
        loss_saved_bytes=11,
        loss_saved_input_bytes=9,
    )
    divisions = Divisions(facts, resolve("gpipe"), Placement.identity(2), 8, ["never", "always"])
    # Graph: what two layers saved, the larger of 5 and 3 between them, and the output.
    first = 2 * 390 + 2 * 8 * (20 + 2) + (4 + 1) * 10 + 8 * (2 * 7 + 5 + 10) + 40
    # The loss keeps of the output more than the last layer does. There are buffers for no more
    # than all 8 micro-batches.
    second = 2 * 390 + 8 * (10 + 2) + (2 * 7 + 5 + 9 + 11) + 40
    graphs = max(m[0].always for m in divisions.moments[1])
    assert graphs == 1
    assert divisions.peaks((2, 2)) == (1000 + first, 1000 + second)


@pytest.mark.parametrize("copies", [1, 2])
def test_snapshots_take_as_much_again_as_parameters_and_optimizer(copies: int) -> None:
    one = layer(parameter_bytes=100, gradient_bytes=90, optimizer_bytes=200)
    facts = network([one] * 2)
    with_copies = LayerBytes(replace(facts, copies=copies), 4)
    assert with_copies.state((0, 2)) - LayerBytes(facts, 4).state((0, 2)) == 2 * copies * 300


def test_replicas_that_share_the_optimizer_have_a_part_of_its_state() -> None:
    one = layer(parameter_bytes=100, gradient_bytes=90, optimizer_bytes=200)
    facts = replace(network([one] * 2), copies=1, replicas=4, shards_optimizer=True)
    assert LayerBytes(facts, 4).state((0, 2)) == 2 * (2 * (100 + 50) + 90)
    apart = replace(facts, shards_optimizer=False)
    assert LayerBytes(apart, 4).state((0, 2)) == 2 * (2 * (100 + 200) + 90)


@pytest.mark.parametrize("mapped", [False, True])
def test_replicas_exchange_gradients_through_sums_and_buffers(mapped: bool) -> None:
    """As was measured: 5 pieces of 2 MB from each other replica, or 10 where both ends map them."""
    one = layer(gradient_bytes=100 << 20, update_bytes=30 << 20)
    alone = LayerBytes(replace(network([one]), maps_frames=mapped), 4).stage((0, 1))
    assert alone.update == 30 << 20
    for replicas in (2, 3):
        facts = replace(network([one]), maps_frames=mapped, replicas=replicas)
        found = LayerBytes(facts, 4).stage((0, 1))
        assert found.update == -(-(100 << 20) // replicas)
        buffers = (replicas - 1) * 5 * (1 + mapped) * (2 << 20)
        assert 0.9 * buffers < found.fixed - alone.fixed <= buffers


def test_a_small_part_of_the_gradients_has_few_buffers() -> None:
    facts = replace(network([layer(gradient_bytes=80)]), replicas=2)
    assert LayerBytes(facts, 4).stage((0, 1)).fixed == 80 + 40


def test_buffers_that_both_ends_map_are_in_the_memory_of_both() -> None:
    facts = NetworkFacts((layer(output_bytes=10),) * 4, input_bytes=20, target_bytes=2)
    mapped = replace(facts, maps_frames=True)
    before, after = (
        Divisions(one, resolve("gpipe"), Placement.identity(2), 8, ["never"] * 2).peaks((2, 2))
        for one in (facts, mapped)
    )
    # Activations and targets of all 8 micro-batches; gradients of one, and of 4 ahead.
    assert after[0] - before[0] == 8 * (10 + 2)
    assert after[1] - before[1] == 5 * 10


def test_stages_of_one_worker_pass_values_without_buffers() -> None:
    facts = NetworkFacts((layer(output_bytes=10),) * 4, target_bytes=1000, maps_frames=True)
    divisions = Divisions(facts, resolve("zbv"), resolve("zbv").place(2), 4, ["never"] * 4)
    sizes = [divisions.stage(stage, (stage, stage + 1))[1] for stage in range(4)]
    # Stages 1 and 2 are on one worker.
    assert [size.ahead for size in sizes] == [0, 4, 0, 4]
    assert [size.gradients_ahead for size in sizes] == [4, 0, 4, 0]
    assert sizes[3].input == 10  # the target is where the mini-batch is
    assert [size.fixed for size in sizes] == [2 * 4 * 1000 + 4 * 10, 4 * 10, 4 * 10, 4 * 10]


def test_only_the_last_stage_receives_targets() -> None:
    sizes = LayerBytes(replace(network([layer(output_bytes=10)] * 3), target_bytes=2), 4)
    assert [sizes.stage((stage, stage + 1)).input for stage in range(3)] == [0, 10, 12]


@given(microbatches=st.integers(1, 8))
def test_a_split_backward_keeps_gradients_between_its_parts(microbatches: int) -> None:
    one = layer(deferred_bytes=7, output_bytes=3)
    order = resolve("zb-h1")
    placement = order.place(2)
    peaks = []
    for facts in (network([replace(one, deferred_bytes=0)] * 2), network([one] * 2)):
        divisions = Divisions(facts, order, placement, microbatches, ["never"] * 2)
        peaks.append(divisions.peaks((1, 1)))
    built = order.build(placement, microbatches, ["never"] * 2)
    for worker, actions in enumerate(built.workers):
        between = most = 0
        for action in actions:
            between += action.kind is Kind.BACKWARD_INPUT
            most = max(most, between)
            between -= action.kind is Kind.BACKWARD_WEIGHT
        assert 0 <= peaks[1][worker] - peaks[0][worker] <= 7 * most
    assert peaks[1] > peaks[0]


def test_an_update_needs_memory_when_there_are_no_graphs() -> None:
    one = layer(saved_bytes=10, update_bytes=100)
    at_once = network([one] * 3)
    placement, order = Placement.identity(1), resolve("gpipe")
    small, large = (
        Divisions(facts, order, placement, 1, ["never"]).peaks((3,))[0]
        for facts in (replace(at_once, updates_at_once=False), at_once)
    )
    assert (small, large) == (100, 300)
    kept = Divisions(at_once, order, placement, 20, ["never"]).peaks((3,))[0]
    assert kept == 20 * 3 * 10


def test_a_loss_may_take_more_than_the_layers() -> None:
    facts = replace(network([layer(working_bytes=5)] * 2), loss_working_bytes=50)
    sizes = LayerBytes(facts, 4)
    assert [sizes.stage(layers).working for layers in ((0, 1), (1, 2))] == [5, 50]


def test_a_frozen_layer_in_front_gets_no_gradient_buffers() -> None:
    frozen = layer(output_bytes=10, passes_gradient=False)
    trained = layer(output_bytes=10)
    assert LayerBytes(network([frozen, trained]), 4).stage((0, 1)).gradient == 0
    assert LayerBytes(network([trained, trained]), 4).stage((0, 1)).gradient == 10


def test_a_frozen_stage_in_front_keeps_nothing_and_a_later_one_does() -> None:
    frozen = layer(1.0, 0.0, backward_input=0.0, output_bytes=10, passes_gradient=False)
    trained = layer(saved_bytes=7, output_bytes=10, gradient_bytes=4)
    facts = replace(network([frozen, frozen, trained, trained]), frozen=(0, 1))
    order, placement = resolve("gpipe"), Placement.identity(3)
    divisions = Divisions(facts, order, placement, 8, ["never"] * 3)
    _, middle, last = divisions.peaks((1, 1, 2))
    # The input of one micro-batch, and of 4 ahead; and the output until it is sent.
    assert middle == 5 * 10 + 10
    assert last == 8 * 10 + 8 * 2 * 7 + 2 * 4
    # Stage 1 with a trained layer keeps inputs and graphs.
    assert divisions.peaks((1, 2, 1))[1] == 8 * 10 + 8 * (7 + 10) + 4 + 5 * 10


def test_a_skip_is_held_where_it_arrives_unless_it_begins_there() -> None:
    facts = NetworkFacts((layer(),) * 4, skips=(LayerSkip(0, 3, 50),))
    sizes = LayerBytes(facts, 4)
    assert [sizes.stage(r).input for r in ((2, 4), (0, 4), (0, 2), (1, 3))] == [50, 0, 0, 0]
    mapped = LayerBytes(replace(facts, maps_frames=True), 4)
    ends = Ends(sent=3)
    assert [mapped.stage(r, ends).fixed for r in ((0, 2), (0, 4), (1, 3))] == [3 * 50, 0, 0]


def test_a_tied_weight_has_a_second_gradient_on_stages_that_share_it() -> None:
    facts = NetworkFacts((layer(),) * 4, ties=(LayerSkip(0, 3, 50),))
    sizes = LayerBytes(facts, 4)
    assert [sizes.stage(r).fixed for r in ((0, 2), (2, 4), (0, 4), (1, 2))] == [50, 50, 0, 0]


@given(facts=networks(), order=DRAWN_ORDERS, microbatches=st.integers(1, 5))
def test_recompute_never_needs_more_memory(
    facts: NetworkFacts, order: Order, microbatches: int
) -> None:
    placement = order.place(2)
    balance = even(len(facts.layers), placement.stages)
    peaks = [
        Divisions(facts, order, placement, microbatches, [mode] * placement.stages).peaks(balance)
        for mode in ("never", "except_first", "always")
    ]
    assert all(a >= b >= c for a, b, c in zip(*peaks, strict=True))
    assert len(ranges(balance)) == placement.stages
