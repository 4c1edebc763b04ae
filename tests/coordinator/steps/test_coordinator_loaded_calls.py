"""The state of an own loop that its calls change: a loaded checkpoint, the end of an epoch."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import Commit, Withdraw
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import StepResult
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.presence import Failed
from pipeworker.wire.messages.step import (
    CallKind,
    EpochEnded,
    Loaded,
    RunStep,
    Wait,
)
from support.pure.coordinator import (
    BATCH,
    ScriptedJob,
    closed,
    commit,
    messages_of,
    of,
    own_loop_job,
    saves,
)


def test_steps_continue_from_a_loaded_checkpoint() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.step(1)
    loaded = Loaded(7)
    assert messages_of(job.called(CallKind.LOAD, loaded=loaded), Advance) == [Advance(Wait())] * 2
    effects = job.called(CallKind.STEP)
    assert [a.next for a in messages_of(effects, Advance)] == [RunStep(8, BATCH, False)] * 2
    assert [row.step for row in of(job.step(8), StepResult)] == [8]
    assert saves(closed(job)) == [Advance(Save(8))] * 2
    assert job.ended.steps == 8


def test_steps_repeated_after_a_load_are_recorded_again() -> None:
    """They are other steps, because they have other mini-batches."""
    job = own_loop_job()
    for step in (1, 2):
        job.called(CallKind.STEP)
        job.step(step)
    job.called(CallKind.LOAD, loaded=Loaded(1))
    job.called(CallKind.STEP)
    assert [row.step for row in of(job.step(2), StepResult)] == [2]


def saved_after(steps: int) -> ScriptedJob:
    """Return the job of a loop that has saved its last step."""
    job = own_loop_job()
    for step in range(1, steps + 1):
        job.called(CallKind.STEP)
        job.step(step)
    job.called(CallKind.SAVE)
    job.checkpointed()
    return job


def test_a_repeated_step_whose_update_fails_is_not_recorded() -> None:
    """The checkpoint of a step that the loop has left says nothing about its update."""
    job = saved_after(2)
    job.called(CallKind.LOAD, loaded=Loaded(1))
    job.called(CallKind.STEP)
    job.step(2)
    position = Position(Phase.UPDATE, 2)
    job.receive(Failed(1, Failure(Cause.USER, "the optimizer raised", position=position)))
    job.saved(error="the optimizer raised")
    assert of(job.effects, Withdraw) == [Withdraw(2)]
    assert (job.ended.status, job.ended.steps) == ("failed", 1)


@pytest.mark.parametrize(
    ("loaded", "scale"),
    [(Loaded(3, 8.0, 5), LossScaler(8.0, 5)), (Loaded(3), LossScaler(2.0**16, 0))],
)
def test_a_loss_scale_is_loaded_with_its_checkpoint(loaded: Loaded, scale: LossScaler) -> None:
    job = own_loop_job(precision="fp16")
    job.called(CallKind.LOAD, loaded=loaded)
    job.called(CallKind.SAVE)
    assert job.saved() == [commit(3, scale)]
    job.checkpoint_committed()
    job.called(CallKind.STEP)
    assert job.runs(0)[-1].loss_scale == scale.scale
    plain = own_loop_job()
    plain.called(CallKind.LOAD, loaded=Loaded(3, 8.0))
    plain.called(CallKind.STEP)
    assert plain.runs(0)[-1].loss_scale == 1.0


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_loaded_state_counts_as_unsaved(step: int) -> None:
    """Even if there is a checkpoint of the same or of a later step."""
    job = saved_after(2)
    job.called(CallKind.LOAD, loaded=Loaded(step))
    assert saves(closed(job)) == [Advance(Save(step))] * 2
    assert job.ended.steps == step


def test_the_end_of_an_epoch_changes_the_state_on_all_ranks() -> None:
    job = saved_after(1)
    assert job.called(CallKind.END_EPOCH, 1) == []
    effects = job.called(CallKind.END_EPOCH, 0)
    assert messages_of(effects, Advance) == [Advance(Wait(), EpochEnded(1))] * 2
    job.called(CallKind.STEP)
    assert [row.epoch for row in of(job.step(2), StepResult)] == [1]


def test_a_checkpoint_that_is_older_than_the_end_of_an_epoch_is_written_again() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.step(1)
    for _ in range(2):
        job.called(CallKind.SAVE)
        job.checkpointed()
        job.called(CallKind.END_EPOCH)
    assert saves(closed(job)) == [Advance(Save(1))] * 2
    assert [commit.state.epoch for commit in of(job.effects, Commit)] == [0, 1, 2]


def test_the_epoch_is_loaded_with_its_checkpoint() -> None:
    job = own_loop_job()
    job.called(CallKind.LOAD, loaded=Loaded(7, epoch=3))
    job.called(CallKind.STEP)
    assert [row.epoch for row in of(job.step(8), StepResult)] == [3]
