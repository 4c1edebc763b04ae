"""With how many stages a job goes on."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.hands import Hands


def test_a_worker_that_cannot_be_started_is_done_without() -> None:
    hands = Hands(4, 2, 60.0)
    assert [hands.lost(1.0, cannot_start=True, early=False) for _ in range(3)] == [
        True,
        True,
        False,
    ]
    assert hands.now == 2


def test_one_that_is_lost_twice_before_a_step_cannot_be_started() -> None:
    hands = Hands(4, 1, 60.0)
    early = [True, False, True, True, False]
    assert [hands.lost(1.0, cannot_start=False, early=e) for e in early] == [False] * 3 + [
        True,
        False,
    ]
    assert hands.now == 3


@pytest.mark.parametrize("cannot_start", [True, False])
def test_without_leave_all_are_needed(cannot_start: bool) -> None:
    hands = Hands(4, 4, 60.0)
    assert not any(hands.lost(1.0, cannot_start=cannot_start, early=True) for _ in range(5))


def test_all_are_tried_again_ever_more_rarely() -> None:
    hands = Hands(3, 1, 60.0)
    assert not hands.may_grow(1000.0)
    hands.lost(100.0, cannot_start=True, early=False)
    assert [hands.may_grow(now) for now in (159.0, 160.0)] == [False, True]
    hands.grow()
    assert hands.now == 3
    hands.lost(161.0, cannot_start=True, early=False)
    assert [hands.may_grow(now) for now in (280.0, 281.0)] == [False, True]
