"""A coordinator that is stopped, as a batch system may do, hears nobody meanwhile."""

from __future__ import annotations

from pipeworker.coordinator.effects import Effect, Status
from pipeworker.coordinator.events import Ticked, Unreachable
from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.wire.messages.failure import Cause, Failed, Failure
from pipeworker.wire.messages.position import Position
from pipeworker.wire.messages.presence import Heartbeat
from support.coordinator import PATIENCE, TIMINGS, Scripted


def stopped(job: Scripted, seconds: float, counted: float = 0.4) -> list[Effect]:
    """For so long, and a little more passes until it looks again."""
    job.now += seconds + counted
    return job.handle(Ticked(seconds))


def test_nobody_was_silent_while_the_coordinator_was_stopped() -> None:
    job = Scripted(2, worker_timeout=PATIENCE).running()
    job.tick(PATIENCE / 2)
    assert stopped(job, 10 * PATIENCE) == []
    job.says(Heartbeat(0, Position()))
    assert job.tick(PATIENCE / 2 - 1) == []
    job.says(Heartbeat(0, Position()))
    job.tick(1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.rank == 1


def test_what_was_heard_before_it_looked_again_is_not_in_the_future() -> None:
    job = Scripted(2, worker_timeout=PATIENCE).running()
    job.now += 10 * PATIENCE
    for rank in job.ranks:
        job.says(Heartbeat(rank, Position()))
    job.handle(Ticked(10 * PATIENCE))
    job.tick(PATIENCE + 0.1)
    assert job.failure.cause is Cause.HUNG


def test_who_could_not_be_heard_may_still_come_back_join_and_say_what_is_behind_an_echo() -> None:
    lost = Scripted(2, worker_timeout=PATIENCE).running()
    lost.handle(Unreachable(b"w1"))
    missing = Scripted(2, worker_timeout=PATIENCE)
    echoed = Scripted(2, worker_timeout=PATIENCE).running()
    echoed.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    for job in (lost, missing, echoed):
        assert stopped(job, 10 * PATIENCE) == []
        assert not job.job.over
    missing.tick(PATIENCE * JOIN_FACTOR)
    for job in (lost, echoed):
        job.tick(TIMINGS.echo)
    assert all(job.failure for job in (lost, missing, echoed))


def test_a_step_is_still_waited_for_at_an_interrupt() -> None:
    job = Scripted(2, worker_timeout=PATIENCE).running()
    job.interrupt()
    assert stopped(job, 10 * PATIENCE) == []
    for _ in range(3):
        for rank in job.ranks:
            job.says(Heartbeat(rank, Position()))
        job.tick(PATIENCE / 2)
    assert job.ended.status is Status.INTERRUPTED
