"""A suspended coordinator, as a batch system may suspend it, receives no messages meanwhile."""

from __future__ import annotations

from pipeworker.coordinator.effects import Effect
from pipeworker.coordinator.events import Disconnected, Tick
from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Position
from pipeworker.wire.messages.presence import Failed, Heartbeat
from pipeworker.wire.messages.step import CallKind
from support.pure.coordinator import PATIENCE, TIMINGS, ScriptedJob, commit, own_loop_job


def stopped(job: ScriptedJob, seconds: float, counted: float = 0.4) -> list[Effect]:
    """Suspend the coordinator for `seconds`, and a little longer until its next tick."""
    job.now += seconds + counted
    return job.handle(Tick(seconds))


def test_suspension_of_the_coordinator_counts_as_no_silence() -> None:
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    job.tick(PATIENCE / 2)
    assert stopped(job, 10 * PATIENCE) == []
    job.receive(Heartbeat(0, Position()))
    assert job.tick(PATIENCE / 2 - 1) == []
    job.receive(Heartbeat(0, Position()))
    job.tick(1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.rank == 1


def test_messages_read_after_a_suspension_are_not_dated_in_the_future() -> None:
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    job.now += 10 * PATIENCE
    for rank in job.ranks:
        job.receive(Heartbeat(rank, Position()))
    job.handle(Tick(10 * PATIENCE))
    job.tick(PATIENCE + 0.1)
    assert job.failure.cause is Cause.HUNG


def test_suspension_extends_reconnecting_joining_and_grace_periods() -> None:
    lost = ScriptedJob(2, worker_timeout=PATIENCE).running()
    lost.handle(Disconnected(b"w1"))
    missing = ScriptedJob(2, worker_timeout=PATIENCE)
    echoed = ScriptedJob(2, worker_timeout=PATIENCE).running()
    echoed.receive(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    for job in (lost, missing, echoed):
        assert stopped(job, 10 * PATIENCE) == []
        assert not job.job.end
    missing.tick(PATIENCE * JOIN_FACTOR)
    for job in (lost, echoed):
        job.tick(TIMINGS.grace)
    assert all(job.failure for job in (lost, missing, echoed))


def test_suspension_extends_the_wait_of_an_interrupt() -> None:
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    job.interrupt()
    assert stopped(job, 10 * PATIENCE) == []
    for _ in range(3):
        for rank in job.ranks:
            job.receive(Heartbeat(rank, Position()))
        job.tick(PATIENCE / 2)
    assert job.ended.status == "interrupted"


def test_suspension_extends_the_wait_for_the_last_checkpoint_of_a_script() -> None:
    """A rank between two calls answers when it makes the next one."""
    job = own_loop_job(worker_timeout=PATIENCE)
    job.called(CallKind.STEP)
    job.step(1)
    job.receive(Failed(0, Failure(Cause.USER, "the script raised"), stays=True))
    assert job.state() is State.SAVING
    job.tick()
    assert stopped(job, 10 * PATIENCE) == []
    assert job.saved() == [commit(1)]
    job.checkpoint_committed()
    assert job.failure.message == "the script raised"
