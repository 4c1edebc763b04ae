"""Checkpoints: beside steps, at the end, and on request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeworker.coordinator.effects import Commit, Dropped, Log, Send
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.waiting import State
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import Evaluate, Evaluated, RunStep, Update
from support.pure.coordinator import (
    BATCH,
    ScriptedJob,
    commit,
    copies,
    evaluation_of,
    messages_of,
    of,
    replaceable_job,
    saves,
)

BESIDE = Copy(1, 0, save=True)
"""The checkpoint of the first step, if workers have one slot."""


# Beside steps.


def test_a_requested_checkpoint_is_written_beside_the_next_step() -> None:
    job = ScriptedJob(2, recompute="never").running()
    job.request_checkpoint()
    assert job.state() is State.STEPPING
    effects = job.step(1)
    following = Advance(RunStep(2, BATCH, False), Update(1), BESIDE)
    assert messages_of(effects, Advance) == [following] * 2
    assert of(effects, StepResult)
    assert job.saved() == [commit(1)]
    assert job.state() is State.STEPPING
    assert of(job.checkpoint_committed(), Send) == []
    effects = job.step(2)  # requested once, saved once
    assert messages_of(effects, Advance) == [Advance(RunStep(3, BATCH, True), Update(2))] * 2


def test_steps_continue_while_parts_are_written() -> None:
    """However long the slower worker takes to write."""
    job = ScriptedJob(2, steps=9).running()
    job.request_checkpoint()
    job.step(1)
    files = [(CheckpointFile(f"model-{rank}", 10 + rank, 7),) for rank in job.ranks]
    assert job.receive(Saved(1, 1, files[1])) == []
    for step in (2, 3):
        job.step(step)
    assert [run.step for run in job.runs(0)] == [1, 2, 3, 4]
    whole = dataclasses.replace(commit(1), files=(*files[0], *files[1]))
    assert job.receive(Saved(0, 1, files[0])) == [whole]
    assert [type(effect) for effect in job.receive(Saved(0, 1, files[0]))] == [Dropped]


def test_writing_a_checkpoint_does_not_count_towards_step_time() -> None:
    job = ScriptedJob(2).running()
    job.request_checkpoint()
    job.step(1)
    job.now += 1.0
    job.checkpointed()
    assert of(job.step(2), StepResult)[0].seconds == 1.0


def test_a_blocking_checkpoint_does_not_count_towards_the_next_step() -> None:
    job = ScriptedJob(2, checkpoint_every="1", checkpoint_busy="wait").running()
    job.step(1)
    job.step(2)
    assert job.state() is State.SAVING
    job.now += 5.0
    job.saved(1)
    job.saved(2)
    job.now += 5.0
    job.checkpoint_committed(1)
    job.checkpoint_committed(2)
    job.now += 1.0
    assert of(job.step(3), StepResult)[0].seconds == 1.0


def test_a_checkpoint_requested_many_times_is_saved_once() -> None:
    job = ScriptedJob(2).running()
    for _ in range(3):
        job.request_checkpoint()
    assert copies(job.step(1)) == [BESIDE] * 2
    job.checkpointed()
    effects = job.step(2)
    assert (copies(effects), saves(effects)) == ([], [])


@pytest.mark.parametrize("joined", [False, True])
def test_a_checkpoint_requested_before_the_first_step_is_saved_after_it(joined: bool) -> None:
    job = ScriptedJob(2)
    if joined:
        job.join()
    job.request_checkpoint()
    job.running() if not joined else (job.describe(), job.ready())
    assert copies(job.step(1)) == [BESIDE] * 2


def test_a_checkpoint_waits_for_all_mini_batches_of_the_step() -> None:
    """The state between two of them cannot be resumed from."""
    job = ScriptedJob(2, accumulate=2, checkpoint_every="1").running()
    job.request_checkpoint()
    for step in (1, 2):
        assert copies(job.step(step)) == []
        effects = job.step(step)
        assert copies(effects) == [Copy(step, 0, save=True)] * 2
        updates = [a.update for a in messages_of(effects, Advance)]
        assert updates == [Update(step, 2.0)] * 2
        job.saved()


def test_a_checkpoint_follows_the_evaluation_of_its_step() -> None:
    """It includes the effect of the loss on a scheduler, and a resumed run need not repeat it."""
    job = ScriptedJob(2, evaluate_every=1, recompute="never").running()
    job.request_checkpoint()
    assert messages_of(job.step(1), Advance) == [Advance(Evaluate(1), Update(1))] * 2
    advances = messages_of(job.evaluated(1), Advance)
    assert advances == [Advance(RunStep(2, BATCH, False), Evaluated(0.5), BESIDE)] * 2
    assert job.saved() == [commit(1, evaluation=evaluation_of(1))]


def test_a_checkpoint_has_only_the_evaluation_of_its_own_step() -> None:
    job = ScriptedJob(2, evaluate_every=1, steps=None).running()
    job.step(1)
    job.evaluated(1)
    job.request_checkpoint()
    job.step(2, batch=None)
    job.evaluated(2, 0.25)
    assert job.saved() == [commit(2, evaluation=evaluation_of(2, 0.25))]
    plain = ScriptedJob(2, evaluate_every=2).running()
    for step in (1, 2):
        plain.step(step)
    plain.evaluated(2)
    plain.step(3)
    assert plain.saved() == [commit(3)]


@pytest.mark.parametrize("evaluate", [None, 2])
def test_every_so_many_steps(evaluate: int | None) -> None:
    job = ScriptedJob(2, steps=5, checkpoint_every="2", evaluate_every=evaluate).running()
    for step in range(1, 6):
        job.step(step)
        if job.state() is State.EVALUATING:
            job.evaluated(step)
        if job.saves_requested(0)[-1:] == [step]:
            job.checkpointed()
    assert [done.state.step for done in of(job.effects, Commit)] == [2, 4, 5]
    assert [done.state.evaluation is not None for done in of(job.effects, Commit)] == [
        *([bool(evaluate)] * 2),
        False,
    ]
    assert job.ended.status == "done"


def test_every_so_many_minutes() -> None:
    job = ScriptedJob(1, steps=9, checkpoint_every="2m").running()
    for step in range(1, 10):
        job.now += 50.0
        job.step(step)
        if job.saves_requested(0)[-1:] == [step]:
            job.now += 15.0
            job.checkpointed()
    assert of(job.effects, Commit) == [commit(3), commit(6), commit(9)]


def test_without_an_option_there_is_a_checkpoint_every_half_hour() -> None:
    assert saved_steps(minutes=20.0) == [2, 4, 6, 8, 9]
    assert saved_steps(minutes=20.0, checkpoint_every="end") == [9]
    assert saved_steps(minutes=3.0) == [9]


def saved_steps(minutes: float, **options: Any) -> list[int]:
    """Return the steps that a job of nine steps, each of so many minutes, saves."""
    job = ScriptedJob(1, steps=9, **options).running()
    for step in range(1, 10):
        job.now += 60.0 * minutes
        job.step(step)
        if job.saves_requested(0)[-1:] == [step]:
            job.checkpointed()
    return [commit.state.step for commit in of(job.effects, Commit)]


def test_the_interval_starts_when_a_checkpoint_begins() -> None:
    """Otherwise each step would begin another one while it is written."""
    job = replaceable_job(steps=99, checkpoint_every="2m", snapshot_every=50).running()
    saved_steps = []
    for step in range(1, 13):
        job.now += 50.0
        saved_steps += [copy.step for copy in copies(job.step(step))[:1]]
        if step in (5, 8, 11):
            job.checkpointed()
    assert saved_steps == [3, 6, 9, 12]


def test_the_interval_starts_at_a_failed_checkpoint_too() -> None:
    job = ScriptedJob(1, steps=99, checkpoint_every="2m").running()
    for step in range(1, 6):
        job.now += 50.0
        copied = copies(job.step(step))
        assert [copy.step for copy in copied] == [3] * (step == 3)
        if copied:
            job.saved(error="no space left")
    job.now += 50.0
    assert [copy.step for copy in copies(job.step(6))] == [6]


def test_a_checkpoint_requested_during_an_evaluation_follows_it() -> None:
    job = ScriptedJob(2, evaluate_every=1).running()
    job.step(1)
    job.request_checkpoint()
    effects = job.evaluated(1)
    assert copies(effects) == [BESIDE] * 2
    assert of(effects, Evaluation)


def test_a_checkpoint_requested_in_the_last_step_is_the_final_one() -> None:
    job = ScriptedJob(1, steps=1).running()
    job.request_checkpoint()
    job.step(1)
    job.checkpointed()
    assert job.ended.status == "done"
    assert of(job.effects, Commit) == [commit(1)]


def test_a_checkpoint_requested_while_one_is_written_follows_the_step() -> None:
    job = ScriptedJob(1).running()
    job.request_checkpoint()
    job.step(1)
    job.request_checkpoint()
    job.saved()
    job.request_checkpoint()
    job.checkpoint_committed()
    assert copies(job.step(2)) == [Copy(2, 0, save=True)]
    job.checkpointed()
    job.step(3)
    job.saved()
    assert of(job.effects, Commit) == [commit(1), commit(2), commit(3)]


def test_the_final_checkpoint_follows_those_being_written() -> None:
    job = ScriptedJob(2, steps=2).running()
    job.request_checkpoint()
    job.step(1)
    assert saves(job.step(2)) == [Advance(Save(2), Update(2))] * 2
    assert job.saved(1) == [commit(1)]
    job.checkpoint_committed()
    assert job.state() is State.SAVING
    assert job.saved(2) == [commit(2)]
    job.checkpoint_committed()
    assert job.ended.status == "done"


def test_every_checkpoint_has_the_loss_scale() -> None:
    """It is that of the saved step, however long writing takes."""
    job = ScriptedJob(1, precision="fp16", steps=9).running()
    job.request_checkpoint()
    job.step(1)
    job.step(2)
    assert job.saved() == [commit(1, LossScaler(2.0**16, 1))]


# While a checkpoint is being written.


def test_a_periodic_checkpoint_without_a_free_slot_is_skipped() -> None:
    job = ScriptedJob(2, steps=9, checkpoint_every="1", checkpoint_busy="skip").running()
    assert copies(job.step(1)) == [BESIDE] * 2
    effects = job.step(2)
    assert (copies(effects), job.state()) == ([], State.STEPPING)
    assert of(effects, Log) == [Log("no checkpoint of step 2: earlier ones are being written")]
    job.checkpointed()
    effects = job.step(3)
    assert copies(effects) == [Copy(3, 0, save=True)] * 2
    assert of(effects, Log) == []


def test_a_requested_checkpoint_waits_for_a_free_slot() -> None:
    job = ScriptedJob(2, steps=9).running()
    job.request_checkpoint()
    job.step(1)
    job.request_checkpoint()
    for step in (2, 3):
        assert copies(job.step(step)) == []
    job.saved(1)
    assert copies(job.step(4)) == [Copy(4, 0, save=True)] * 2
    job.saved(4)
    assert copies(job.step(5)) == []


def test_with_two_slots_two_checkpoints_may_be_written() -> None:
    """Both are complete copies; there is no slot for a third."""
    job = replaceable_job(checkpoint_every="1", checkpoint_busy="skip").running()
    for step, slot in ((1, 0), (2, 1)):
        assert copies(job.step(step)) == [Copy(step, slot, save=True)] * 2
    assert copies(job.step(3)) == []
    job.saved(1)
    assert copies(job.step(4)) == [Copy(4, 0, save=True)] * 2
    assert job.saved(2) == [commit(2)]
    assert job.saved(4) == [commit(4)]


@pytest.mark.parametrize("busy", ["wait", None])
def test_with_checkpoint_busy_wait_the_loop_waits(busy: str | None) -> None:
    job = ScriptedJob(2, steps=9, checkpoint_every="1", checkpoint_busy=busy).running()
    assert copies(job.step(1)) == [BESIDE] * 2
    assert saves(job.step(2)) == [Advance(Save(2), Update(2))] * 2
    assert job.state() is State.SAVING
    job.saved(1)
    assert job.state() is State.SAVING
    assert job.saved(2) == [commit(2)]
    job.checkpoint_committed(1)
    assert job.state() is State.COMMITTING
    job.checkpoint_committed(2)
    assert [run.step for run in job.runs(0)] == [1, 2, 3]
    assert copies(job.step(3)) == [Copy(3, 0, save=True)] * 2  # nothing is being written


def test_with_time_between_checkpoints_one_is_skipped() -> None:
    job = ScriptedJob(2, steps=9, checkpoint_every="1s").running()
    job.now += 1.0
    assert copies(job.step(1)) == [BESIDE] * 2
    job.now += 1.0
    assert (copies(job.step(2)), job.state()) == ([], State.STEPPING)


# Interrupts.


def test_an_interrupt_ends_the_job_with_a_checkpoint_of_the_step() -> None:
    job = ScriptedJob(2).running()
    job.interrupt()
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2
    assert job.saved() == [commit(1)]
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == ("interrupted", 1)


def test_an_interrupt_while_a_checkpoint_is_written_saves_the_step_too() -> None:
    job = ScriptedJob(2).running()
    job.request_checkpoint()
    job.step(1)
    job.interrupt()
    job.step(2)
    job.saved(1)
    job.saved(2)
    job.checkpoint_committed(1)
    assert not job.job.end
    job.checkpoint_committed(2)
    assert of(job.effects, Commit) == [commit(1), commit(2)]
    assert (job.ended.status, job.ended.steps) == ("interrupted", 2)


def test_an_interrupt_during_a_blocking_checkpoint_ends_after_it() -> None:
    job = ScriptedJob(2, steps=9, checkpoint_every="1", checkpoint_busy="wait").running()
    job.step(1)
    job.step(2)
    job.interrupt()
    job.saved(1)
    assert job.saved(2) == [commit(2)]
    job.checkpoint_committed(1)
    job.checkpoint_committed(2)
    assert (job.ended.status, job.ended.steps) == ("interrupted", 2)


def test_a_requested_checkpoint_and_an_interrupt_save_once() -> None:
    job = ScriptedJob(2).running()
    job.request_checkpoint()
    job.interrupt()
    effects = job.step(1)
    assert (len(saves(effects)), copies(effects)) == (2, [])
    job.checkpointed()
    assert job.ended.status == "interrupted"
    assert of(job.effects, Commit) == [commit(1)]
