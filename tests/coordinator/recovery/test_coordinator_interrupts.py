"""Interrupts and lost workers: the last snapshot is saved before the job ends."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import Effect, JobState, Send
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import Restart, Verdict, Warned
from pipeworker.wire.messages.checkpoint import Restore, Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.presence import Abort, Heartbeat
from support.pure.coordinator import (
    NOWHERE,
    PATIENCE,
    ScriptedJob,
    commit,
    messages_of,
    of,
    replaceable_job,
    runs,
    saves,
)


def far() -> ScriptedJob:
    """Return a job after three steps, with a snapshot of the second."""
    job = replaceable_job(worker_timeout=PATIENCE).running()
    for step in (1, 2, 3):
        job.step(step)
    return job


def ends_with_the_snapshot(job: ScriptedJob) -> None:
    """Save the restored snapshot without another step, and end."""
    effects = job.ready()
    assert saves(effects) == [Advance(Save(2, 0))] * 2
    assert runs(effects) == []
    assert job.saved() == [commit(2)]
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.exit_status) == ("interrupted", 130)
    assert job.ended.steps == 3


def test_after_a_loss_an_interrupted_job_restarts_to_save_the_snapshot() -> None:
    job = far()
    job.interrupt()
    assert of(job.exited(1, -9), Restart)
    job.described()
    ends_with_the_snapshot(job)


def wait_for_the_end(
    job: ScriptedJob, living: tuple[int, ...], *, waiting: bool = False
) -> list[Effect]:
    """Interrupt a job in whose step no worker moves, and only these answer, until it ends."""
    job.interrupt()
    for _ in range(3):
        for rank in living:
            job.receive(Heartbeat(rank, Position(Phase.FORWARD, 4, 1), waiting=waiting))
        effects = job.tick(PATIENCE / 2)
        if any(isinstance(effect, (Restart, Verdict)) for effect in effects):
            return effects
    return pytest.fail("the job waits")


@pytest.mark.parametrize(
    ("living", "waiting", "why"),
    [
        ((0,), False, "not answered"),
        ((0, 1), False, "no progress"),
        ((0, 1), True, "stage 0 and stage 1 have waited 60 s without progress"),
    ],
)
def test_a_step_that_does_not_end_gives_the_snapshot(
    living: tuple[int, ...], waiting: bool, why: str
) -> None:
    """New workers save the snapshot if a worker was stopped, or hangs, when the user stops it.

    The last heartbeats of workers that wait for each other are older than the limit.
    """
    job = far()
    assert of(wait_for_the_end(job, living, waiting=waiting), Restart)
    job.described()
    ends_with_the_snapshot(job)
    assert why in job.ended.causes[0]


def test_a_step_that_does_not_end_is_reported_if_it_cannot_be_saved() -> None:
    job = replaceable_job(worker_timeout=PATIENCE, max_restarts=0).running()
    job.step(1)
    (warned,) = of(wait_for_the_end(job, (0,)), Warned)
    assert warned.text.startswith(
        "step 1 is not saved: stage 1 (pid 1001 on host) has not answered"
    )
    assert (job.ended.status, job.ended.exit_status) == ("interrupted", 130)


@pytest.mark.parametrize("state", [State.JOINING, State.BUILDING], ids=lambda s: s.value)
def test_an_interrupt_during_a_restart_waits_until_the_snapshot_is_saved(state: State) -> None:
    job = far()
    job.exited(1, -9)
    if state is State.JOINING:
        assert of(job.interrupt(), Verdict) == []
    job.described()
    if state is State.BUILDING:
        assert of(job.interrupt(), Verdict) == []
    ends_with_the_snapshot(job)


def test_an_interrupt_during_a_restart_does_not_wait_for_missing_workers() -> None:
    job = far()
    job.exited(1, -9)
    job.interrupt()
    job.join(0)
    for _ in range(3):
        job.receive(Heartbeat(0, Position(Phase.LOADING)))
        job.tick(PATIENCE / 2)
    assert job.ended.status == "interrupted"
    (warned,) = of(job.effects, Warned)
    assert warned.text == "step 2 is not saved: rank 1 did not join within 60 s"


def test_an_interrupt_during_a_restart_waits_for_workers_that_build() -> None:
    """model() and what reads data() again may take longer than the worker timeout."""
    job = far()
    job.exited(1, -9)
    job.interrupt()
    job.join()
    for _ in range(5):
        for rank in job.ranks:
            job.receive(Heartbeat(rank, Position(Phase.LOADING)))
        job.tick(PATIENCE / 2)
    job.describe()
    ends_with_the_snapshot(job)


def test_new_workers_get_time_however_long_ago_the_interrupt_was() -> None:
    job = far()
    job.interrupt()
    for microbatch in range(4):  # the step takes a long time
        for rank in job.ranks:
            job.receive(Heartbeat(rank, Position(Phase.FORWARD, 4, microbatch)))
        job.tick(PATIENCE - 1.0)
    job.exited(1, -9)
    job.tick(1.0)
    assert not job.job.end
    job.described()
    ends_with_the_snapshot(job)


def saved_already() -> ScriptedJob:
    """Return a job after two steps, the first of which is in memory and on disk."""
    job = replaceable_job().running()
    job.request_checkpoint()
    for step in (1, 2):
        job.step(step)
    job.checkpointed()
    return job


def nothing_yet() -> ScriptedJob:
    """Return a job after two steps without a snapshot or checkpoint."""
    job = replaceable_job(snapshot_every=50).running()
    for step in (1, 2):
        job.step(step)
    return job


@pytest.mark.parametrize("begin", [saved_already, nothing_yet], ids=lambda b: b.__name__)
def test_an_interrupted_job_with_nothing_to_save_ends_at_once(begin: object) -> None:
    """The remaining workers receive the end of the job."""
    assert callable(begin)
    job: ScriptedJob = begin()
    job.interrupt()
    effects = job.exited(1, -9)
    assert (job.ended.status, job.ended.steps) == ("interrupted", 2)
    assert (job.ended.error, job.ended.causes) == (None, ())
    (warned,) = of(effects, Warned)
    assert warned.text == "step 2 is not saved: the worker of stage 1 was killed by SIGKILL"
    assert not of(effects, Restart)
    assert len(messages_of(effects, Abort)) == 2
    job = begin()
    job.exited(1, -9)
    job.join()
    effects = job.interrupt()
    assert (job.ended.status, job.ended.steps) == ("interrupted", 2)
    assert len(job.ended.causes) == 1
    assert [send.generation for send in of(effects, Send)] == [2, 2]


def test_steps_that_are_on_disk_are_not_saved_again() -> None:
    """An earlier coordinator reached step 8; this one resumes from the snapshot."""
    start = Start(snapshot=(JobState(5), Restore(5, slot=1, ranks=2)), recorded=9, saved=8)
    job = replaceable_job(start=start).running()
    job.step(6)
    job.interrupt()
    effects = job.step(7)
    assert saves(effects) == []
    assert (job.ended.status, job.ended.steps) == ("interrupted", 9)


def test_a_loss_after_an_interrupt_is_a_failure_if_workers_cannot_be_replaced() -> None:
    """There is no checkpoint of the steps, and the failure says so."""
    for job in (ScriptedJob(2, steps=9).running(), replaceable_job(max_restarts=0).running()):
        job.step(1)
        job.interrupt()
        job.exited(1, -9)
        assert job.failure.message == "the worker of stage 1 was killed by SIGKILL"
    job = replaceable_job(max_restarts=1).running()
    for step in (1, 2, 3):
        job.step(step)
    job.interrupt()
    job.exited(1, -9)
    job.exited(0, -9)
    assert job.failure.message == "the worker of stage 0 was killed by SIGKILL"


def test_a_second_interrupt_changes_nothing() -> None:
    job = far()
    job.interrupt()
    job.exited(1, -9)
    assert job.interrupt() == []
    job.join()
    assert job.interrupt() == []
    job.receive(Heartbeat(0, NOWHERE))
    job.describe()
    ends_with_the_snapshot(job)
