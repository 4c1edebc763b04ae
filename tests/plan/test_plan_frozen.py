"""Frozen stages: no weight parts, and no backward at the front of the network."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan import frozen
from pipeworker.plan.actions import COMPUTE, Kind, parse_actions
from pipeworker.plan.check import check
from pipeworker.plan.orders import ORDERS, resolve
from pipeworker.plan.recompute import RECOMPUTE_MODES
from pipeworker.plan.schedule import Schedule
from pipeworker.plan.simulate import Costs, simulate
from pipeworker.plan.text import parse


def built(name: str, workers: int, microbatches: int, still: tuple[int, ...]) -> Schedule:
    order = resolve(name)
    placement = order.place(workers)
    modes = ["never"] * placement.stages
    return order.build(placement, microbatches, modes, frozen=still)


def test_a_stage_is_frozen_if_all_of_its_layers_are() -> None:
    ranges = ((0, 2), (2, 3), (3, 6))
    assert frozen.stages([0, 1, 3, 4], ranges) == (0,)
    assert frozen.stages([0, 2, 3, 4, 5], ranges) == (1, 2)
    assert frozen.stages([], ranges) == ()


def test_the_last_stage_is_never_at_the_front() -> None:
    assert frozen.front((), 3) == 0
    assert frozen.front((1, 2), 3) == 0
    assert frozen.front((0, 2), 3) == 1
    assert frozen.front((0, 1, 2), 3) == 2
    assert frozen.front((0,), 1) == 0


def test_backwards_that_a_frozen_stage_does_not_have_are_left_out() -> None:
    order = parse_actions("0F0 1F0 2F0 2R0 2I0 1I0 0R0 0I0 2W0 1W0 0W0")
    kept = frozen.without_backwards(order, (0, 2), 3)
    assert kept == list(parse_actions("0F0 1F0 2F0 2R0 2B0 1I0 1W0"))


def test_the_text_names_frozen_stages() -> None:
    schedule = built("gpipe", 3, 2, (0, 2))
    assert str(schedule).splitlines() == [
        "gpipe stages=3 microbatches=2 frozen=0,2",
        "0: 0F0 0>A0 0>T0@2 0F1 0>A1 0>T1@2 0L0",
        "1: 1<A0 1F0 1>A0 1<A1 1F1 1>A1 1<G0 1B0 1<G1 1B1",
        "2: 2<A0 2<T0@0 2F0 2<A1 2<T1@0 2F1 2B0 2>G0 2B1 2>G1",
    ]
    assert parse(str(schedule)) == schedule
    assert schedule.front == 1


@given(
    name=st.sampled_from(sorted(ORDERS)),
    workers=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    mode=st.sampled_from(RECOMPUTE_MODES),
    drawn=st.sets(st.integers(0, 9)),
    replicas=st.integers(1, 2),
)
def test_every_order_runs_with_any_frozen_stages(
    name: str, workers: int, microbatches: int, mode: str, drawn: set[int], replicas: int
) -> None:
    """With skips from the first stage and from the one before the last."""
    order = resolve(name)
    placement = order.place(workers, replicas)
    last = placement.stages - 1
    still = tuple(sorted(drawn & {*range(placement.stages)}))
    skips = tuple({(0, last), (max(0, last - 1), last)}) if last else ()
    schedule = order.build(
        placement, microbatches, [mode] * placement.stages, skips, (), frozen=still
    )
    live = check(schedule)
    first = schedule.front
    for stage in range(first):
        assert (live.activations[stage], live.inputs[stage], live.deferred[stage]) == (1, 1, 0)
    for action in (a for actions in schedule.workers for a in actions):
        assert action.stage >= first or action.kind not in (COMPUTE - {Kind.FORWARD})
        assert action.stage not in still or action.kind is not Kind.BACKWARD_WEIGHT


def test_a_frozen_front_costs_its_forwards_alone() -> None:
    """And a frozen stage behind it the gradient of its input, whatever the costs say."""
    costs = Costs.even(3, 1, 2)
    busy = simulate(built("zb-h1", 3, 4, (0,)), costs).busy
    assert busy == (4.0, 12.0, 12.0)
    assert simulate(built("zb-h1", 3, 4, (1,)), costs).busy == (12.0, 8.0, 12.0)
    assert simulate(built("gpipe", 3, 4, (0, 1)), costs).makespan == 2 + 4 + 4 * 2


@pytest.mark.parametrize(
    ("worker", "more", "message"),
    [
        (0, "0B0", "worker 0: 0B0: the frozen stages at the front have no backward"),
        (1, "1>G0", "worker 1: 1>G0 has nothing at its other end"),
    ],
)
def test_the_front_has_no_backward(worker: int, more: str, message: str) -> None:
    schedule = built("gpipe", 2, 1, (0,))
    (extra,) = parse_actions(more)
    workers = list(schedule.workers)
    workers[worker] = (*workers[worker], extra)
    with pytest.raises(ScheduleError, match=message):
        check(replace(schedule, workers=tuple(workers)))


def test_a_backward_is_missing_where_nothing_is_frozen() -> None:
    schedule = built("gpipe", 2, 1, (0,))
    with pytest.raises(ScheduleError, match=r"1>G0 is missing|0<G0 is missing|0B0 is missing"):
        check(replace(schedule, frozen=()))


@pytest.mark.parametrize("still", [(2,), (1, 0), (-1,), (0, 0)])
def test_frozen_stages_are_of_the_stages(still: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="are not of the stages, ascending"):
        check(replace(built("gpipe", 2, 1, ()), frozen=still))
