"""Checkpoints and snapshots over a restart: unfinished, being completed, or not in memory."""

from __future__ import annotations

from pipeworker.coordinator.effects import Discard, Dropped, Effect, JobState
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.wire.lines import Restart, Warned
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.presence import Failed
from support.pure.coordinator import (
    ScriptedJob,
    commit,
    copies,
    of,
    replaceable_job,
    restores,
    saves,
    updates,
)

KILLED = "the worker of stage 1 was killed by SIGKILL"


def test_an_unfinished_checkpoint_is_saved_after_the_restart() -> None:
    """Its parts are lost with the workers that wrote them, and it was requested."""
    job = replaceable_job().running()
    job.request_checkpoint()
    for step in (1, 2, 3):
        job.step(step)
    job.receive(Saved(0, 1))
    effects = job.exited(1, -9)
    assert of(effects, Discard) == [Discard(1)]
    job.start()
    assert [type(effect) for effect in job.receive(Saved(1, 1))] == [Dropped]
    assert copies(job.step(3)) == [Copy(3, 0, save=True)] * 2
    assert job.saved() == [commit(3)]
    job.checkpoint_committed()
    assert not [copy for copy in copies(job.step(4)) if copy.save]


def test_a_requested_checkpoint_survives_a_restart() -> None:
    job = replaceable_job().running()
    job.step(1)
    job.request_checkpoint()
    job.exited(1, -9)
    job.start()
    assert copies(job.step(1)) == [Copy(1, 0, save=True)] * 2


def test_repeated_steps_that_are_on_disk_are_not_saved_again() -> None:
    """An earlier coordinator reached step 9; this one resumes from the snapshot."""
    start = Start(snapshot=(JobState(5), Restore(5, slot=1, ranks=2)), recorded=9, saved=8)
    job = replaceable_job(start=start, checkpoint_every="2", steps=99).running()
    job.request_checkpoint()
    for step in range(6, 11):
        copied = copies(job.step(step))
        assert [copy.step for copy in copied if copy.save] == [10, 10] * (step == 10)


def completing_job() -> ScriptedJob:
    """Return a job that repeats step 2 while the checkpoint of that step is being completed."""
    job = replaceable_job(snapshot_every=50, checkpoint_every="2").running()
    for step in (1, 2):
        job.step(step)
    assert job.saved(2) == [commit(2)]
    job.exited(1, -9)
    job.start()
    job.step(1)
    return job


def test_a_checkpoint_that_is_being_completed_is_not_written_again() -> None:
    job = completing_job()
    assert copies(job.step(2)) == []
    job.checkpoint_committed(2)
    job.step(3)
    assert copies(job.step(4)) == [Copy(4, 0, save=True)] * 2


def test_an_interrupt_waits_for_the_checkpoint_that_is_being_completed() -> None:
    job = completing_job()
    job.interrupt()
    assert saves(job.step(2)) == []
    assert job.state() is State.COMMITTING
    job.checkpoint_committed(2)
    assert job.ended.status == "interrupted"


def test_a_step_is_saved_again_if_its_checkpoint_cannot_be_completed() -> None:
    job = completing_job()
    job.interrupt()
    assert updates(job.step(2)) == []
    effects = job.checkpoint_failed()
    assert of(effects, Discard) == [Discard(2)]
    assert [advance.next for advance in saves(effects)] == [Save(2, 0)] * 2
    assert [update.step for update in updates(effects)] == [2, 2]
    job.saved(2)
    job.checkpoint_committed(2)
    assert job.ended.status == "interrupted"


def test_a_checkpoint_that_fails_after_the_end_of_the_job_is_discarded() -> None:
    job = replaceable_job(checkpoint_every="2", max_restarts=0).running()
    for step in (1, 2):
        job.step(step)
    job.saved(2)
    job.exited(1, -9)
    assert job.ended.status == "failed"
    warning = Warned("the checkpoint of step 2 failed: no space left")
    assert job.checkpoint_failed() == [Discard(2), warning]
    assert job.checkpoint_committed(2) == []


# A snapshot that is not in memory.


def lost_snapshot(job: ScriptedJob) -> list[Effect]:
    """Let a worker of the present generation report that it cannot restore its snapshot."""
    job.described()
    return job.receive(Failed(1, Failure(Cause.SNAPSHOT, "the snapshot is lost")))


def test_without_its_snapshot_a_job_continues_from_the_newest_checkpoint() -> None:
    """The job counts no further loss, and warns once."""
    job = replaceable_job(checkpoint_every="2", max_restarts=1, min_stages=1).running()
    for step in (1, 2, 3):
        job.step(step)
    job.saved(2)
    job.checkpoint_committed(2)
    job.step(4)
    job.exited(1, -9)
    assert job.job.restored_step == -1
    assert len(of(lost_snapshot(job), Restart)) == 1
    assert job.job.restored_step == 2
    job.start()
    on_disk = Restore(2, "checkpoints/2")
    assert job.job.restored_step == -1
    assert restores(job) == [None, Restore(3, slot=0, ranks=2), on_disk]
    text = f"{KILLED}; the snapshot is lost (stage 1); resumed after step 2, 2 steps repeated"
    (warned,) = of(job.effects, Warned)
    assert warned.text.startswith(text)
    assert not of(job.exited(1, -9), Restart)
    assert (job.ended.status, job.ended.exit_status) == ("failed", 1)


def test_without_any_checkpoint_it_begins_again() -> None:
    job = replaceable_job().running()
    job.step(1)
    job.step(2)
    job.exited(1, -9)
    lost_snapshot(job)
    job.join()
    assert restores(job) == [None, Restore(1, slot=0, ranks=2), None]


def test_a_lost_snapshot_is_no_sign_that_a_worker_cannot_run() -> None:
    """It is the first of the two losses before a step after which a job shrinks."""
    job = replaceable_job(min_stages=1).running()
    job.step(1)
    job.step(2)
    job.exited(1, -9)
    lost_snapshot(job)
    job.exited(1, -9)
    job.exited(1, -9)
    assert [restart.stages for restart in of(job.effects, Restart)] == [2, 2, 2, 1]


def test_a_snapshot_that_was_not_there_is_an_ordinary_loss() -> None:
    """It cannot restart the job again and again."""
    job = replaceable_job(max_restarts=1)
    assert of(lost_snapshot(job), Restart)
    assert not of(lost_snapshot(job), Restart)
    assert (job.ended.status, job.ended.exit_status) == ("failed", 1)


def test_a_snapshot_that_cannot_be_saved_is_reported() -> None:
    job = replaceable_job().running()
    for step in (1, 2):
        job.step(step)
    job.receive(Failed(1, Failure(Cause.USER, "a layer raised")))
    lost_snapshot(job)
    assert [warned.text for warned in of(job.effects, Warned)] == [
        "the job failed; step 1 is saved before it ends",
        "step 1 is not saved: the snapshot is lost (stage 1)",
    ]
    assert (job.ended.exit_status, job.ended.error) == (1, "a layer raised\n  stage 1")
