"""The chosen balance: the best one of small networks, a good one of large networks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeworker.errors import UsageError
from pipeworker.facts.connections import SharedBuffer
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.plan.orders import Order, resolve
from pipeworker.plan.partition import even, ranges
from pipeworker.plan.placement import Placement
from pipeworker.plan.planner import balance as balances
from pipeworker.plan.planner import stages
from pipeworker.plan.planner.balance import lacking, search_balance
from pipeworker.plan.planner.costs import stage_costs
from pipeworker.plan.planner.planner import listed, plan_order
from pipeworker.plan.planner.stages import Divisions
from pipeworker.plan.planner.step_graph import StepGraph
from pipeworker.plan.schedule import Pairs, StageEnds
from pipeworker.plan.simulate import simulate
from support.draws import draws
from support.pure.facts import DRAWN_ORDERS, layer, network, networks


def brute_force(
    facts: NetworkFacts, order: Order, placement: Placement, microbatches: int
) -> float | None:
    """Return the shortest step of all balances and recompute modes that fit; None if none does."""
    layers, stages = len(facts.layers), placement.stages
    cuts = [(0, *some, layers) for some in combinations(range(1, layers), stages - 1)]
    times = []
    known = ("never", "except_first", "always") if facts.limits else ("never",)
    for modes in product(known, repeat=stages):
        divisions = Divisions(facts, order, placement, microbatches, modes)
        for some in cuts:
            balance, divided = tuple(b - a for a, b in pairwise(some)), tuple(pairwise(some))
            pairs = zip(divisions.peaks(balance), divisions.limits, strict=True)
            if any(limit is not None and peak > limit for peak, limit in pairs):
                continue
            built = order.build(placement, microbatches, modes, *divisions.pairs(balance))
            timing = simulate(built, stage_costs(divisions.costs, divided, placement))
            updates = [
                sum(divisions.stage(stage, divided[stage])[0].update for stage in held)
                for held in placement.held
            ]
            times.append(timing.makespan + max(updates))
    return min(times, default=None)


def least_excess(divisions: Divisions) -> int:
    """Return the bytes by which the fullest worker of the best balance exceeds its limit."""
    found = []
    for inner in combinations(divisions.cuts, divisions.stages - 1):
        balance = tuple(b - a for a, b in pairwise((0, *inner, divisions.layers)))
        pairs = zip(divisions.peaks(balance), divisions.limits, strict=True)
        found.append(max(peak - limit for peak, limit in pairs if limit is not None))
    return min(found)


@settings(max_examples=draws(6))
@given(
    facts=networks(most=6),
    order=DRAWN_ORDERS,
    microbatches=st.integers(1, 4),
    share=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
)
def test_a_small_network_gets_the_search_balance_and_modes_of_all_that_fit(
    facts: NetworkFacts, order: Order, microbatches: int, share: float
) -> None:
    placement = order.place(2)
    divisions = Divisions(facts, order, placement, microbatches)
    peaks = divisions.peaks(even(divisions.layers, placement.stages))
    limited = facts
    if placement.stages == placement.workers:  # else the modes are chosen by worker, not by time
        limited = replace(facts, limits=tuple(int(share * peak) for peak in peaks))
    best = brute_force(limited, order, placement, microbatches)
    divisions = Divisions(limited, order, placement, microbatches)
    found = search_balance(divisions)
    assert bool(found.excess) is (best is None)
    if best is None:
        assert "does not fit into the memory" in str(lacking(divisions, found))
        assert found.excess == least_excess(divisions)
        return
    assert found.seconds == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_local_search_comes_close_to_the_search_balance(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, placement = resolve("gpipe"), Placement.identity(workers)
    drawn = Random(workers)
    lost = []
    for _ in range(12):
        layers = [
            layer(drawn.uniform(0.1, 5), drawn.uniform(0.1, 9), output_bytes=drawn.randrange(200))
            for _ in range(12)
        ]
        facts = replace(network(layers), latency=0.1, seconds_per_byte=drawn.choice([0, 0.01]))
        best, found = (
            search_balance(Divisions(facts, order, placement, 6)).seconds
            for _ in (monkeypatch.setattr(balances, "MAX_JUDGED", most) for most in (2000, 0))
        )
        lost.append(found / best - 1)
    assert max(lost) < 0.05
    assert sum(lost) / len(lost) < 0.01


def test_the_graphs_of_steps_that_were_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where backwards are split, the graph depends on what is recomputed."""
    built: list[StepGraph] = []

    def build(*arguments: Any, **words: Any) -> StepGraph:
        built.append(StepGraph(*arguments, **words))
        return built[-1]

    monkeypatch.setattr(stages, "StepGraph", build)
    monkeypatch.setattr(stages, "MAX_GRAPHS", 2)
    facts, order = network([layer()] * 4), resolve("zb-h1")
    divisions = Divisions(facts, order, order.place(2), 4)
    for mode in ("never", "always", "never", "except_first", "never", "always"):
        divisions._graph((2, 2), (mode, mode))
    assert len(built) == 4


def test_cuts_move_to_where_little_is_sent() -> None:
    """Even stages take 302 s, and those whose slowest one is as fast as possible 262 s."""
    large = {0, 3, 4, 5, 6, 8}
    layers = [
        layer(seconds, 2 * seconds, output_bytes=40 * (number in large))
        for number, seconds in enumerate((7, 3, 3, 3, 2, 3, 5, 1, 8, 2))
    ]
    facts = replace(network(layers), seconds_per_byte=0.25)
    arguments = facts, resolve("1f1b"), Placement.identity(3), 4, ("never",) * 3
    few, every = (search_balance(Divisions(*arguments), nodes) for nodes in (1, 10**7))
    assert few.seconds == every.seconds == 225


def test_a_heavy_layer_gets_a_stage_of_its_own() -> None:
    facts = network([layer(), layer(), layer(), layer(10, 20), layer(), layer()])
    found = search_balance(Divisions(facts, resolve("gpipe"), Placement.identity(3), 16))
    assert found.balance == (3, 1, 2)


@pytest.mark.parametrize("most", [2000, 0])
def test_stages_are_even_unless_another_balance_is_better(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balances, "MAX_JUDGED", most)
    facts = network([layer(), layer(0, 0), layer(0, 0), layer()])
    plan = plan_order(facts, resolve("gpipe"), Placement.identity(2), 4)
    assert plan.balance == (2, 2)
    assert plan.why == ("even stages: no other balance makes a step shorter",)
    assert plan_order(facts, resolve("gpipe"), Placement.identity(1), 4).why == ()


def test_a_slow_worker_gets_fewer_layers() -> None:
    facts = replace(network([layer()] * 9), speeds=(2.0, 1.0))
    found = search_balance(Divisions(facts, resolve("gpipe"), Placement.identity(2), 16))
    assert found.balance == (6, 3)


def test_the_loss_counts_for_the_last_stage() -> None:
    facts = replace(network([layer()] * 8), loss=6.0)
    found = search_balance(Divisions(facts, resolve("gpipe"), Placement.identity(2), 16))
    assert found.balance == (5, 3)


def test_a_large_output_is_not_sent_where_a_cut_beside_it_costs_less() -> None:
    layers = [layer(output_bytes=1000 if n == 3 else 10) for n in range(8)]
    facts = replace(network(layers), seconds_per_byte=0.1)
    found = search_balance(Divisions(facts, resolve("gpipe"), Placement.identity(2), 4))
    assert found.balance != (4, 4)


def test_only_the_stages_without_room_recompute() -> None:
    layers = [layer(saved_bytes=10, output_bytes=1)] * 8
    facts = replace(network(layers), limits=(250, 1000))
    found = search_balance(Divisions(facts, resolve("gpipe"), Placement.identity(2), 8))
    assert found.modes[1] == "never"
    plan = plan_order(facts, resolve("gpipe"), Placement.identity(2), 8, balance=(4, 4))
    assert plan.recompute == ("except_first", "never")
    assert plan.memory[0] <= 250
    assert plan.why == ("recompute on stage 0: 333 B without, of 250 B",)


def test_an_error_names_the_stage_what_it_lacks_and_what_to_do() -> None:
    facts = network([layer(parameter_bytes=10**9)] * 4, 10**9, 2)
    with pytest.raises(UsageError) as error:
        plan_order(facts, resolve("gpipe"), Placement.identity(2), 8)
    text = str(error.value)
    assert text.startswith("--stages 2: does not fit into the memory; with balance ")
    assert "recompute never, stage 0 would need 2.0 GB, 1.0 GB more than 1.0 GB" in text
    assert text.endswith("or a larger --memory")


def test_an_error_advises_on_no_stages_if_a_worker_without_layers_does_not_fit() -> None:
    facts = replace(network([layer(parameter_bytes=10)] * 4, 10**6, 2), base_bytes=2 * 10**6)
    with pytest.raises(UsageError) as error:
        plan_order(facts, resolve("gpipe"), Placement.identity(2), 8)
    needs = "more than 1.0 MB: a worker needs 2.0 MB without layers; use a larger --memory"
    assert str(error.value).endswith(needs)


def test_an_error_names_the_balance_whose_fullest_worker_lacks_the_least() -> None:
    # Both balances lack as much in total, and 1,2 takes less time.
    layers = [layer(seconds, parameter_bytes=n) for seconds, n in ((5, 11), (1, 2), (1, 12))]
    divisions = Divisions(network(layers, 10, 2), resolve("gpipe"), Placement.identity(2), 1)
    found = search_balance(divisions)
    assert divisions.peaks((1, 2)) == (11, 14)
    assert divisions.peaks((2, 1)) == (13, 12)
    assert (found.balance, found.excess) == ((2, 1), 3)


def test_a_tight_network_of_many_layers_still_finds_a_balance_that_fits() -> None:
    # Large and small layers in turn: stages of equal time exceed the limit.
    layers = [
        layer(parameter_bytes=100 if n < 20 else 10, forward=0.1 if n < 20 else 1)
        for n in range(40)
    ]
    facts = network(layers, 420, 6)
    divisions = Divisions(facts, resolve("gpipe"), Placement.identity(6), 8, ["always"] * 6)
    found = search_balance(divisions)
    assert not found.excess
    assert max(divisions.peaks(found.balance)) <= 420


def test_a_balance_that_fits_is_found_where_there_is_one() -> None:
    order, fitting = resolve("1f1b"), []
    for seed in range(40):
        drawn, workers = Random(seed), 2 + seed % 3
        layers = [
            layer(
                drawn.uniform(0.1, 5),
                drawn.uniform(0.1, 9),
                parameter_bytes=drawn.choice([0, 10, 500, 2000]),
                saved_bytes=drawn.randrange(300),
                output_bytes=drawn.randrange(200),
            )
            for _ in range(8)
        ]
        facts, placement = network(layers), Placement.identity(workers)
        divisions = Divisions(facts, order, placement, 6)
        limits = [
            int(drawn.choice([0.8, 1, 1.2]) * peak) for peak in divisions.peaks(divisions.even)
        ]
        divisions = Divisions(replace(facts, limits=tuple(limits)), order, placement, 6)
        found = balances._any_fitting(divisions)
        fitting.append(found is not None)
        assert fitting[-1] is (least_excess(divisions) <= 0)
        assert found is None or not divisions.judge(found).excess
    assert 5 < sum(fitting) < 35


def test_a_balance_that_fits_is_found_where_no_move_of_a_cut_leads_to_it() -> None:
    layers = [layer(parameter_bytes=n) for n in (10, 20, 0, 20, 30, 0, 10)]
    facts = replace(network(layers), limits=(30, 0, 20, 40))
    divisions = Divisions(facts, resolve("gpipe"), Placement.identity(4), 1, ["always"] * 4)
    # So few nodes that the balances are not all judged, as of a network of many layers.
    found = search_balance(divisions, nodes=1)
    assert (found.balance, found.excess) == ((2, 1, 1, 3), 0)


def test_a_plan_predicts_the_step_that_the_simulator_simulates() -> None:
    facts = network([layer(update=0.5)] * 8)
    plan = plan_order(facts, resolve("gpipe"), Placement.identity(4), 8)
    assert plan.balance == (2, 2, 2, 2)
    assert plan.timing == simulate(plan.schedule, plan.costs)
    assert plan.step_seconds == (8 + 3) * 6 + 1.0
    assert plan.why == ("even stages: no other balance makes a step shorter",)


def test_a_plan_says_what_it_gains_over_even_stages() -> None:
    facts = network([layer(), layer(), layer(), layer(10, 20), layer(), layer()])
    plan = plan_order(facts, resolve("gpipe"), Placement.identity(3), 16)
    assert plan.why == ("balance: a step takes 8% less time than with even stages",)
    plan = plan_order(replace(facts, measured=False), resolve("gpipe"), Placement.identity(3), 16)
    counted = "balance: a step takes 8% less time than with even stages, by counted operations"
    assert plan.why == (counted,)
    facts = network([layer(1.001, 2.002), layer(), layer(), layer()])
    plan = plan_order(facts, resolve("gpipe"), Placement.identity(3), 16)
    assert plan.why == ("balance: a step takes less than 1% less time than with even stages",)


def test_each_replica_runs_its_part_of_the_micro_batches() -> None:
    facts = network([layer()] * 4)
    plan = plan_order(facts, resolve("gpipe"), Placement.identity(2, replicas=2), 8)
    assert plan.schedule.microbatches == 4
    assert plan.schedule.placement.replicas == 2


def test_fewer_layers_than_stages_are_an_error() -> None:
    with pytest.raises(UsageError, match="more than the layers of model"):
        plan_order(network([layer()] * 2), resolve("gpipe"), Placement.identity(3), 8)


@pytest.mark.parametrize("most", [balances.MAX_JUDGED, 0], ids=["all", "local search"])
def test_layers_that_share_a_buffer_are_on_one_stage(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balances, "MAX_JUDGED", most)
    layers = [layer(n % 3 + 1, n % 2 + 2) for n in range(12)]
    shared = (SharedBuffer(1, 4), SharedBuffer(3, 7), SharedBuffer(8, 9))
    facts = replace(network(layers), shared_buffers=shared)
    divisions = Divisions(facts, resolve("gpipe"), Placement.identity(4), 8)
    possible = [1, 8, 10, 11]
    assert divisions.cuts == possible
    apart = [(0, *some, 12) for some in combinations(possible, 3)]
    times = [divisions.judge(tuple(b - a for a, b in pairwise(some))) for some in apart]
    fresh = Divisions(facts, resolve("gpipe"), Placement.identity(4), 8)
    assert search_balance(fresh).balance == min(times).balance
    assert {(0, *accumulate(balance)) for balance in fresh.judged} <= {*apart}


def test_a_given_balance_may_not_part_a_buffer() -> None:
    facts = replace(network([layer()] * 6), shared_buffers=(SharedBuffer(1, 3),))
    message = (
        r"^--balance 3,3: layer 1 \(\w+\) and layer 3 \(\w+\) share a buffer .*; put layers 1 to 3"
    )
    with pytest.raises(UsageError, match=message):
        plan_order(facts, resolve("gpipe"), Placement.identity(2), 8, balance=(3, 3))
    for buffer, together in ((SharedBuffer(0, 3), "0 to 3"), (SharedBuffer(2, 5), "2 to 5")):
        ends = replace(facts, shared_buffers=(buffer,))
        with pytest.raises(UsageError, match=f"put layers {together} on one stage"):
            plan_order(ends, resolve("gpipe"), Placement.identity(2), 8, balance=(3, 3))
    with pytest.raises(UsageError, match=r"^--stages 5: more than the parts of model\(\), 4, that"):
        plan_order(facts, resolve("gpipe"), Placement.identity(5), 8)


def test_a_thousand_layers_over_64_stages_need_few_evaluations() -> None:
    layers = [layer(1 + n % 7 / 3, 2 + n % 11 / 5, output_bytes=n % 5) for n in range(1000)]
    facts = replace(network(layers), latency=0.01, seconds_per_byte=0.001)
    divisions = Divisions(facts, resolve("gpipe"), Placement.identity(64), 64)
    found = search_balance(divisions)
    usual = divisions.judge(even(1000, 64))
    slowest = max(divisions.costs.seconds(r).forward for r in ranges(found.balance))
    assert found.seconds < usual.seconds
    assert slowest < 1.1 * divisions.costs.forward[-1] / 64
    # The evaluations take most of the time: of a second, where 28,000 nodes take 4 ms.
    assert len(divisions.judged) <= 100


def test_a_balance_with_other_modes_makes_anew_the_actions_of_their_workers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    ends_of = StageEnds.of

    def counted(placement: Placement, stage: int, skips: Pairs, front: int) -> StageEnds:
        made.append(stage)
        return ends_of(placement, stage, skips, front)

    order, layers = resolve("zb-h1"), [layer(saved_bytes=100)] * 12
    peaks = Divisions(network(layers), order, order.place(6), 8).peaks((2,) * 6)
    facts = replace(network(layers), limits=peaks)
    divisions = Divisions(facts, order, order.place(6), 8)
    assert divisions.judge((2,) * 6).modes == ("never",) * 6
    monkeypatch.setattr(StageEnds, "of", staticmethod(counted))
    found = divisions.judge((1, 2, 3, 2, 2, 2))
    assert made == [stage for stage, mode in enumerate(found.modes) if mode != "never"] == [2]


def test_a_plan_must_fit_if_anything_of_it_is_chosen() -> None:
    facts = network([layer(parameter_bytes=100)] * 4, 150, 2)
    arguments = facts, resolve("gpipe"), Placement.identity(2), 4
    given: dict[str, Any] = {"balance": (2, 2), "recompute": ("never",) * 2}
    for name in given:
        with pytest.raises(UsageError, match="does not fit into the memory"):
            plan_order(*arguments, **{name: given[name]})
    assert "does not fit into the memory" in plan_order(*arguments, **given).lacking
    assert plan_order(*arguments, balance="even", strict=False).balance == (2, 2)


def test_the_reason_of_a_recompute_is_the_worker_that_lacks_the_most() -> None:
    facts = network([layer(saved_bytes=size) for size in (100, 10, 1000, 10)])
    arguments = resolve("gpipe"), Placement.identity(2), 4
    facts = replace(facts, limits=(200, 3900))  # 440 without a recompute, and 4040
    plan = plan_order(facts, *arguments, balance=(2, 2))
    assert set(plan.recompute) <= {"always", "except_first"}
    assert plan.why == ("recompute on stages 0 and 1: 440 B without, of 200 B",)


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [([3], "3"), ([0, 1], "0 and 1"), ([0, 1, 5], "0, 1 and 5"), ([2, 3, 4, 5], "2 to 5")],
)
def test_numbers_of_stages_are_listed(numbers: list[int], shown: str) -> None:
    assert listed(numbers) == shown
