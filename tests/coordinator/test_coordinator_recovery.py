"""A worker is lost: the job goes on from the last snapshot with others in the workers' places."""

from __future__ import annotations

import dataclasses
import math

import pytest

from pipeworker.coordinator.effects import Discard, Dropped, Effect, Send, Status, Warn
from pipeworker.coordinator.job import Start
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import State
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.wire.lines import Again
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.checkpoint import Copy, Restore, Saved
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.failure import Cause, Failed, Failure
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Welcome
from pipeworker.wire.messages.step import StepResult, Update
from support.coordinator import (
    BATCH,
    Scripted,
    commit,
    copies,
    of,
    of_messages,
    passed,
    replaced,
    runs,
    updates,
)

KILLED = "the worker of stage 1 was killed by signal 9"


def restores(job: Scripted) -> list[Restore | None]:
    """What each generation of a worker was told to begin with."""
    return [welcome.restore for welcome in job.sent(1, Welcome)]


# From where.


def at(state: State) -> Scripted:
    """A job of three steps that is there, of the last one; of the third, where it steps."""
    job = replaced(evaluate_every=3, steps=3)
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
        (State.STEPPING, Restore(1, slot=0, ranks=2)),  # 2 is not yet known to be whole
        (State.EVALUATING, Restore(2, slot=1, ranks=2)),
        (State.SAVING, Restore(2, slot=1, ranks=2)),
        (State.COMMITTING, Restore(2, slot=1, ranks=2)),
    ],
    ids=lambda value: value.value if isinstance(value, State) else "",
)
def test_whatever_a_job_waits_for_it_goes_on_from_its_last_snapshot(
    state: State, back: Restore | None
) -> None:
    job = at(state)
    assert job.state() is state
    effects = job.exited(1, -9)
    assert of(effects, Send) == []  # who is left is ended, not told
    assert of(effects, Again) == [Again(2, f"{KILLED} (stage 1)", 2)]
    assert of(effects, Discard) == [Discard(3)] * (state is State.SAVING)
    assert job.state() is State.JOINING
    done = back.step if back else 0
    run = runs(job.again())[0]
    assert restores(job) == [None, back]
    assert (run.step, run.first, run.batch) == (done + 1, 0, BATCH)
    for step in range(done + 1, 4):
        job.step(step)
    job.evaluated(3)
    job.saved()
    job.committed()
    assert job.rows == [1, 2, 3]
    assert of(job.effects, Evaluation) == [passed(3)]
    assert (job.ended.status, job.ended.steps) == (Status.DONE, 3)
    assert job.ended.causes == (f"{KILLED} (stage 1)",)


@pytest.mark.parametrize(("batches", "done"), [(0, 0), (1, 1), (2, 1)])
def test_a_step_of_several_mini_batches_begins_with_its_first_again(
    batches: int, done: int
) -> None:
    """The snapshot of the first step is whole with the first mini-batch of the second."""
    job = replaced(accumulate=3).running()
    for step in (1, 1, 1, *[2] * batches):
        job.step(step)
    job.exited(0, -9)
    run = runs(job.again())[0]
    assert (run.step, run.first) == (done + 1, 0)
    for number in (1, 2):
        run = runs(job.step(done + 1))[0]
        assert (run.step, run.first) == (done + 1, 4 * number)
    effects = job.step(done + 1)
    assert updates(effects) == [Update(done + 1, divisor=3.0)] * 2
    assert job.rows == [*range(1, done + 2)]


def test_without_a_snapshot_it_begins_with_the_initial_weights() -> None:
    job = replaced(snapshot_every=50).running()
    for step in (1, 2, 3):
        job.step(step)
    job.exited(1, -9)
    assert runs(job.again())[0].step == 1
    assert restores(job) == [None, None]


def test_a_checkpoint_on_disk_serves_where_memory_has_less() -> None:
    job = replaced(snapshot_every=50, checkpoint_every="2", checkpoint_busy="wait").running()
    for step in (1, 2, 3):
        job.step(step)
    job.step(4)  # while 2 is still being written
    for step in (2, 4):
        job.saved(step)
        job.committed(step)
    assert job.state() is State.STEPPING
    job.exited(1, -9)
    assert runs(job.again())[0].step == 5
    assert restores(job) == [None, Restore(4, "checkpoints/4")]


def test_a_loss_on_the_way_back_goes_back_to_the_same() -> None:
    job = replaced().running()
    for step in (1, 2, 3):
        job.step(step)
    job.exited(1, -9)
    job.join()
    job.exited(0, -9)
    job.join()
    job.describe()
    job.exited(1, -9)
    assert job.number == 4
    assert runs(job.again())[0].step == 3
    same = Restore(2, slot=1, ranks=2)
    assert restores(job) == [None, same, same, same]


def test_a_loss_before_the_first_step_again_goes_back_to_the_same() -> None:
    """What the new workers copy is no snapshot until it is whole, nor is what the old ones did."""
    job = replaced().running()
    for step in (1, 2):
        job.step(step)
    job.exited(1, -9)
    job.again()
    job.done(0, 2, copied=9)
    job.exited(1, -9)
    job.again()
    assert restores(job) == [None, *[Restore(1, slot=0, ranks=2)] * 2]
    assert copies(job.step(2)) == [Copy(2, 1)] * 2


# What is done again.


def test_what_is_repeated_is_told_as_the_first_time_and_recorded_once() -> None:
    job = replaced(snapshot_every=2, evaluate_every=1, clip_grad_norm=1.0, steps=5).running()

    def go(first: int, last: int) -> list[Effect]:
        effects = []
        for step in range(first, last + 1):
            effects += job.step(step, losses=(float(step),) * 4, squares=(step, 0.5))
            effects += job.evaluated(step, 0.1 * step)
        return effects

    def told(effects: list[Effect]) -> list[Advance]:
        return [dataclasses.replace(a, copy=None) for a in of_messages(effects, Advance)]

    first = go(1, 4)
    job.exited(1, -9)
    assert runs(job.again())[0].step == 3
    repeated = go(3, 4)
    assert [row.step for row in of(first, StepResult)] == [1, 2, 3, 4]
    assert not of(repeated, StepResult)
    assert not of(repeated, Evaluation)
    assert told(repeated) == told(first)[-8:]  # two steps with an evaluation each, of two workers
    assert [e.step for e in of(job.effects, Evaluation)] == [1, 2, 3, 4]
    assert [row.step for row in of(go(5, 5), StepResult)] == [5]


def test_the_epoch_goes_back_with_the_data() -> None:
    """Two mini-batches an epoch, one a step, and back into the first epoch."""
    job = replaced(steps=None, snapshot_every=3).running()
    batches = [dataclasses.replace(BATCH, epoch=epoch) for epoch in (0, 0, 1, 1, 2)]
    ended = [updates(job.step(step, batch=batches[step]))[0].epoch_ended for step in (1, 2, 3)]
    assert ended == [False, True, False]
    job.exited(1, -9)
    job.join()
    job.describe()
    job.ready(batches[0])
    assert [updates(job.step(s, batch=batches[s]))[0].epoch_ended for s in (1, 2, 3)] == ended
    job.step(4, batch=batches[4])
    assert [row.epoch for row in of(job.effects, StepResult)] == [0, 0, 1, 1]


def test_the_loss_scale_goes_back() -> None:
    job = replaced(precision="fp16").running()
    scale = 2.0**16
    job.step(1)
    job.step(2, squares=(math.inf,))
    effects = job.step(3, squares=(math.inf,))
    assert runs(effects)[0].loss_scale == scale / 4
    job.exited(1, -9)
    assert restores(job)[-1:] == [None]
    run = runs(job.again())[0]
    assert (run.step, run.loss_scale) == (3, scale / 2)
    job.step(3)
    job.save_asked()
    job.step(4)
    assert job.saved() == [commit(4, Scaler(scale / 2, 2))]
    assert [row.loss_scale for row in of(job.effects, StepResult)] == [
        *(scale, scale, scale / 2, scale / 2)
    ]


def test_a_loss_that_is_no_number_is_warned_about_once() -> None:
    job = replaced(snapshot_every=50).running()
    job.step(1, losses=(math.nan,))
    job.exited(1, -9)
    job.again()
    job.step(1, losses=(math.nan,))
    assert len([warning for warning in of(job.effects, Warn) if "loss is nan" in str(warning)]) == 1


def test_the_user_hears_of_it_once_as_soon_as_steps_run_again() -> None:
    job = replaced().running()
    for step in (1, 2, 3):
        job.step(step)
    job.now += 10.0
    at = Position(Phase.FORWARD, 4, 2, 3)
    job.exited(1, -9, at)
    job.now += 2.5
    job.join()
    job.describe()
    assert of(job.effects, Warn) == []
    where = "(stage 1, layer 3 (Tanh), micro-batch 2, step 4)"
    back = "went on after step 2, 1 step repeated, in 2.5 s"
    assert of(job.ready(), Warn) == [Warn(f"{KILLED} {where}; {back}")]
    job.step(3)
    job.step(4)
    assert len(of(job.effects, Warn)) == 1
    job.step(5)
    job.exited(0, -9)
    job.again()
    assert "after step 4, 1 step repeated, " in of(job.effects, Warn)[-1].text


@pytest.mark.parametrize(
    ("steps", "said"),
    [(0, "after step 0, nothing repeated"), (3, "after step 0, 3 steps repeated")],
)
def test_how_many_steps_are_repeated_is_said(steps: int, said: str) -> None:
    job = replaced(snapshot_every=50).running()
    for step in range(1, steps + 1):
        job.step(step)
    job.exited(1, -9)
    job.again()
    assert said in of(job.effects, Warn)[-1].text


# Checkpoints.


def test_a_checkpoint_that_was_being_written_is_taken_on_the_way_back() -> None:
    """Parts of it are lost with who wrote them, and it had been asked for."""
    job = replaced().running()
    job.save_asked()
    for step in (1, 2, 3):
        job.step(step)
    job.says(Saved(0, 1))
    effects = job.exited(1, -9)
    assert of(effects, Discard) == [Discard(1)]
    job.again()
    assert [type(effect) for effect in job.says(Saved(1, 1))] == [Dropped]
    assert copies(job.step(3)) == [Copy(3, 0, save=True)] * 2
    assert job.saved() == [commit(3)]
    job.committed()
    assert not [copy for copy in copies(job.step(4)) if copy.save]


def test_a_checkpoint_that_was_asked_for_is_not_forgotten() -> None:
    job = replaced().running()
    job.step(1)
    job.save_asked()
    job.exited(1, -9)
    job.again()
    assert copies(job.step(1)) == [Copy(1, 0, save=True)] * 2


def test_what_a_checkpoint_has_is_not_written_again_on_the_way_to_it() -> None:
    """Another coordinator had come to step 9; this one goes on from what is in memory."""
    start = Start(snapshot=(Mark(5), Restore(5, slot=1, ranks=2)), recorded=9, saved=8)
    job = replaced(start=start, checkpoint_every="2", steps=99).running()
    job.save_asked()
    for step in range(6, 11):
        told = copies(job.step(step))
        assert [copy.step for copy in told if copy.save] == [10, 10] * (step == 10)


def test_the_peak_of_memory_is_that_of_all_generations() -> None:
    job = replaced(steps=4).running()
    job.step(1, peak_memory=700)
    job.step(2, peak_memory=300)
    job.exited(1, -9)
    job.again()
    job.done(0, 2, peak_memory=900)
    job.says(Failed(1, Failure(Cause.INTERNAL, "no")))
    assert job.ended.peak_memory == (900, 700)
