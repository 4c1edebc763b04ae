"""Offload: where fetches are placed, and how many micro-batches are on the device."""

from __future__ import annotations

import pytest

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import format_actions, parse_actions
from pipeworker.plan.check import check
from pipeworker.plan.recompute import with_fetches
from pipeworker.plan.text import parse
from support.pure.orders import build


@pytest.mark.parametrize(
    ("order", "found"),
    [
        # Beside the action ahead of its backward; F0 has left beside F1.
        (
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
            "0F0 0F1 0F2 0FETCH0 0F3 0FETCH1 0B0 0FETCH2 0B1 0FETCH3 0B2 0B3",
        ),
        # There is no time to leave.
        ("0F0 0B0", "0F0 0B0"),
        ("0F0 0F1 0B0 0B1", "0F0 0F1 0B0 0B1"),
        ("0F0 0F1 0F2 0B0 0B1 0B2", "0F0 0F1 0FETCH0 0F2 0FETCH1 0B0 0FETCH2 0B1 0B2"),
        # What is recomputed has no graph to keep.
        ("0F0 0F1 0F2 0R0 0B0 0B1 0B2", "0F0 0F1 0F2 0R0 0FETCH1 0B0 0FETCH2 0B1 0B2"),
        # In halves: for the first of them.
        (
            "0F0 0F1 0F2 0I0 0W0 0I1 0I2 0W1 0W2",
            "0F0 0F1 0FETCH0 0F2 0I0 0FETCH1 0W0 0FETCH2 0I1 0I2 0W1 0W2",
        ),
        # Of two stages: what leaves does so beside an action of its own stage.
        ("0F0 1F0 1B0 0B0", "0F0 1F0 1B0 0B0"),
        ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", "0F0 0F1 1F0 1F1 1B0 0FETCH0 1B1 0B0 0B1"),
    ],
)
def test_a_fetch_comes_before_the_action_ahead_of_its_backward(order: str, found: str) -> None:
    assert format_actions(with_fetches(parse_actions(order), range(2))) == found


def test_a_fetch_comes_before_the_receives_of_that_action() -> None:
    lines = str(build("gpipe", 2, 3, "offload")).splitlines()
    assert lines[1:] == [
        "0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0FETCH0 0F2 0>A2 0>T2@1 0FETCH1 0L0 0<G0 0B0 "
        "0FETCH2 0<G1 0B1 0<G2 0B2",
        "1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1FETCH0 1<A2 1<T2@0 1F2 1FETCH1 1B0 1>G0 "
        "1FETCH2 1B1 1>G1 1B2 1>G2",
    ]


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7, 32])
def test_three_micro_batches_at_most_are_on_the_device(microbatches: int) -> None:
    """At the turn, one is computed, one leaves and one returns."""
    kept = check(build("gpipe", 3, microbatches, "offload"))
    assert kept.activations == (min(microbatches, 3),) * 3
    assert kept.inputs == (microbatches,) * 3


GOOD = "0F0 0F1 0F2 0FETCH0 0F3 0FETCH1 0L0 0B0 0FETCH2 0B1 0FETCH3 0B2 0B3"


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("0F3 0FETCH1", "0FETCH1 0F3", None),
        (
            "0FETCH1 0L0 0B0 0FETCH2 0B1",
            "0L0 0B0 0FETCH2 0B1 0FETCH1",
            "0B1 comes before its 0FETCH1",
        ),
        ("0F0 0F1 0F2 0FETCH0", "0F0 0FETCH0 0F1 0F2", "0FETCH0 comes before another action of"),
        ("0F0 0F1", "0FETCH0 0F0 0F1", "0FETCH0 appears twice"),
        ("0L0 0B0", "0L0 0R0 0B0", "0FETCH0 comes beside 0R0"),
        ("0FETCH3", "0FETCH4", "0FETCH4 is not one of the micro-batches"),
        ("0FETCH3", "1FETCH3", "1FETCH3 is of a stage it does not hold"),
    ],
)
def test_the_checker_rejects_a_fetch_in_a_wrong_place(
    before: str, after: str, why: str | None
) -> None:
    assert GOOD.count(before) == 1
    made = parse(f"one stages=1 microbatches=4\n0: {GOOD.replace(before, after)}")
    if why is None:
        check(made)
        return
    with pytest.raises(ScheduleError, match=why):
        check(made)
