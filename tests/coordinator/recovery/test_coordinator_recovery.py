"""Recovery: after the loss of a worker the job resumes from the last snapshot with new workers."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pipeworker.coordinator.effects import Discard, Effect, Send
from pipeworker.coordinator.events import Moved
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.lines import Restart, Warned
from pipeworker.wire.messages.checkpoint import Copy, Restore
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
    restores,
    runs,
    updates,
)

KILLED = "the worker of stage 1 was killed by SIGKILL"


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


def test_the_peak_memory_covers_all_generations() -> None:
    job = replaceable_job(steps=4).running()
    job.step(1, peak_memory=700)
    job.step(2, peak_memory=300)
    job.exited(1, -9)
    job.start()
    job.done(0, 2, peak_memory=900)
    job.receive(Failed(1, Failure(Cause.INTERNAL, "no")))
    assert job.ended.peak_memory == (900, 700)
