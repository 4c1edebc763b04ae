"""The checker accepts legal schedules, counts what they hold, and rejects broken ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import Action, Kind, parse_actions
from pipeworker.plan.check import LiveMicroBatches, check
from pipeworker.plan.connect import connect
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Pairs, Schedule
from pipeworker.plan.text import parse
from support.pure.orders import build, fill_drain

GRID = [(k, m) for k in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 16, 32)]
"""Stages and micro-batches, fewer micro-batches than stages included."""
V = Placement(((0, 3), (1, 2)))

# What is kept.


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_gpipe_holds_every_microbatch(stages: int, microbatches: int) -> None:
    everywhere = (microbatches,) * stages
    never = check(build("gpipe", stages, microbatches, "never"))
    assert never == LiveMicroBatches(everywhere, everywhere, (0,) * stages)
    always = check(build("gpipe", stages, microbatches, "always"))
    assert always == LiveMicroBatches((1,) * stages, everywhere, (0,) * stages)


def test_except_first_holds_the_first_and_one_more_at_a_time() -> None:
    """The first micro-batch's activations are kept from its forward to its backward."""
    assert check(build("gpipe", 2, 4, "except_first")).activations == (1, 1)


def test_live_microbatches_depend_on_the_order() -> None:
    """One forward, one backward on the last stage: it holds one micro-batch, stage 0 two."""
    one_forward_one_backward = """
        1f1b stages=2 microbatches=3
        0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0<G0 0B0 0F2 0>A2 0>T2@1 0<G1 0B1 0<G2 0B2
        1: 1<A0 1<T0@0 1F0 1B0 1>G0 1<A1 1<T1@0 1F1 1B1 1>G1 1<A2 1<T2@0 1F2 1B2 1>G2
    """
    assert check(parse(one_forward_one_backward)) == LiveMicroBatches((2, 1), (2, 1), (0, 0))


# Broken ones.

GOOD = """
    good stages=3 microbatches=2
    0: 0F0 0>A0 0>T0@2 0F1 0>A1 0>T1@2 0L0 0R0 0<G0 0B0 0R1 0<G1 0B1
    1: 1<A0 1F0 1>A0 1<A1 1F1 1>A1 1R0 1<G0 1B0 1>G0 1R1 1<G1 1B1 1>G1
    2: 2<A0 2<T0@0 2F0 2<A1 2<T1@0 2F1 2R0 2B0 2>G0 2R1 2B1 2>G1
"""
SPLIT = """
    split stages=2 microbatches=2
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
    """Return a legal schedule with a passage of one worker replaced."""
    head, *lines = good.strip().splitlines()
    assert lines[worker].count(before) == 1
    lines[worker] = lines[worker].replace(before, after)
    return parse("\n".join([head, *lines]))


@pytest.mark.parametrize(
    ("good", "kept"),
    [
        (GOOD, LiveMicroBatches((1, 1, 1), (2, 2, 2), (0, 0, 0))),
        (SPLIT, LiveMicroBatches((2, 2), (2, 2), (1, 2))),
        (VEE, LiveMicroBatches((2, 2, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0))),
        (LOOPED, LiveMicroBatches((2, 2, 2, 2), (2, 2, 2, 2), (0, 0, 0, 0))),
        (ONLY, LiveMicroBatches((1, 1), (1, 1), (0, 0))),
    ],
    ids=["good", "split", "vee", "looped", "only"],
)
def test_the_schedules_that_tests_break_are_legal(good: str, kept: LiveMicroBatches) -> None:
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
        (2, "2B1", "2I1 2W1 2B1", "worker 2: 2I1 comes beside 2B1; the backward of a micro-batch"),
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
        # so would what forwards change in buffers
        (
            *(1, "1<A0 1F0 1>A0 1<A1 1F1 1>A1", "1<A1 1F1 1>A1 1<A0 1F0 1>A0"),
            "worker 1: 1F1 is out of order; .* so that of micro-batch 0 comes first",
        ),
        # what a channel's ends disagree on
        (
            *(1, "1<A0 1F0 1>A0 1<A1", "1<A1 1<A0 1F0 1>A0"),
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
def test_a_broken_schedule_is_rejected(worker: int, before: str, after: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(broken(GOOD, worker, before, after))


@pytest.mark.parametrize(
    ("worker", "before", "after", "why"),
    [
        (0, " 0W0", "", "worker 0: 0W0 is missing"),
        (0, "0I0 0W0", "0W0", "worker 0: 0W0 comes before its 0I0"),
        (0, "0I0 0W0", "0W0 0I0", "worker 0: 0W0 comes before its 0I0"),
        (0, "0I0 0W0", "0B0 0W0", "worker 0: 0W0 comes before its 0I0"),
        (0, "0I0 0W0", "0B0 0I0 0W0", "worker 0: 0I0 comes beside 0B0; the backward of a"),
        (1, "1W0 1W1", "1W1 1W0", "worker 1: 1W1 is out of order; gradients accumulate in micro"),
        (0, "0W0 0<G1 0B1", "0<G1 0B1 0W0", "worker 0: 0B1 is out of order"),
        (1, "1R0 1I0", "1I0 1R0", "worker 1: 1I0 comes before its 1R0"),
        (1, "1I0 1>G0", "1>G0 1I0", "worker 1: 1>G0 comes before its 1B0"),
        (0, "0<G0 0I0", "0I0 0<G0", "worker 0: 0I0 comes before its 0<G0"),
        (0, " 0I0 0W0", "", "worker 0: 0B0 is missing"),
    ],
)
def test_both_parts_of_a_split_backward_are_checked(
    worker: int, before: str, after: str, why: str
) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(broken(SPLIT, worker, before, after))


def test_input_gradients_may_come_in_any_order() -> None:
    """Only the accumulation of weight gradients has an order."""
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
            "deadlocks with 4 frames: worker 0 cannot run 0F0: it waits for 2F0 of worker 1; "
            "worker 1 cannot run 1F0: it waits for 0F0 of worker 0",
        ),
        (
            *(1, "2>A1 2<G0 2B0 1B0 1>G0", "2<G0 2B0 1B0 1>G0 2>A1"),
            "deadlocks .*: worker 0 cannot run 3F1: it waits for 1B0 of worker 1; "
            "worker 1 cannot run 2B0: it waits for 3B0 of worker 0",
        ),
    ],
)
def test_schedules_with_several_stages_a_worker_are_checked(
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
def test_skips_and_ties_are_checked(worker: int, before: str, after: str, why: str) -> None:
    """Stages 0 and 2 are on one worker: their ties and skips pass in memory."""
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
    check(sent)  # the other worker knows stage 2 alone


def test_split_backwards_end_before_tied_gradients_are_sent() -> None:
    ties = ((0, 1), (1, 0))
    good = connect(
        "split", 1, Placement.identity(2), [parse_actions("0F0 0I0 0W0"), parse_actions("1F0 1B0")]
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
def test_skips_and_ties_must_be_between_existing_stages(
    skips: Pairs, ties: Pairs, why: str
) -> None:
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
def test_a_forward_only_schedule_has_no_backward(
    worker: int, before: str, after: str, why: str
) -> None:
    with pytest.raises(ScheduleError, match=why):
        check(broken(ONLY, worker, before, after))


# Deadlocks.


def test_two_workers_that_wait_for_each_other_are_rejected() -> None:
    """Worker 0 waits for a gradient before it sends the activation that this gradient needs."""
    stuck = """
        stuck stages=2 microbatches=2
        0: 0F0 0>A0 0>T0@1 0F1 0L0 0<G0 0B0 0>A1 0>T1@1 0<G1 0B1
        1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1B0 1>G0 1B1 1>G1
    """
    with pytest.raises(ScheduleError, match="deadlocks") as raised:
        check(parse(stuck))
    assert str(raised.value) == (
        "schedule stuck deadlocks with 4 frames: worker 0 cannot run 0B0: it waits for 1B0 of "
        "worker 1; worker 1 cannot run 1F1: it waits for 0B0 of worker 0"
    )


def eager(window: int) -> Schedule:
    """Return a schedule whose stage 0 sends `window` activations before it receives gradients."""
    fill = " ".join(f"0F{m} 0>A{m} 0>T{m}@1" for m in range(window))
    drain = " ".join(f"0<G{m} 0B{m}" for m in range(window))
    last = " ".join(f"1<A{m} 1<T{m}@0 1F{m} 1B{m} 1>G{m}" for m in range(window))
    return parse(f"eager stages=2 microbatches={window}\n0: {fill} 0L0 {drain}\n1: {last}")


def test_whether_a_schedule_deadlocks_depends_on_the_capacity() -> None:
    """All forwards against one-forward-one-backward: gradients pile up while 0 still sends."""
    assert check(eager(8), capacity=8).inputs == (8, 1)
    with pytest.raises(ScheduleError, match="deadlocks with 3 frames") as raised:
        check(eager(8), capacity=3)
    assert str(raised.value).partition(" frames: ")[2] == (
        "worker 0 cannot send 0>A7, because 3 frames wait for 1F4 of worker 1; "
        "worker 1 cannot send 1>G3, because 3 frames wait for 0B0 of worker 0"
    )
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


def test_gpipe_with_several_stages_a_worker_needs_channels_for_all_microbatches() -> None:
    """Worker 0 sends all activations of stage 0 before it receives any, so channels may fill."""
    looped, longest = Placement.looped(2, 2), 2 * CHANNEL_CAPACITY + 1
    check(connect("long", longest, looped, fill_drain(looped, longest)))
    with pytest.raises(ScheduleError, match="deadlocks"):
        check(connect("longer", longest + 1, looped, fill_drain(looped, longest + 1)))
    check(connect("vee", 99, V, fill_drain(V, 99)))  # worker 1 turns round when it has all


def test_an_illegal_compute_order_is_rejected_after_connection() -> None:
    place = Placement.identity(2)
    orders = fill_drain(place, 3, "never")
    check(connect("same", 3, place, orders))
    orders[1][0], orders[1][1] = orders[1][1], orders[1][0]
    with pytest.raises(ScheduleError, match="1F1 is out of order"):
        check(connect("crossed", 3, place, orders))
