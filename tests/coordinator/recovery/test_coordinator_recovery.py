"""Recovery: after the loss of a worker the job resumes from the last snapshot with new workers."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pipeworker.coordinator.effects import Discard, Dropped, Effect, JobState, Send
from pipeworker.coordinator.events import Moved
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.lines import Restart, Warned
from pipeworker.wire.messages.checkpoint import Copy, Restore, Save, Saved
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.presence import Failed, Welcome
from pipeworker.wire.messages.step import Evaluate, RunStep, Update
from support.pure.coordinator import (
    BATCH,
    ScriptedJob,
    commit,
    copies,
    evaluation_of,
    messages_of,
    of,
    replaceable_job,
    runs,
    saves,
    updates,
)

KILLED = "the worker of stage 1 was killed by SIGKILL"


def restores(job: ScriptedJob) -> list[Restore | None]:
    """Return the state with which each generation of worker 1 began."""
    return [welcome.restore for welcome in job.sent(1, Welcome)]


def test_workers_that_join_later_are_sent_where_the_run_directory_is() -> None:
    job = replaceable_job(steps=3)
    job.join()
    job.handle(Moved("/moved"))
    job.exited(1, -9)
    job.join()
    assert [welcome.run_dir == "/moved" for welcome in job.sent(1, Welcome)] == [False, True]


# The state to resume from.


def at(state: State) -> ScriptedJob:
    """Return a job that is in this state of its third and last step."""
    job = replaceable_job(evaluate_every=3, steps=3)
    job.join()
    if state is State.JOINING:
        return job
    job.describe()
    if state is State.BUILDING:
        return job
    job.ready()
    for step in (1, 2):
        job.step(step)
    if state is State.STEPPING:
        return job
    job.step(3)
    if state is State.EVALUATING:
        return job
    job.evaluated(3)
    if state is State.COMMITTING:
        job.saved()
    return job


@pytest.mark.parametrize(
    ("state", "back"),
    [
        (State.JOINING, None),
        (State.BUILDING, None),
        (State.STEPPING, Restore(1, slot=0, ranks=2)),  # 2 is not yet known to be complete
        (State.EVALUATING, Restore(2, slot=1, ranks=2)),
        (State.SAVING, Restore(2, slot=1, ranks=2)),
        (State.COMMITTING, Restore(2, slot=1, ranks=2)),
    ],
    ids=lambda value: value.value if isinstance(value, State) else "",
)
def test_a_job_resumes_from_its_last_snapshot_in_every_state(
    state: State, back: Restore | None
) -> None:
    job = at(state)
    assert job.state() is state
    effects = job.exited(1, -9)
    assert of(effects, Send) == []  # remaining workers are killed and receive no message
    assert of(effects, Restart) == [Restart(2, KILLED, 2)]
    assert of(effects, Discard) == [Discard(3)] * (state is State.SAVING)
    assert job.state() is State.JOINING
    done = back.step if back else 0
    run = runs(job.start())[0]
    assert restores(job) == [None, back]
    assert (run.step, run.first, run.batch) == (done + 1, 0, BATCH)
    for step in range(done + 1, 4):
        job.step(step)
    job.evaluated(3)
    job.checkpointed()
    assert job.rows == [1, 2, 3]
    assert of(job.effects, Evaluation) == [evaluation_of(3)]
    assert (job.ended.status, job.ended.steps) == ("done", 3)
    assert job.ended.causes == (KILLED,)


@pytest.mark.parametrize(("batches", "done"), [(0, 0), (1, 1), (2, 1)])
def test_a_step_of_several_mini_batches_is_repeated_from_its_first(batches: int, done: int) -> None:
    """The snapshot of the first step is complete with the first mini-batch of the second."""
    job = replaceable_job(accumulate=3).running()
    for step in (1, 1, 1, *[2] * batches):
        job.step(step)
    job.exited(0, -9)
    run = runs(job.start())[0]
    assert (run.step, run.first) == (done + 1, 0)
    for number in (1, 2):
        run = runs(job.step(done + 1))[0]
        assert (run.step, run.first) == (done + 1, 4 * number)
    effects = job.step(done + 1)
    assert updates(effects) == [Update(done + 1, divisor=3.0)] * 2
    assert job.rows == [*range(1, done + 2)]


def test_no_copy_begins_within_a_step() -> None:
    """A forward may have changed buffers, as those of batch norm."""
    job = replaceable_job(accumulate=3).running()
    for step in (1, 1, 1):
        job.step(step)
    assert copies(job.effects) == [Copy(1, 0)] * 2
    for _ in range(2):  # the copy is not complete, so another one is due
        assert copies(job.step(2, snapshot_step=-1)) == []
    assert copies(job.step(2, snapshot_step=-1)) == [Copy(2, 1)] * 2


def test_without_a_snapshot_the_job_restarts_from_the_initial_weights() -> None:
    job = replaceable_job(snapshot_every=50).running()
    for step in (1, 2, 3):
        job.step(step)
    job.exited(1, -9)
    assert runs(job.start())[0].step == 1
    assert restores(job) == [None, None]


@pytest.mark.parametrize("copied", [False, True])
def test_the_first_evaluation_is_repeated_only_without_a_snapshot(copied: bool) -> None:
    """A snapshot of step 0 has what layers changed in that pass."""
    job = replaceable_job(evaluate_first=True, snapshot_every=50, checkpoint_every="end")
    job.start()
    job.evaluated(0)
    if copied:
        job.saved(0)
        job.step(1)
    job.exited(1, -9)
    (first, _) = messages_of(job.start(), Advance)
    assert restores(job)[-1] == (Restore(0, slot=0, ranks=2) if copied else None)
    assert isinstance(first.next, RunStep if copied else Evaluate)


def test_a_newer_checkpoint_is_preferred_to_the_snapshot() -> None:
    job = replaceable_job(snapshot_every=50, checkpoint_every="2", checkpoint_busy="wait").running()
    for step in (1, 2, 3):
        job.step(step)
    job.step(4)  # while the checkpoint of step 2 is written
    for step in (2, 4):
        job.saved(step)
        job.checkpoint_committed(step)
    assert job.state() is State.STEPPING
    job.exited(1, -9)
    assert runs(job.start())[0].step == 5
    assert restores(job) == [None, Restore(4, "checkpoints/4")]


def test_a_loss_during_a_restart_resumes_from_the_same_snapshot() -> None:
    job = replaceable_job().running()
    for step in (1, 2, 3):
        job.step(step)
    job.exited(1, -9)
    job.join()
    job.exited(0, -9)
    job.described()
    job.exited(1, -9)
    assert job.number == 4
    assert runs(job.start())[0].step == 3
    same = Restore(2, slot=1, ranks=2)
    assert restores(job) == [None, same, same, same]


def test_a_loss_before_the_first_repeated_step_resumes_from_the_same_snapshot() -> None:
    """Neither the new workers' unfinished copies nor those of the earlier ones are snapshots."""
    job = replaceable_job().running()
    for step in (1, 2):
        job.step(step)
    job.exited(1, -9)
    job.start()
    job.done(0, 2, snapshot_step=9)
    job.exited(1, -9)
    job.start()
    assert restores(job) == [None, *[Restore(1, slot=0, ranks=2)] * 2]
    assert copies(job.step(2)) == [Copy(2, 1)] * 2


# Repeated steps.


def test_repeated_steps_have_equal_commands_and_are_recorded_once() -> None:
    job = replaceable_job(snapshot_every=3, evaluate_every=1, clip_grad_norm=1.0, steps=5).running()

    def go(first: int, last: int) -> list[Effect]:
        effects = []
        for step in range(first, last + 1):
            effects += job.step(step, losses=(float(step),) * 4, squares=(step, 0.5))
            effects += job.evaluated(step, 0.1 * step)
        return effects

    def advances(effects: list[Effect]) -> list[Advance]:
        return [dataclasses.replace(a, copy=None) for a in messages_of(effects, Advance)]

    first = go(1, 4)
    job.exited(1, -9)
    assert runs(job.start())[0].step == 2
    repeated = go(2, 4)
    assert [row.step for row in of(first, StepResult)] == [1, 2, 3, 4]
    assert not of(repeated, StepResult)
    assert not of(repeated, Evaluation)
    assert (
        advances(repeated) == advances(first)[-12:]
    )  # three steps with an evaluation each, for two workers
    assert [e.step for e in of(job.effects, Evaluation)] == [1, 2, 3, 4]
    assert [row.step for row in of(go(5, 5), StepResult)] == [5]


def test_the_epoch_is_rolled_back_with_the_data() -> None:
    """Two mini-batches per epoch, one per step; the job resumes in the first epoch."""
    job = replaceable_job(steps=None, snapshot_every=3).running()
    batches = [dataclasses.replace(BATCH, epoch=epoch) for epoch in (0, 0, 1, 1, 2)]
    ended = [updates(job.step(step, batch=batches[step]))[0].epoch_ended for step in (1, 2, 3)]
    assert ended == [False, True, False]
    job.exited(1, -9)
    job.described()
    job.ready(batches[0])
    assert [updates(job.step(s, batch=batches[s]))[0].epoch_ended for s in (1, 2, 3)] == ended
    job.step(4, batch=batches[4])
    assert [row.epoch for row in of(job.effects, StepResult)] == [0, 0, 1, 1]


def test_the_loss_scale_is_rolled_back() -> None:
    job = replaceable_job(precision="fp16").running()
    scale = 2.0**16
    job.step(1)
    job.step(2, squares=(math.inf,))
    effects = job.step(3, squares=(math.inf,))
    assert runs(effects)[0].loss_scale == scale / 4
    job.exited(1, -9)
    assert restores(job)[-1:] == [None]
    run = runs(job.start())[0]
    assert (run.step, run.loss_scale) == (3, scale / 2)
    job.step(3)
    job.request_checkpoint()
    job.step(4)
    assert job.saved() == [commit(4, LossScaler(scale / 2, 2))]
    assert [row.loss_scale for row in of(job.effects, StepResult)] == [
        *(scale, scale, scale / 2, scale / 2)
    ]


def test_a_nan_loss_is_warned_about_once() -> None:
    job = replaceable_job(snapshot_every=50).running()
    job.step(1, losses=(math.nan,))
    job.exited(1, -9)
    job.start()
    job.step(1, losses=(math.nan,))
    assert (
        len([warning for warning in of(job.effects, Warned) if "loss is nan" in str(warning)]) == 1
    )


def test_a_recovery_is_reported_once_when_steps_run_again() -> None:
    job = replaceable_job().running()
    for step in (1, 2, 3):
        job.step(step)
    job.now += 10.0
    at = Position(Phase.FORWARD, 4, 2, 3)
    job.exited(1, -9, at)
    job.now += 2.5
    job.described()
    assert of(job.effects, Warned) == []
    where = "(layer 3 (Tanh), micro-batch 2, step 4)"
    back = "resumed after step 2, 1 step repeated, in 2.5 s"
    assert of(job.ready(), Warned) == [Warned(f"{KILLED} {where}; {back}")]
    job.step(3)
    job.step(4)
    assert len(of(job.effects, Warned)) == 1
    job.step(5)
    job.exited(0, -9)
    job.start()
    assert "after step 4, 1 step repeated, " in of(job.effects, Warned)[-1].text


@pytest.mark.parametrize(
    ("steps", "text"),
    [(0, "after step 0, no step repeated"), (3, "after step 0, 3 steps repeated")],
)
def test_the_number_of_repeated_steps_is_reported(steps: int, text: str) -> None:
    job = replaceable_job(snapshot_every=50).running()
    for step in range(1, steps + 1):
        job.step(step)
    job.exited(1, -9)
    job.start()
    assert text in of(job.effects, Warned)[-1].text


# Checkpoints.


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


def test_the_peak_memory_covers_all_generations() -> None:
    job = replaceable_job(steps=4).running()
    job.step(1, peak_memory=700)
    job.step(2, peak_memory=300)
    job.exited(1, -9)
    job.start()
    job.done(0, 2, peak_memory=900)
    job.receive(Failed(1, Failure(Cause.INTERNAL, "no")))
    assert job.ended.peak_memory == (900, 700)


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
