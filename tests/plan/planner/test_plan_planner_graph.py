"""The graph of a step: it predicts what the simulator simulates, and its paths are bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.facts.layer_facts import LayerSkip, NetworkFacts
from pipeworker.plan.actions import Action, Edge, Kind, Payload
from pipeworker.plan.connect import connect
from pipeworker.plan.orders import Order
from pipeworker.plan.partition import even, ranges
from pipeworker.plan.placement import Placement
from pipeworker.plan.planner.bounds import Bounds, is_common, moves
from pipeworker.plan.planner.costs import (
    LOSS_FORWARD,
    LayerCosts,
    Seconds,
    edge_bytes,
    stage_costs,
)
from pipeworker.plan.planner.stages import Divisions
from pipeworker.plan.planner.step_graph import StepGraph
from pipeworker.plan.simulate import simulate
from support.pure.facts import DRAWN_ORDERS, layer, network, networks

LAYERS = [layer(output_bytes=10), layer(output_bytes=20, passes_gradient=False), layer()]
MODES = st.sampled_from(["never", "except_first", "always"])


def test_every_channel_has_the_bytes_of_a_micro_batch() -> None:
    skips, ties = (LayerSkip(0, 2, 3), LayerSkip(0, 2, 2)), (LayerSkip(0, 2, 9),)
    facts = replace(network(LAYERS), target_bytes=7, skips=skips, ties=ties)
    assert edge_bytes(facts, ((0, 1), (1, 2), (2, 3))) == {
        Edge(0, 2, Payload.TARGET): 7,
        Edge(0, 1, Payload.ACTIVATION): 10,
        Edge(1, 0, Payload.GRADIENT): 10,
        Edge(1, 2, Payload.ACTIVATION): 20,
        Edge(2, 1, Payload.GRADIENT): 0,
        Edge(0, 2, Payload.SKIP): 5,
        Edge(2, 0, Payload.SKIP_GRADIENT): 5,
        Edge(0, 2, Payload.TIED): 9,
        Edge(2, 0, Payload.TIED): 9,
    }


def test_a_stage_takes_the_seconds_of_its_layers_and_the_last_one_those_of_the_loss() -> None:
    layers = [layer(float(n), 4.0 * n, update=8.0 * n) for n in (1, 2, 3)]
    costs = LayerCosts(replace(network(layers), loss=9.0))
    assert costs.seconds((0, 2)) == (3, 12, 6, 24)
    loss = Seconds(9 * LOSS_FORWARD, 9 - 9 * LOSS_FORWARD, 9 - 9 * LOSS_FORWARD, 0)
    whole = [of_layers + of_loss for of_layers, of_loss in zip((5, 20, 10, 40), loss, strict=True)]
    assert costs.seconds((1, 3)) == pytest.approx(whole)
    assert costs.seconds((1, 3), 0.5) == pytest.approx([2 * seconds for seconds in whole])


@given(
    facts=networks(),
    order=DRAWN_ORDERS,
    workers=st.integers(1, 2),
    microbatches=st.integers(1, 6),
    data=st.data(),
)
def test_the_graph_gives_the_step_time_of_the_simulator(
    facts: NetworkFacts, order: Order, workers: int, microbatches: int, data: st.DataObject
) -> None:
    placement = order.place(workers)
    modes = [data.draw(MODES) for _ in range(placement.stages)]
    divisions = Divisions(facts, order, placement, microbatches, modes)
    balance = even(divisions.layers, placement.stages)
    judged = divisions.judge(balance)
    built = order.build(placement, microbatches, modes, *divisions.pairs(balance))
    timing = simulate(built, stage_costs(divisions.costs, ranges(balance), placement))
    updates = [
        sum(divisions.stage(stage, ranges(balance)[stage])[0].update for stage in held)
        for held in placement.held
    ]
    assert judged.seconds == pytest.approx(timing.makespan + max(updates), rel=1e-12)
    assert judged.modes == tuple(modes)


@given(facts=networks(least=6), order=DRAWN_ORDERS, microbatches=st.integers(1, 5), data=st.data())
def test_a_path_bounds_the_step_times_of_the_balances_around(
    facts: NetworkFacts, order: Order, microbatches: int, data: st.DataObject
) -> None:
    placement = order.place(2)
    modes = [data.draw(MODES) for _ in range(placement.stages)]
    divisions = Divisions(facts, order, placement, microbatches, modes)
    origin = divisions.judge(even(divisions.layers, placement.stages))
    assert origin.path is not None
    if not is_common(origin.path):
        return
    bounds = Bounds(divisions, origin, [origin.path])
    for wide in (False, True):
        for cuts, step in moves(placement.stages - 1, wide=wide):
            balance = bounds.moved(cuts, step)
            if balance is not None:
                least = bounds.at_least(cuts, balance)
                assert least <= divisions.judge(balance).seconds * (1 + 1e-12)


def test_the_graph_of_a_schedule_that_deadlocks_is_refused() -> None:
    first = [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
    with pytest.raises(ScheduleError, match="schedule stuck deadlocks with 4 frames"):
        StepGraph(connect("stuck", 1, Placement.identity(2), [first, []]))
