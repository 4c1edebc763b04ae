"""The state of a scheduler for other parameter groups than the saved ones."""

from __future__ import annotations

from typing import Any

import pytest

from pipeworker.record.checkpoint.param_groups import (
    SavedGroup,
    SavedOptimizer,
    scheduler_state_for,
)


def saved(scheduler: dict[str, Any], groups: int = 2) -> SavedOptimizer:
    return SavedOptimizer([{} for _ in range(groups)], scheduler)


@pytest.mark.parametrize(
    ("first", "second", "built", "expected"),
    [
        pytest.param([1, 2], [3, 4], [2, 3], [2, 3], id="by group, under a name of its own"),
        pytest.param([1.5, 2.5], [3.5, 4.5], [2, 3], [2.5, 3.5], id="that has changed"),
        pytest.param([10, 20], [10, 20], [10, 20], [10, 20], id="milestones"),
        pytest.param([7, 8], [7, 8], [0, 0], [7, 8], id="a history, equal on all stages"),
        pytest.param([1, 2, 3], [3, 4, 5], [2, 3], [1, 2, 3], id="of another length"),
    ],
)
def test_a_list_with_as_many_items_as_groups(
    first: list[float], second: list[float], built: list[float], expected: list[float]
) -> None:
    """A stage continues the last group of one stage and the first of the next."""
    one, two = saved({"own": first}), saved({"own": second})
    groups = [SavedGroup(one, 1), SavedGroup(two, 0)]
    assert scheduler_state_for(one, groups, {"own": built}) == {"own": expected}


def test_the_same_groups_keep_their_state() -> None:
    one = saved({"own": [1, 2], "base_lrs": [3, 4]})
    state = scheduler_state_for(one, [SavedGroup(one, 0), SavedGroup(one, 1)], {"own": [0, 0]})
    assert state == one.scheduler


def test_as_many_schedulers_as_groups_stay_in_their_order() -> None:
    def state(rates: list[float], epoch: int) -> dict[str, Any]:
        return {
            "_schedulers": [
                {"last_epoch": 3, "base_lrs": rates},
                {"last_epoch": epoch, "base_lrs": rates},
            ]
        }

    one, two = saved(state([0.1, 0.2], 5)), saved(state([0.3, 0.4], 5))
    groups = [SavedGroup(one, 1), SavedGroup(two, 0)]
    assert scheduler_state_for(one, groups, state([0.2, 0.3], 0)) == state([0.2, 0.3], 5)


@pytest.mark.parametrize(
    ("state", "steps"),
    [
        ({"last_epoch": 3}, 3),
        ({"_schedulers": [{"last_epoch": 3}, {"last_epoch": 3}]}, 3),  # a ChainedScheduler
        ({"_schedulers": [{"last_epoch": 3}, {"_schedulers": [{"last_epoch": 3}]}]}, 3),
        ({"_schedulers": [{"last_epoch": 3}, {"last_epoch": 1}]}, None),
        ({"_schedulers": []}, None),
        ({"last_epoch": -1}, None),
        ({"last_epoch": True}, None),
        ([3], None),
    ],
)
def test_the_steps_of_a_scheduler_are_in_its_state(state: Any, steps: int | None) -> None:
    assert SavedOptimizer([{}], state).scheduled == steps
