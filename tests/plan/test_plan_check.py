"""What the checker shows of good schedules, and that it refuses broken ones."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import RECEIVES, SENDS, Action, Kind, edge_of, parse_actions
from pipeworker.plan.check import Kept, check
from pipeworker.plan.connect import connect, forward_only
from pipeworker.plan.network import CHANNEL_CAPACITY, UNBOUNDED
from pipeworker.plan.orders import build
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Pairs, Schedule, parse, recomputed
from pipeworker.plan.simulate import simulate

GRID = [(k, m) for k in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 16, 32)]
"""Stages and micro-batches, fewer micro-batches than stages included."""
V = Placement(((0, 3), (1, 2)))

# What is kept.


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_gpipe_keeps_every_microbatch(stages: int, microbatches: int) -> None:
    everywhere = (microbatches,) * stages
    never = check(build("gpipe", stages, microbatches, "never"))
    assert never == Kept(everywhere, everywhere, (0,) * stages)
    always = check(build("gpipe", stages, microbatches, "always"))
    assert always == Kept((1,) * stages, everywhere, (0,) * stages)


def test_except_first_keeps_the_first_and_one_more_only_in_turn() -> None:
    """The first micro-batch's activations are kept from its forward to its backward."""
    assert check(build("gpipe", 2, 4, "except_first")).activations == (1, 1)


def test_what_is_kept_follows_the_order() -> None:
    """One forward, one backward on the last stage: it keeps one micro-batch, the first two."""
    one_forward_one_backward = """
        1f1b stages=2 microbatches=3
        0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0<G0 0B0 0F2 0>A2 0>T2@1 0<G1 0B1 0<G2 0B2
        1: 1<A0 1<T0@0 1F0 1B0 1>G0 1<A1 1<T1@0 1F1 1B1 1>G1 1<A2 1<T2@0 1F2 1B2 1>G2
    """
    assert check(parse(one_forward_one_backward)) == Kept((2, 1), (2, 1), (0, 0))


# Broken ones.

GOOD = """
    good stages=3 microbatches=2
    0: 0F0 0>A0 0>T0@2 0F1 0>A1 0>T1@2 0L0 0R0 0<G0 0B0 0R1 0<G1 0B1
    1: 1<A0 1F0 1>A0 1<A1 1F1 1>A1 1R0 1<G0 1B0 1>G0 1R1 1<G1 1B1 1>G1
    2: 2<A0 2<T0@0 2F0 2<A1 2<T1@0 2F1 2R0 2B0 2>G0 2R1 2B1 2>G1
"""
HALVES = """
    halves stages=2 microbatches=2
    0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0<G0 0I0 0W0 0<G1 0B1
    1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1R0 1I0 1>G0 1I1 1>G1 1W0 1W1
"""
VEE = """
    vee stages=4 microbatches=2 placement=0,3/1,2
    0: 0F0 0>A0 0F1 0>A1 3<A0 3F0 3<A1 3F1 0L0 3B0 3>G0 3B1 3>G1 0<G0 0B0 0<G1 0B1
    1: 1<A0 1F0 2F0 2>A0 1<A1 1F1 2F1 2>A1 2<G0 2B0 1B0 1>G0 2<G1 2B1 1B1 1>G1
"""
LOOPED = """
    looped stages=4 microbatches=2 placement=0,2/1,3 skips=0>2,0>3 ties=0>2,2>0,2>3,3>2
    0: 0F0 0>A0 0>T0@3 0>S0@3 0F1 0>A1 0>T1@3 0>S1@3 2<A0 2F0 2>A0 2<A1 2F1 2>A1 0L0 \
       2<G0 2B0 2>G0 2<G1 2B1 2>G1 0<G0 0<H0@3 0B0 0<G1 0<H1@3 0B1 2>TIE0@3 2<TIE0@3 0TIE0 2TIE0
    1: 1<A0 1F0 1>A0 1<A1 1F1 1>A1 3<A0 3<T0@0 3<S0@0 3F0 3<A1 3<T1@0 3<S1@0 3F1 \
       3B0 3>G0 3>H0@0 3B1 3>G1 3>H1@0 1<G0 1B0 1>G0 1<G1 1B1 1>G1 3>TIE0@2 3<TIE0@2 3TIE0
"""
ONLY = """
    only stages=2 microbatches=1 forward-only
    0: 0F0 0>A0 0>T0@1
    1: 1<A0 1<T0@0 1F0
"""


def broken(good: str, worker: int, before: str, after: str) -> Schedule:
    """A good one with a passage of one worker replaced."""
    head, *lines = good.strip().splitlines()
    assert lines[worker].count(before) == 1
    lines[worker] = lines[worker].replace(before, after)
    return parse("\n".join([head, *lines]))


@pytest.mark.parametrize(
    ("good", "kept"),
    [
        (GOOD, Kept((1, 1, 1), (2, 2, 2), (0, 0, 0))),
        (HALVES, Kept((2, 2), (2, 2), (1, 2))),
        (VEE, Kept((2, 2, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0))),
        (LOOPED, Kept((2, 2, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0))),
        (ONLY, Kept((1, 1), (1, 1), (0, 0))),
    ],
    ids=["good", "halves", "vee", "looped", "only"],
)
def test_the_schedules_that_are_broken_below_are_good(good: str, kept: Kept) -> None:
    assert check(parse(good)) == kept


@pytest.mark.parametrize(
    ("worker", "before", "after", "why"),
    [
        # something is missing
        (0, " 0F1 0>A1 0>T1@2", "", "worker 0: 0R1 comes before its 0F1"),
        (0, " 0>A1", "", "worker 0: 0>A1 is missing"),
        (0, " 0>T1@2", "", "worker 0: 0>T1@2 is missing"),
        (0, " 0L0", "", "worker 0: 0L0 is missing"),
        (1, " 1>G1", "", "worker 1: 1>G1 is missing"),
        (2, " 2R1 2B1 2>G1", "", "worker 2: 2>G1 is missing|worker 2: 2B1 is missing"),
        # something is there twice
        (1, "1F0", "1F0 1F0", "worker 1: 1F0 appears twice"),
        (2, "2>G0", "2>G0 2>G0", "worker 2: 2>G0 appears twice"),
        (0, "0L0", "0L0 0L0", "worker 0: 0L0 appears twice"),
        # something comes before what it needs
        (1, "1<A0 1F0", "1F0 1<A0", "worker 1: 1F0 comes before its 1<A0"),
        (2, "2<T0@0 2F0", "2F0 2<T0@0", "worker 2: 2F0 comes before its 2<T0@0"),
        (1, "1F0 1>A0", "1>A0 1F0", "worker 1: 1>A0 comes before its 1F0"),
        (1, "1<G0 1B0", "1B0 1<G0", "worker 1: 1B0 comes before its 1<G0"),
        (1, "1R0 1<G0 1B0", "1<G0 1B0 1R0", "worker 1: 1B0 comes before its 1R0"),
        (1, "1B0 1>G0", "1>G0 1B0", "worker 1: 1>G0 comes before its 1B0"),
        (2, "2F1 2R0", "2R1 2F1 2R0", "worker 2: 2R1 (comes before its 2F1|appears twice)"),
        # gradients would accumulate in another order
        (
            *(2, "2R0 2B0 2>G0 2R1 2B1 2>G1", "2R1 2B1 2>G1 2R0 2B0 2>G0"),
            "worker 2: 2B1 is out of order; .* so that of micro-batch 0 comes first",
        ),
        # what a channel's ends disagree on
        (
            *(1, "1<A0 1F0 1>A0 1<A1 1F1 1>A1", "1<A1 1F1 1>A1 1<A0 1F0 1>A0"),
            "0>1/activation: sent in order",
        ),
        (
            *(2, "2<A0 2<T0@0 2F0 2<A1 2<T1@0 2F1", "2<A0 2<T1@0 2<T0@0 2F0 2<A1 2F1"),
            "0>2/target: sent in order",
        ),
        # what is in the wrong place
        (1, "1R0 1<G0", "1L0 1R0 1<G0", "worker 1: 1L0: only stage 0 reads data"),
        (0, "0L0", "0L0 0L1", "worker 0: 0L1: a step has one, of 0"),
        (2, "2F0", "2F2", "worker 2: 2F2 is not one of the micro-batches"),
        (2, "2R0 2B0", "2>A0 2R0 2B0", "worker 2: 2>A0 has nothing at its other end"),
        (0, "0R0 0<G0 0B0", "0R0 0<G0 0B0 0>G0", "worker 0: 0>G0 has nothing at its other end"),
        (0, "0>A0 0>T0@2", "0>A0 0>T0@2 0>T0@1", "0>T0@1 has nothing at its other end"),
        (0, "0F0 0>A0", "1F0 0F0 0>A0", "worker 0: 1F0 is of a stage it does not hold"),
        (0, "0F0 0>A0", "0F0 0>A0 7B0", "worker 0: 7B0 is of a stage it does not hold"),
    ],
)
def test_a_broken_schedule_is_refused(worker: int, before: str, after: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(broken(GOOD, worker, before, after))


@pytest.mark.parametrize(
    ("worker", "before", "after", "why"),
    [
        (0, " 0W0", "", "worker 0: 0W0 is missing"),
        (0, "0I0 0W0", "0W0", "worker 0: 0W0 comes before its 0I0"),
        (0, "0I0 0W0", "0W0 0I0", "worker 0: 0W0 comes before its 0I0"),
        (0, "0I0 0W0", "0B0 0W0", "worker 0: 0W0 comes before its 0I0"),
        (0, "0I0 0W0", "0B0 0I0 0W0", "worker 0: (0I0 comes beside|0W0 .* out of order)"),
        (1, "1W0 1W1", "1W1 1W0", "worker 1: 1W1 is out of order; gradients accumulate in micro"),
        (0, "0W0 0<G1 0B1", "0<G1 0B1 0W0", "worker 0: 0B1 is out of order"),
        (1, "1R0 1I0", "1I0 1R0", "worker 1: 1I0 comes before its 1R0"),
        (1, "1I0 1>G0", "1>G0 1I0", "worker 1: 1>G0 comes before its 1B0"),
        (0, "0<G0 0I0", "0I0 0<G0", "worker 0: 0I0 comes before its 0<G0"),
        (0, " 0I0 0W0", "", "worker 0: 0B0 is missing"),
    ],
)
def test_a_backward_in_halves_has_both_in_order(
    worker: int, before: str, after: str, why: str
) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(broken(HALVES, worker, before, after))


def test_the_first_halves_need_no_order_of_their_own() -> None:
    """Only what accumulates does."""
    made = parse(
        """
        any stages=2 microbatches=2
        0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0<G1 0I1 0<G0 0I0 0W0 0W1
        1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1I1 1>G1 1I0 1>G0 1W0 1W1
        """
    )
    assert check(made).deferred == (2, 2)


@pytest.mark.parametrize(
    ("worker", "before", "after", "why"),
    [
        # what is handed over in memory
        (1, "1F0 2F0", "2F0 1F0", "worker 1: 2F0 comes before its 1F0"),
        (1, "2B1 1B1", "1B1 2B1", "worker 1: 1B1 comes before its 2B1"),
        (1, "1F0 2F0", "1F0 1>A0 2F0", "worker 1: 1>A0 has nothing at its other end"),
        (1, "2B0 1B0", "2B0 1<G0 1B0", "worker 1: 1<G0 has nothing at its other end"),
        (0, "0F0 0>A0", "0F0 0>T0@3 0>A0", "worker 0: 0>T0@3 has nothing at its other end"),
        (0, "0<G0 0B0", "0<G0", "worker 0: 0B0 is missing"),
        (1, "2B0 1B0", "1B0", "worker 1: 1B0 comes before its 2B0"),
        # stages it does not hold
        (0, "3<A0 3F0", "3<A0 2F0 3F0", "worker 0: 2F0 is of a stage it does not hold"),
        (1, "1F1 2F1", "1F1 2F1 0F1", "worker 1: 0F1 is of a stage it does not hold"),
        (1, "2>A1", "2>A1 4F0", "worker 1: 4F0 is of a stage it does not hold"),
        # what is not of the step
        (1, "2B0 1B0", "2B0 2B7 1B0", "worker 1: 2B7 is not one of the micro-batches"),
        (0, "0F0 0>A0", "3F7 0F0 0>A0", "worker 0: 3F7 is not one of the micro-batches"),
        # deadlocks
        (
            *(0, "0F0 0>A0 0F1 0>A1 3<A0 3F0", "3<A0 0F0 0>A0 0F1 0>A1 3F0"),
            "deadlocks with 4 frames: worker 0 at 3<A0; worker 1 at 1<A0",
        ),
        (
            *(1, "2>A1 2<G0 2B0 1B0 1>G0", "2<G0 2B0 1B0 1>G0 2>A1"),
            "deadlocks .*: worker 0 at 3<A1; worker 1 at 2<G0",
        ),
    ],
)
def test_several_stages_a_worker_keep_the_laws(
    worker: int, before: str, after: str, why: str
) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(broken(VEE, worker, before, after))


@pytest.mark.parametrize(
    ("worker", "before", "after", "why"),
    [
        (0, " 0TIE0", "", "worker 0: 0TIE0 is missing"),
        (1, " 3TIE0", "", "worker 1: 3TIE0 is missing"),
        (0, " 2>TIE0@3", "", "worker 0: 2>TIE0@3 is missing"),
        (0, "2<TIE0@3 0TIE0 2TIE0", "0TIE0 2TIE0 2<TIE0@3", "2TIE0 comes before its 2<TIE0@3"),
        (0, "0B1 2>TIE0@3 2<TIE0@3 0TIE0", "0TIE0 0B1 2>TIE0@3 2<TIE0@3", "0TIE0 comes before"),
        (1, "3B1 3>G1", "3>TIE0@2 3B1 3>G1", "3>TIE0@2 (comes before the last|appears twice)"),
        (1, "3TIE0", "3TIE0 3TIE0", "worker 1: 3TIE0 appears twice"),
        (1, "3TIE0", "3TIE0 3TIE1", "worker 1: 3TIE1 comes before its 3<TIE1@2"),
        (0, "0TIE0", "0TIE0 0TIE1", "worker 0: 0TIE1: a step has one, of 0"),
        (0, "0TIE0", "0TIE1", "worker 0: 0TIE1: a step has one, of 0"),
        (1, "3>TIE0@2", "3>TIE0@2 3>TIE1@2", "worker 1: 3>TIE1@2: a step has one, of 0"),
        (1, "3TIE0", "3TIE0 1TIE0", "worker 1: 1TIE0 has nothing at its other end"),
        (0, "0TIE0", "0>TIE0@2 0TIE0", "worker 0: 0>TIE0@2 has nothing at its other end"),
        (0, " 0>S1@3", "", "worker 0: 0>S1@3 is missing"),
        (1, " 3>H1@0", "", "worker 1: 3>H1@0 is missing"),
        (1, "3<S0@0 3F0", "3F0 3<S0@0", "worker 1: 3F0 comes before its 3<S0@0"),
        (0, "0<H0@3 0B0", "0B0 0<H0@3", "worker 0: 0B0 comes before its 0<H0@3"),
        (0, "0F0 0>A0", "0F0 0>S0@2 0>A0", "worker 0: 0>S0@2 has nothing at its other end"),
        (0, "0L0", "0L1", "worker 0: 0L1: a step has one, of 0"),
    ],
)
def test_skips_and_ties_keep_the_laws(worker: int, before: str, after: str, why: str) -> None:
    """0 and 2 are on one worker: what they tie and skip is handed over, not sent."""
    with pytest.raises(ScheduleError, match=why):
        check(broken(LOOPED, worker, before, after))


def test_the_sum_waits_for_the_last_backward_of_a_neighbour_in_memory() -> None:
    """2TIE0 needs the gradients of stage 0, which is on its worker."""
    early = broken(
        *(LOOPED, 0),
        *("0B1 2>TIE0@3 2<TIE0@3 0TIE0 2TIE0", "2>TIE0@3 2<TIE0@3 2TIE0 0B1 0TIE0"),
    )
    with pytest.raises(ScheduleError, match="2TIE0 comes before the last backward"):
        check(early)
    sent = broken(LOOPED, 0, "0B1 2>TIE0@3 2<TIE0@3", "2>TIE0@3 2<TIE0@3 0B1")
    check(sent)  # the other worker is told of stage 2 alone


def test_halves_end_before_ties_are_told() -> None:
    ties = ((0, 1), (1, 0))
    good = connect(
        "halves", 1, Placement.identity(2), [parse_actions("0F0 0I0 0W0"), parse_actions("1F0 1B0")]
    )
    assert good.workers[0][-1] == Action(Kind.BACKWARD_WEIGHT, 0, 0)
    one = (*parse_actions("0>TIE0@1"), *parse_actions("0<TIE0@1 0TIE0"))
    other = (*good.workers[1], *parse_actions("1>TIE0@0 1<TIE0@0 1TIE0"))
    check(replace(good, workers=((*good.workers[0], *one), other), ties=ties))
    early = (*good.workers[0][:-1], *one, good.workers[0][-1])
    with pytest.raises(ScheduleError, match="0>TIE0@1 comes before the last backward"):
        check(replace(good, workers=(early, other), ties=ties))


@pytest.mark.parametrize(
    ("skips", "ties", "why"),
    [
        (((2, 0),), (), "skip 2>0 does not lead to a later stage"),
        (((1, 1),), (), "skip 1>1 does not lead to a later stage"),
        (((0, 4),), (), "skip 0>4 does not lead to a later stage"),
        ((), ((0, 2),), "tie 0>2 has no 2>0"),
        ((), ((0, 4), (4, 0)), "tie 4>0 is not of the stages"),
    ],
)
def test_skips_and_ties_are_of_stages_that_are_there(skips: Pairs, ties: Pairs, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(replace(parse(GOOD), skips=skips, ties=ties))


@pytest.mark.parametrize(
    ("worker", "before", "after", "why"),
    [
        (0, " 0>T0@1", "", "0>T0@1 is missing"),
        (0, "0>A0", "0>A0 0L0", "0L0"),
        (1, "1F0", "1F0 1B0", "1B0 has nothing at its other end"),
        (1, "1F0", "1F0 1R0", "1R0 has nothing at its other end"),
        (1, "1F0", "1F0 1>G0", "1>G0 .*"),
    ],
)
def test_a_pass_without_backward_has_none(worker: int, before: str, after: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(broken(ONLY, worker, before, after))


# Deadlocks.


def test_two_workers_that_wait_for_each_other_are_refused() -> None:
    """Worker 0 wants a gradient before it sends what that gradient needs."""
    stuck = """
        stuck stages=2 microbatches=2
        0: 0F0 0>A0 0>T0@1 0F1 0L0 0<G0 0B0 0>A1 0>T1@1 0<G1 0B1
        1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1B0 1>G0 1B1 1>G1
    """
    with pytest.raises(ScheduleError, match=r"deadlocks .*worker 0 at 0<G0; worker 1 at 1<A1"):
        check(parse(stuck))


def eager(window: int) -> Schedule:
    """Stage 0 sends `window` activations while stage 1 sends it gradients it does not take yet."""
    fill = " ".join(f"0F{m} 0>A{m} 0>T{m}@1" for m in range(window))
    drain = " ".join(f"0<G{m} 0B{m}" for m in range(window))
    last = " ".join(f"1<A{m} 1<T{m}@0 1F{m} 1B{m} 1>G{m}" for m in range(window))
    return parse(f"eager stages=2 microbatches={window}\n0: {fill} 0L0 {drain}\n1: {last}")


def test_whether_a_schedule_deadlocks_depends_on_the_capacity() -> None:
    """All forwards against one-forward-one-backward: gradients pile up while 0 still sends."""
    assert check(eager(8), capacity=8).inputs == (8, 1)
    with pytest.raises(ScheduleError, match=r"deadlocks with 3 frames: worker 0 at 0>A7; .*>G3"):
        check(eager(8), capacity=3)
    assert CHANNEL_CAPACITY == 4
    check(eager(9))
    with pytest.raises(ScheduleError, match="deadlocks with 4 frames"):
        check(eager(10))


@given(
    stages=st.integers(1, 7),
    microbatches=st.integers(1, 7),
    mode=st.sampled_from(["always", "except_first", "never"]),
    capacity=st.integers(1, 5),
)
def test_gpipe_runs_under_any_capacity(
    stages: int, microbatches: int, mode: str, capacity: int
) -> None:
    check(build("gpipe", stages, microbatches, mode), capacity=capacity)


def test_gpipe_with_several_stages_a_worker_runs_while_channels_hold_it() -> None:
    """Worker 0 sends all of stage 0 before it takes what comes back: not for any number."""
    looped, longest = Placement.looped(2, 2), 2 * CHANNEL_CAPACITY + 1
    check(connect("long", longest, looped, gpipe(looped, longest, ())))
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(connect("longer", longest + 1, looped, gpipe(looped, longest + 1, ())))
    check(connect("vee", 99, V, gpipe(V, 99, ())))  # worker 1 turns round when it has all


def test_a_compute_order_out_of_order_is_refused_after_connection() -> None:
    place = Placement.identity(2)
    orders = gpipe(place, 3, recomputed("never", 3))
    check(connect("same", 3, place, orders))
    orders[1][0], orders[1][1] = orders[1][1], orders[1][0]
    with pytest.raises(ScheduleError, match="sent in order"):
        check(connect("crossed", 3, place, orders))


# The fast checker against a slow one, which looks at one action after the other.


class Illegal(Exception):
    """Why the slow checker refuses."""


def law(holds: bool, why: str) -> None:
    if not holds:
        raise Illegal(why)


@dataclass
class Slow:
    """One worker, one action at a time."""

    schedule: Schedule
    worker: int

    def __post_init__(self) -> None:
        self.place = self.schedule.placement
        self.last = self.place.stages - 1
        self.actions = self.schedule.workers[self.worker]
        self.done: set[Action] = set()
        self.most = {(what, s): 0 for what in KEPT for s in range(self.place.stages)}

    def here(self, stage: int) -> bool:
        return stage in self.place.held[self.worker]

    def possible(self) -> set[Action]:
        """All that may be in the tuple."""
        found = set()
        s = self.schedule
        for stage in self.place.held[self.worker]:
            for m in range(s.microbatches):
                kinds = "F" if s.forward_only else "FRBIW"
                found |= {Action(Kind(kind), stage, m) for kind in kinds}
                found |= self.sent_and_received(stage, m)
            if stage == 0 and not s.forward_only:
                found.add(Action(Kind.LOAD, 0, 0))
            for a, peer in s.ties:
                if a == stage:
                    found.add(Action(Kind.REDUCE_TIED, stage, 0))
                    if not self.here(peer):
                        found.add(Action(Kind.SEND_TIED, stage, 0, peer))
                        found.add(Action(Kind.RECEIVE_TIED, stage, 0, peer))
        return found

    def sent_and_received(self, stage: int, m: int) -> set[Action]:
        s, last = self.schedule, self.last
        found = []
        if stage > 0 and not self.here(stage - 1):
            found += [("<A", -1), (">G", -1)]
        if stage < last and not self.here(stage + 1):
            found += [(">A", -1), ("<G", -1)]
        if stage == 0 and not self.here(last):
            found.append((">T", last))
        if stage == last and not self.here(0):
            found.append(("<T", 0))
        for a, b in s.skips:
            if a == stage and not self.here(b):
                found += [(">S", b), ("<H", b)]
            if b == stage and not self.here(a):
                found += [("<S", a), (">H", a)]
        gradients = "GH" if s.forward_only else ""
        return {Action(Kind(k), stage, m, p) for k, p in found if k[1] not in gradients}

    def run(self) -> None:
        possible = self.possible()
        for action in self.actions:
            law(action in possible, f"{action} is not of worker {self.worker}")
            law(action not in self.done, f"{action} is done")
            self.needs(action)
            self.done.add(action)
            self.keep(action)
        for action in possible:
            if action.kind in "BIW":
                _, stage, m, _ = action
                halves = self.did("I", stage, m), self.did("W", stage, m)
                law(halves[0] == halves[1], f"{action}: half a backward")
                law(self.did("B", stage, m) is not halves[0], f"{action}: not once")
            elif action.kind is not Kind.RECOMPUTE:
                law(action in self.done, f"{action} is missing")

    def did(self, kind: str, stage: int, m: int, peer: int = -1) -> bool:
        return Action(Kind(kind), stage, m, peer) in self.done

    def gave_gradient(self, stage: int, m: int) -> bool:
        return self.did("B", stage, m) or self.did("I", stage, m)

    def accumulated(self, stage: int) -> int:
        return sum(a.stage == stage and a.kind in ("B", "W") for a in self.done)

    def needs(self, action: Action) -> None:
        kind, stage, m, _ = action
        skips, ties = self.schedule.skips, self.schedule.ties
        needed: list[tuple[str, bool]] = []
        match kind.value:
            case "F":
                if stage > 0 and self.here(stage - 1):
                    needed.append(("input", self.did("F", stage - 1, m)))
                elif stage > 0:
                    needed.append(("input", self.did("<A", stage, m)))
                if stage == self.last:
                    there = self.did("F", 0, m) if stage else True
                    needed.append(
                        ("target", there if self.here(0) else self.did("<T", stage, m, 0))
                    )
                for a, b in skips:
                    if b == stage:
                        arrived = self.did("<S", stage, m, a)
                        needed.append(("skip", self.did("F", a, m) if self.here(a) else arrived))
            case "R" | ">A" | ">T" | ">S":
                needed.append(("forward", self.did("F", stage, m)))
            case "B" | "I":
                needed.append(("forward", self.did("F", stage, m)))
                if Action(Kind.RECOMPUTE, stage, m) in self.actions:
                    needed.append(("recompute", self.did("R", stage, m)))
                if stage < self.last:
                    arrived = self.did("<G", stage, m)
                    local = self.gave_gradient(stage + 1, m)
                    needed.append(("gradient", local if self.here(stage + 1) else arrived))
                for a, b in skips:
                    if a == stage:
                        arrived = self.did("<H", stage, m, b)
                        local = self.gave_gradient(b, m)
                        needed.append(("skip gradient", local if self.here(b) else arrived))
            case ">G" | ">H":
                needed.append(("backward", self.gave_gradient(stage, m)))
            case ">TIE":
                needed.append(("all backwards", self.accumulated(stage) == self.count))
            case "TIE":
                needed.append(("all backwards", self.accumulated(stage) == self.count))
                for a, b in ties:
                    if a == stage and self.here(b):
                        needed.append(("all its backwards", self.accumulated(b) == self.count))
                    elif a == stage:
                        needed.append(("what it tells", self.did("<TIE", stage, 0, b)))
        if kind.value == "W":
            needed.append(("the first half", self.did("I", stage, m)))
        if kind.value in ("B", "W"):
            needed.append(("its turn", self.accumulated(stage) == m))
        for what, holds in needed:
            law(holds, f"{action} comes before {what}")

    @property
    def count(self) -> int:
        return self.schedule.microbatches

    def keep(self, action: Action) -> None:
        """Count what is kept now; the action that ends with something still has it."""
        stage = action.stage
        counts: Counter[str] = Counter()
        for m in range(self.count):
            over = {Action(kind, stage, m) for kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)}
            if over & self.done and action not in over:
                continue
            again = Action(Kind.RECOMPUTE, stage, m) in self.actions
            counts["inputs"] += self.did("F", stage, m)
            counts["activations"] += self.did("R" if again else "F", stage, m)
            counts["deferred"] += self.did("I", stage, m)
        for what in KEPT:
            self.most[what, stage] = max(self.most[what, stage], counts[what])


KEPT = ("activations", "inputs", "deferred")


def slowly(schedule: Schedule, capacity: int) -> Kept:
    """As `check`, from its laws, one at a time; raises Illegal."""
    stages = schedule.placement.stages
    for a, b in schedule.skips:
        law(0 <= a < b < stages, "a skip leads back")
    for a, b in schedule.ties:
        law((b, a) in schedule.ties and 0 <= a < stages, "a tie has one direction")
    workers = [Slow(schedule, worker) for worker in range(len(schedule.workers))]
    for worker in workers:
        worker.run()
    play(schedule, capacity)
    owners = schedule.placement.owners
    activations, inputs, deferred = (
        tuple(workers[owners[s]].most[what, s] for s in range(stages)) for what in KEPT
    )
    return Kept(activations, inputs, deferred)


def play(schedule: Schedule, capacity: int) -> None:
    """Workers take turns until nobody can go on; frames say which micro-batch they are."""
    frames: dict[object, deque[int]] = {}
    at = [0] * len(schedule.workers)
    went = True
    while went:
        went = False
        for worker, actions in enumerate(schedule.workers):
            while at[worker] < len(actions):
                action = actions[at[worker]]
                if action.kind in SENDS or action.kind in RECEIVES:
                    edge = edge_of(action)
                    queue = frames.setdefault(edge, deque())
                    if action.kind in SENDS:
                        if len(queue) >= capacity and edge.payload not in UNBOUNDED:
                            break
                        queue.append(action.microbatch)
                    elif not queue:
                        break
                    else:
                        law(queue.popleft() == action.microbatch, f"{action} takes another's")
                at[worker] += 1
                went = True
    law(all(a == len(acts) for a, acts in zip(at, schedule.workers, strict=True)), "deadlock")
    law(not any(frames.values()), "something is never received")


PLACEMENTS = [
    *(Placement.identity(stages) for stages in (1, 2, 3, 4)),
    *(Placement.looped(2, 2), Placement.looped(3, 2), V, Placement(((0, 1), (2,)))),
    *(Placement(((1,), (0,))), Placement(((0, 2), (1,))), Placement(((0, 1, 2),))),
]


def any_order(
    placement: Placement,
    microbatches: int,
    again: Callable[[int, int], bool],
    halves: Callable[[int, int], bool],
    chance: random.Random,
) -> list[list[Action]]:
    """A compute order in which everything comes after what it needs, by chance."""
    first = list(range(microbatches))
    chance.shuffle(first)
    last = placement.stages - 1
    needs: dict[Action, list[Action]] = {}

    def gradient(s: int, m: int) -> Action:
        return Action(Kind.BACKWARD_INPUT if halves(s, m) else Kind.BACKWARD, s, m)

    def weights(s: int, m: int) -> Action:
        return Action(Kind.BACKWARD_WEIGHT if halves(s, m) else Kind.BACKWARD, s, m)

    for s in range(placement.stages):
        for index, m in enumerate(first):
            forward = Action(Kind.FORWARD, s, m)
            needs[forward] = [Action(Kind.FORWARD, s, first[index - 1])] if index else []
            needs[forward] += [Action(Kind.FORWARD, s - 1, m)] if s else []
            back = [forward, *([gradient(s + 1, m)] if s < last else [])]
            before = [weights(s, m - 1)] if m else []
            if again(s, m):
                needs[Action(Kind.RECOMPUTE, s, m)] = [forward]
                back.append(Action(Kind.RECOMPUTE, s, m))
            if halves(s, m):
                needs[weights(s, m)] = [gradient(s, m), *before]
                before = []
            needs[gradient(s, m)] = [*back, *before, *([gradient(s, m - 1)] if m else [])]
    orders: list[list[Action]] = [[] for _ in placement.held]
    done: set[Action] = set()
    while len(done) < len(needs):
        ready = sorted(a for a in needs if a not in done and done.issuperset(needs[a]))
        action = chance.choice(ready)
        done.add(action)
        orders[placement.owners[action.stage]].append(action)
    return orders


def any_schedule(chance: random.Random) -> Schedule:
    """A legal schedule, if channels hold enough."""
    placement = chance.choice(PLACEMENTS)
    stages, microbatches = placement.stages, chance.randint(1, 4)
    later = [(a, b) for b in range(stages) for a in range(b)]
    skips = tuple(sorted(pair for pair in later if chance.random() < 0.25))
    if chance.random() < 0.1:
        return forward_only(placement, skips)
    tied = [pair for pair in later if chance.random() < 0.25]
    tied += [(s, s) for s in range(stages) if chance.random() < 0.1]
    ties = tuple(sorted({*tied, *((b, a) for a, b in tied)}))
    share, split = chance.choice([0, 0.5, 1]), chance.choice([0, 0.5, 1])
    every = [(s, m) for s in range(stages) for m in range(microbatches)]
    again = {at for at in every if chance.random() < share}
    halves = {at for at in every if chance.random() < split}
    orders = any_order(
        placement,
        microbatches,
        lambda s, m: (s, m) in again,
        lambda s, m: (s, m) in halves,
        chance,
    )
    return connect("any", microbatches, placement, orders, skips, ties)


def mutated(schedule: Schedule, chance: random.Random) -> Schedule:
    """One thing of one worker is another."""
    worker = chance.randrange(len(schedule.workers))
    actions = list(schedule.workers[worker])
    if not actions:
        return schedule
    i, j = chance.randrange(len(actions)), chance.randrange(len(actions))
    match chance.randrange(7):
        case 0:
            del actions[i]
        case 1:
            actions.insert(j, actions[i])
        case 2:
            actions[i], actions[j] = actions[j], actions[i]
        case 3:
            actions.insert(j, actions.pop(i))
        case 4:  # neighbours, which often may
            j = max(i - 1, 0)
            actions[i], actions[j] = actions[j], actions[i]
        case 5:
            actions[i] = another(actions[i], schedule, chance)
        case 6:  # where it would be next to right
            actions.insert(i, another(actions[i], schedule, chance))
    workers = list(schedule.workers)
    workers[worker] = tuple(actions)
    return replace(schedule, workers=tuple(workers))


def another(action: Action, schedule: Schedule, chance: random.Random) -> Action:
    match chance.randrange(4):
        case 0:
            return action._replace(kind=chance.choice(list(Kind)))
        case 1:
            return action._replace(stage=chance.randrange(schedule.placement.stages + 1))
        case 2:
            return action._replace(microbatch=chance.randrange(schedule.microbatches + 1))
    return action._replace(peer=chance.randrange(-1, schedule.placement.stages + 1))


def verdict(schedule: Schedule, capacity: int) -> Kept | str:
    """What the fast checker says."""
    try:
        return check(schedule, capacity=capacity)
    except ScheduleError as error:
        return f"refused: {error}"


def slow_verdict(schedule: Schedule, capacity: int) -> Kept | str:
    try:
        return slowly(schedule, capacity)
    except Illegal as error:
        return f"refused: {error}"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**48))
def test_any_order_that_meets_all_needs_is_legal(seed: int) -> None:
    schedule = any_schedule(random.Random(seed))
    assert check(schedule, capacity=64) == slowly(schedule, 64)
    assert parse(str(schedule)) == schedule
    assert simulate(schedule, capacity=64).makespan > 0


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**48), mutations=st.integers(1, 3), capacity=st.integers(1, 4))
def test_what_the_fast_checker_says_the_slow_one_says(
    seed: int, mutations: int, capacity: int
) -> None:
    chance = random.Random(seed)
    schedule = any_schedule(chance)
    for _ in range(mutations):
        schedule = mutated(schedule, chance)
    fast, slow = verdict(schedule, capacity), slow_verdict(schedule, capacity)
    assert isinstance(fast, str) == isinstance(slow, str), f"{fast}\n{slow}\n{schedule}"
    if not isinstance(fast, str):
        assert fast == slow
        assert simulate(schedule, capacity=capacity).makespan > 0


@given(seed=st.integers(0, 2**48), twice=st.booleans())
def test_no_schedule_lacks_or_doubles_an_action(seed: int, twice: bool) -> None:
    chance = random.Random(seed)
    schedule = any_schedule(chance)
    worker = chance.randrange(len(schedule.workers))
    actions = list(schedule.workers[worker])
    index = chance.randrange(len(actions))
    action = actions[index]
    if twice:
        actions.insert(chance.randint(0, len(actions)), action)
    else:
        del actions[index]
    workers = (*schedule.workers[:worker], tuple(actions), *schedule.workers[worker + 1 :])
    changed = replace(schedule, workers=workers)
    if action.kind is Kind.RECOMPUTE and not twice:
        check(changed, capacity=64)  # whether to recompute is the schedule's choice
        return
    with pytest.raises(ScheduleError):
        check(changed, capacity=64)
