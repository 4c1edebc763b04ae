"""What the checker proves of good schedules, and that it refuses broken ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.proof import CHANNEL_CAPACITY, Costs, prove
from pipeworker.plan.schedule import Kind, Schedule, build, connect, gpipe, parse, recomputed

GRID = [(k, m) for k in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 7, 16, 32)]
"""Stages and micro-batches, fewer micro-batches than stages included."""

few = st.integers(1, 7)
cost = st.integers(1, 9)


@pytest.mark.parametrize(("stages", "microbatches"), GRID)
def test_gpipe_has_the_bubble_of_the_paper(stages: int, microbatches: int) -> None:
    proof = prove(build("gpipe", stages, microbatches, "never"))
    assert proof.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert proof.makespan == 3 * (microbatches + stages - 1)
    assert proof.live_activations == (microbatches,) * stages
    assert proof.live_inputs == (microbatches,) * stages


@given(stages=few, microbatches=few, forward=cost, backward=cost)
def test_recompute_lengthens_the_step_by_its_forwards_alone(
    stages: int, microbatches: int, forward: int, backward: int
) -> None:
    """Early recompute hides in the drain, so it costs M forwards and nothing at the edges."""
    schedule = build("gpipe", stages, microbatches, "always")
    proof = prove(schedule, costs=Costs(forward, backward))
    step = 2 * forward + backward
    assert proof.makespan == microbatches * step + (stages - 1) * (forward + backward)
    busy = stages * microbatches * step
    assert proof.bubble == pytest.approx(1 - busy / (stages * proof.makespan))
    assert proof.live_activations == (1,) * stages
    assert proof.live_inputs == (microbatches,) * stages


@given(stages=few, microbatches=few, capacity=st.integers(1, 5))
def test_gpipe_runs_under_any_capacity(stages: int, microbatches: int, capacity: int) -> None:
    for mode in ("always", "except_first", "never"):
        schedule = build("gpipe", stages, microbatches, mode)
        assert prove(schedule, capacity=capacity).makespan == prove(schedule).makespan


def test_except_first_keeps_one_more_alive() -> None:
    """The first micro-batch's activations are kept from its forward to its backward."""
    proof = prove(build("gpipe", 2, 4, "except_first"))
    assert proof.live_activations == (1, 1)
    assert prove(build("gpipe", 2, 4, "always")).makespan - proof.makespan == 1.0


def test_live_counts_follow_the_order() -> None:
    """One forward, one backward on the last stage: it keeps one micro-batch, the first two."""
    one_forward_one_backward = """
        1f1b stages=2 microbatches=3
        0: F0 >A0 >T0 F1 >A1 >T1 L0 <G0 B0 F2 >A2 >T2 <G1 B1 <G2 B2
        1: <A0 <T0 F0 B0 >G0 <A1 <T1 F1 B1 >G1 <A2 <T2 F2 B2 >G2
    """
    proof = prove(parse(one_forward_one_backward))
    assert proof.live_activations == (2, 1)
    assert proof.live_inputs == (2, 1)
    assert proof.bubble == pytest.approx(0.25)


GOOD = """
    good stages=3 microbatches=2
    0: F0 >A0 >T0 F1 >A1 >T1 L0 R0 <G0 B0 R1 <G1 B1
    1: <A0 F0 >A0 <A1 F1 >A1 R0 <G0 B0 >G0 R1 <G1 B1 >G1
    2: <A0 <T0 F0 <A1 <T1 F1 R0 B0 >G0 R1 B1 >G1
"""


def broken(stage: int, before: str, after: str) -> Schedule:
    """GOOD with a passage of one stage replaced."""
    head, *lines = GOOD.strip().splitlines()
    assert lines[stage].count(before) == 1
    lines[stage] = lines[stage].replace(before, after)
    return parse("\n".join([head, *lines]))


def test_the_schedule_that_is_broken_below_is_good() -> None:
    assert prove(parse(GOOD)).live_activations == (1, 1, 1)


@pytest.mark.parametrize(
    ("stage", "before", "after", "why"),
    [
        # something is missing
        (0, " F1 >A1 >T1", "", "stage 0: R1 comes before its F"),
        (0, " >A1", "", "stage 0: >A1 is missing"),
        (0, " >T1", "", "stage 0: >T1 is missing"),
        (0, " L0", "", "stage 0: L0 is missing"),
        (1, " >G1", "", "stage 1: >G1 is missing"),
        (2, " R1 B1 >G1", "", "stage 2: >G1 is missing|stage 2: B1 is missing"),
        # something is there twice
        (1, "F0", "F0 F0", "stage 1: F0 appears twice"),
        (2, ">G0", ">G0 >G0", "stage 2: >G0 appears twice"),
        (0, "L0", "L0 L0", "stage 0: L0 appears twice"),
        # something comes before what it needs
        (1, "<A0 F0", "F0 <A0", "stage 1: F0 comes before its <A"),
        (2, "<T0 F0", "F0 <T0", "stage 2: F0 comes before its <T"),
        (1, "F0 >A0", ">A0 F0", "stage 1: >A0 comes before its F"),
        (1, "<G0 B0", "B0 <G0", "stage 1: B0 comes before its <G"),
        (1, "R0 <G0 B0", "<G0 B0 R0", "stage 1: B0 comes before its R"),
        (1, "B0 >G0", ">G0 B0", "stage 1: >G0 comes before its B"),
        (2, "F1 R0", "R1 F1 R0", "stage 2: R1 comes before its F"),
        # gradients would accumulate in another order
        (2, "R0 B0 >G0 R1 B1 >G1", "R1 B1 >G1 R0 B0 >G0", "stage 2: B1 is out of order.* B0"),
        # what a channel's ends disagree on
        (1, "<A0 F0 >A0 <A1 F1 >A1", "<A1 F1 >A1 <A0 F0 >A0", "0>1/activation: sent in order"),
        (2, "<A0 <T0 F0 <A1 <T1 F1", "<A0 <T1 <T0 F0 <A1 F1", "0>2/target: sent in order"),
        # what is in the wrong place
        (1, "R0 <G0", "L0 R0 <G0", "stage 1: only the first stage reads data"),
        (0, "L0", "L0 L1", "stage 0: L1: a step reads one mini-batch"),
        (2, "F0", "F2", "stage 2: F2 is not one of the micro-batches"),
        (2, "R0 B0", ">A0 R0 B0", "stage 2: >A0 has no stage at its other end"),
        (0, "R0 <G0 B0", "R0 <G0 B0 >G0", "stage 0: >G0 has no stage at its other end"),
    ],
)
def test_a_broken_schedule_is_refused(stage: int, before: str, after: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        prove(broken(stage, before, after))


def test_two_stages_that_wait_for_each_other_are_refused() -> None:
    """Stage 0 wants a gradient before it sends what that gradient needs."""
    stuck = """
        stuck stages=2 microbatches=2
        0: F0 >A0 >T0 F1 L0 <G0 B0 >A1 >T1 <G1 B1
        1: <A0 <T0 F0 <A1 <T1 F1 B0 >G0 B1 >G1
    """
    with pytest.raises(ScheduleError, match=r"deadlocks .*stage 0 at <G0; stage 1 at <A1"):
        prove(parse(stuck))


def eager(window: int) -> Schedule:
    """Stage 0 sends `window` activations while stage 1 sends it gradients it does not take yet."""
    head = "eager stages=2 microbatches=8\n"
    fill = " ".join(f"F{m} >A{m} >T{m}" for m in range(window))
    rest = " ".join(f"F{m} >A{m} >T{m}" for m in range(window, 8))
    drain = " ".join(f"<G{m} B{m}" for m in range(8))
    last = " ".join(f"<A{m} <T{m} F{m} B{m} >G{m}" for m in range(8))
    return parse(f"{head}0: {fill} {rest} L0 {drain}\n1: {last}")


def test_whether_a_schedule_deadlocks_depends_on_the_capacity() -> None:
    """All forwards against one-forward-one-backward: gradients pile up while 0 still sends."""
    assert prove(eager(8), capacity=8).makespan > 0
    with pytest.raises(ScheduleError, match=r"deadlocks with 3 frames: stage 0 at >A7; .*>G3"):
        prove(eager(8), capacity=3)
    assert CHANNEL_CAPACITY == 4
    assert prove(eager(8)).makespan == prove(eager(8), capacity=8).makespan


@given(stages=st.integers(2, 4), microbatches=st.integers(1, 5), data=st.data())
def test_no_schedule_lacks_or_doubles_an_action(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    mode = data.draw(st.sampled_from(["always", "never"]))
    good = build("gpipe", stages, microbatches, mode)
    stage = data.draw(st.integers(0, stages - 1))
    actions = list(good.stages[stage])
    index = data.draw(st.integers(0, len(actions) - 1))
    action = actions[index]
    lacking = data.draw(st.booleans())
    if lacking:
        del actions[index]
    else:
        actions.insert(data.draw(st.integers(0, len(actions))), action)
    other = (*good.stages[:stage], tuple(actions), *good.stages[stage + 1 :])
    changed = Schedule("changed", microbatches, other)
    if lacking and action.kind is Kind.RECOMPUTE:
        assert prove(changed)  # whether to recompute is the schedule's choice
        return
    with pytest.raises(ScheduleError):
        prove(changed)


def test_a_compute_order_out_of_order_is_refused_after_connection() -> None:
    orders = gpipe(2, 3, recomputed("never", 3))
    assert prove(connect("same", 3, orders))
    orders[1][0], orders[1][1] = orders[1][1], orders[1][0]
    with pytest.raises(ScheduleError, match="sent in order"):
        prove(connect("crossed", 3, orders))
