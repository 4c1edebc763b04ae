"""Sends and receives around a compute order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.plan.actions import COMPUTE, RECEIVES, SENDS, parse_actions
from pipeworker.plan.check import LiveMicroBatches, check
from pipeworker.plan.connect import connect, forward_only, lags
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Pairs
from pipeworker.plan.simulate import simulate
from support.pure.orders import fill_drain

V = Placement(((0, 3), (1, 2)))


def connected(
    *orders: str,
    microbatches: int = 1,
    placement: Placement | None = None,
    skips: Pairs = (),
    ties: Pairs = (),
) -> list[str]:
    """Return the lines of the workers."""
    schedule = connect(
        "order",
        microbatches,
        placement or Placement.identity(len(orders)),
        [parse_actions(order) for order in orders],
        skips,
        ties,
    )
    return [line.partition(": ")[2] for line in str(schedule).splitlines()[1:]]


def test_a_send_follows_what_it_sends_and_a_receive_precedes_what_needs_it() -> None:
    assert connected("0F0 0B0", "1F0 1B0", "2F0 2B0") == [
        "0F0 0>A0 0>T0@2 0L0 0<G0 0B0",
        "1<A0 1F0 1>A0 1<G0 1B0 1>G0",
        "2<A0 2<T0@0 2F0 2B0 2>G0",
    ]


def test_recompute_fills_the_wait_for_the_gradient() -> None:
    assert connected("0F0 0R0 0B0", "1F0 1R0 1B0") == [
        "0F0 0>A0 0>T0@1 0L0 0R0 0<G0 0B0",
        "1<A0 1<T0@0 1F0 1R0 1B0 1>G0",
    ]


def test_the_input_gradient_is_sent_before_the_weight_gradients_are_computed() -> None:
    assert connected("0F0 0I0 0W0", "1F0 1I0 1W0") == [
        "0F0 0>A0 0>T0@1 0L0 0<G0 0I0 0W0",
        "1<A0 1<T0@0 1F0 1I0 1>G0 1W0",
    ]


def test_the_next_mini_batch_is_loaded_after_the_first_forwards() -> None:
    (line, _) = connected("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2", microbatches=3)
    assert line == (
        "0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0<G0 0B0 0F2 0>A2 0>T2@1 0<G1 0B1 0<G2 0B2"
    )
    assert connected("0F0") == ["0F0 0L0"]  # it is read, even where no backward is


def test_stages_of_one_worker_pass_tensors_in_memory() -> None:
    assert connected("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=V) == [
        "0F0 0>A0 3<A0 3F0 0L0 3B0 3>G0 0<G0 0B0",
        "1<A0 1F0 2F0 2>A0 2<G0 2B0 1B0 1>G0",
    ]
    alone = Placement(((0, 1, 2),))
    line = "0F0 1F0 2F0 0L0 2B0 1B0 0B0"
    assert connected(line.replace("0L0 ", ""), placement=alone, skips=((0, 2),)) == [line]


def test_skips_are_sent_directly_between_workers() -> None:
    """The skip 0>2 is sent; 0>3 begins and ends on one worker."""
    assert connected("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=V, skips=((0, 2), (0, 3))) == [
        "0F0 0>A0 0>S0@2 3<A0 3F0 0L0 3B0 3>G0 0<G0 0<H0@2 0B0",
        "1<A0 1F0 2<S0@0 2F0 2>A0 2<G0 2B0 2>H0@0 1B0 1>G0",
    ]


def test_tied_gradients_are_exchanged_and_added_at_the_end() -> None:
    """Stages 0, 1 and 3 share a weight, 0 and 3 on one worker: each sends to stage 1 once."""
    some = (0, 1, 3)
    ties = tuple((a, b) for a in some for b in some if a != b)
    first, second = connected("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0", placement=V, ties=ties)
    assert first.endswith(" 0B0 0>TIE0@1 3>TIE0@1 0<TIE0@1 3<TIE0@1 0TIE0 3TIE0")
    assert second.endswith(" 1>G0 1>TIE0@0 1>TIE0@3 1<TIE0@0 1<TIE0@3 1TIE0")


def test_a_weight_with_two_places_on_a_stage_is_added_up_there() -> None:
    assert connected("0F0 0B0", "1F0 1B0", ties=((1, 1),))[1].endswith(" 1B0 1>G0 1TIE0")


@st.composite
def dealt(draw: st.DrawFn) -> Placement:
    """Any stages on any workers."""
    workers = draw(st.integers(1, 4))
    more = draw(st.lists(st.integers(0, workers - 1), max_size=8))
    owners = draw(st.permutations([*range(workers), *more]))
    held = ((stage for stage, own in enumerate(owners) if own == w) for w in range(workers))
    return Placement(tuple(map(tuple, held)))


@given(dealt(), st.integers(1, 12))
def test_a_stream_of_forwards_is_free_of_deadlock(placement: Placement, microbatches: int) -> None:
    last = placement.stages - 1
    skips = ((0, last),) if last else ()
    check(forward_only(placement, skips, microbatches))
    behind = lags(placement)
    assert behind[0] == 0
    assert list(behind) == sorted(behind)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_workers_with_several_stages_stream_without_gaps(workers: int) -> None:
    """But for the fill, in which a stage waits for whole turns of the workers before it."""
    count = 64
    for placement in (
        Placement.identity(workers),
        Placement.looped(workers, 2),
        Placement.looped(workers, 3),
        Placement.v_shaped(workers),
    ):
        busy = count * len(placement.held[0])
        took = simulate(forward_only(placement, (), count)).makespan
        assert took <= busy + 2 * placement.stages


def test_each_stage_of_a_stream_runs_another_micro_batch() -> None:
    lines = str(forward_only(V, (), 3)).splitlines()[1:]
    assert lines == [
        "0: 0F0 0>A0 0F1 0>A1 0F2 0>A2 3<A0 3F0 3<A1 3F1 3<A2 3F2",
        "1: 1<A0 1F0 2F0 2>A0 1<A1 1F1 2F1 2>A1 1<A2 1F2 2F2 2>A2",
    ]


def test_a_forward_only_schedule() -> None:
    lines = str(forward_only(Placement.looped(2, 2), ((0, 3),))).splitlines()
    assert lines == [
        "evaluation stages=4 microbatches=1 placement=0,2/1,3 skips=0>3 forward-only",
        "0: 0F0 0>A0 0>T0@3 0>S0@3 2<A0 2F0 2>A0",
        "1: 1<A0 1F0 1>A0 3<A0 3<T0@0 3<S0@0 3F0",
    ]
    assert str(forward_only(V)).splitlines()[1:] == ["0: 0F0 0>A0 3<A0 3F0", "1: 1<A0 1F0 2F0 2>A0"]


@given(
    placement=st.sampled_from(
        [Placement.identity(1), Placement.identity(5), Placement.looped(2, 3), V]
    ),
    microbatches=st.integers(1, 4),
    recompute=st.sampled_from(["always", "except_first", "never"]),
)
def test_the_compute_order_is_not_changed(
    placement: Placement, microbatches: int, recompute: str
) -> None:
    orders = fill_drain(placement, microbatches, recompute)
    schedule = connect("same", microbatches, placement, orders)
    assert [[a for a in actions if a.kind in COMPUTE] for actions in schedule.workers] == orders
    counts = [
        sum(a.kind in ends for actions in schedule.workers for a in actions)
        for ends in (SENDS, RECEIVES)
    ]
    assert counts[0] == counts[1]
    check(schedule)


@given(placement=st.sampled_from([Placement.identity(3), Placement.looped(2, 3), V]))
def test_a_forward_only_schedule_holds_one_microbatch(placement: Placement) -> None:
    ones = (1,) * placement.stages
    assert check(forward_only(placement)) == LiveMicroBatches(ones, ones, (0,) * placement.stages)
