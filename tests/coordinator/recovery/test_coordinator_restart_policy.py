"""The limit on restarts, and the number of workers after a loss."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.restart_policy import WINDOW, ElasticPolicy, RestartPolicy
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position

GONE = Failure(Cause.LOST, "gone", 1)
ALL_USED = "all 2 restarts within an hour are used (--max-restarts)"


def at(
    layer: int, *, step: int = 3, microbatch: int = 0, rank: int = 1, cause: Cause = Cause.LOST
) -> Failure:
    return Failure(cause, "gone", rank, Position(Phase.FORWARD, step, microbatch, layer))


def refusal(policy: RestartPolicy, failure: Failure, now: float) -> str:
    """Return why the job does not restart, and count the restart if it does."""
    reason = policy.refusal(failure, now)
    if not reason:
        policy.record(f"gone at {now:g}", now)
    return reason


def test_the_limit_applies_within_an_hour() -> None:
    policy = RestartPolicy(2)
    assert [refusal(policy, GONE, now) for now in (0.0, 10.0, 20.0)] == ["", "", ALL_USED]
    assert policy.causes == ["gone at 0", "gone at 10"]


def test_a_limit_of_one_restart_is_named_in_the_singular() -> None:
    policy = RestartPolicy(1)
    used = "the one restart within an hour is used (--max-restarts)"
    assert [refusal(policy, GONE, now) for now in (0.0, 10.0)] == ["", used]


def test_a_loss_no_longer_counts_after_an_hour() -> None:
    policy = RestartPolicy(2)
    assert [refusal(policy, GONE, now) for now in (0.0, 10.0)] == ["", ""]
    assert refusal(policy, GONE, WINDOW - 0.1) == ALL_USED
    assert refusal(policy, GONE, WINDOW) == ""
    assert refusal(policy, GONE, WINDOW + 9.9) == ALL_USED
    assert refusal(policy, GONE, WINDOW + 10.0) == ""
    assert len(policy.causes) == 4  # all causes are kept


def test_hosts_that_are_lost_one_after_another_are_one_incident() -> None:
    policy = RestartPolicy(2)
    assert not policy.is_same_incident((0,), early=True)  # the first generation
    policy.record("host a", 0.0)
    assert policy.is_same_incident((1, 2), early=True)
    policy.record("host b", 1.0, counts=False)
    assert not policy.is_same_incident((1, 2), early=True)  # again
    assert not policy.is_same_incident((), early=False)  # a step has run
    assert policy.is_same_incident((1, 2), early=True)
    assert refusal(policy, GONE, 2.0) == ""
    assert refusal(policy, GONE, 3.0) == ALL_USED


def test_with_max_restarts_0_the_first_loss_is_refused() -> None:
    assert refusal(RestartPolicy(0), GONE, 0.0) == "--max-restarts 0"


@pytest.mark.parametrize("layer", [0, 4])
def test_a_repeated_failure_at_the_same_place_is_refused(layer: int) -> None:
    policy = RestartPolicy(9)
    assert refusal(policy, at(layer), 0.0) == ""
    assert refusal(policy, at(layer), 10.0) == "it failed again at the same place"


@pytest.mark.parametrize("phase", [Phase.BUILDING, Phase.WAITING])
def test_a_repeated_hang_outside_of_layers_is_refused_in_the_users_code(phase: Phase) -> None:
    policy = RestartPolicy(9)
    hung = Failure(Cause.HUNG, "hung", 1, Position(phase))
    refused = "it failed again at the same place" if phase is Phase.BUILDING else ""
    assert [refusal(policy, hung, now) for now in (0.0, 1800.0)] == ["", refused]


def test_failures_at_different_places_are_not_repeated() -> None:
    policy = RestartPolicy(99)
    others = (at(4), at(5), at(4, step=4), at(4, microbatch=1), at(4, rank=0))
    for failure in (*others, at(4, cause=Cause.HUNG), at(4), at(5), at(4)):
        assert refusal(policy, failure, 0.0) == ""


def test_a_failure_outside_of_layers_has_no_place() -> None:
    """For example a worker that is killed twice by hand while it waits."""
    policy = RestartPolicy(9)
    assert [refusal(policy, at(-1), now) for now in (0.0, 1.0, 2.0)] == [""] * 3


# The number of workers.


def test_the_job_shrinks_when_a_worker_cannot_be_started() -> None:
    policy = ElasticPolicy(4, 2, 60.0, 4)
    assert [policy.shrink(1.0, cannot_start=True, early=False) for _ in range(3)] == [
        True,
        True,
        False,
    ]
    assert policy.workers == 2


def test_room_for_more_workers_adds_none() -> None:
    policy = ElasticPolicy(4, 2, 60.0, 4)
    assert policy.shrink(1.0, cannot_start=True, early=False, room=9)
    assert policy.workers == 3
    assert policy.shrink_to_save(9)
    assert policy.workers == 3


def test_two_early_losses_in_a_row_shrink_the_job() -> None:
    policy = ElasticPolicy(4, 1, 60.0, 4)
    early = [True, False, True, True, False]
    assert [policy.shrink(1.0, cannot_start=False, early=e) for e in early] == [False] * 3 + [
        True,
        False,
    ]
    assert policy.workers == 3


@pytest.mark.parametrize("cannot_start", [True, False])
def test_without_a_minimum_the_job_never_shrinks(cannot_start: bool) -> None:
    policy = ElasticPolicy(4, 4, 60.0, 4)
    assert not any(policy.shrink(1.0, cannot_start=cannot_start, early=True) for _ in range(5))


def test_the_wait_before_growing_doubles_after_a_failed_attempt() -> None:
    policy = ElasticPolicy(3, 1, 60.0, 3)
    assert not policy.may_grow(1000.0)
    policy.shrink(100.0, cannot_start=True, early=False)
    assert [policy.may_grow(now) for now in (159.0, 160.0)] == [False, True]
    policy.grow()
    assert policy.workers == 3
    policy.shrink(161.0, cannot_start=True, early=False)
    assert [policy.may_grow(now) for now in (280.0, 281.0)] == [False, True]


def test_the_wait_before_growing_is_the_first_one_after_an_attempt_that_succeeded() -> None:
    """A node that comes and goes for days does not make the job wait for hours."""
    policy = ElasticPolicy(3, 1, 60.0, 3)
    for lost in (100.0, 1000.0, 2000.0):
        assert policy.shrink(lost, cannot_start=True, early=False)
        policy.steps_run(lost)
        assert [policy.may_grow(lost + wait) for wait in (59.0, 60.0)] == [False, True]
        policy.grow()
        policy.steps_run(lost + 61.0)
