"""Checkpoints: beside steps, at the end, and whenever one is asked for."""

from __future__ import annotations

import dataclasses

import pytest

from pipeworker.coordinator.effects import Commit, Dropped, Log, Send, Status
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import State
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.checkpoint import Copy, File, Save, Saved
from pipeworker.wire.messages.evaluation import Evaluate, Evaluated, Evaluation
from pipeworker.wire.messages.step import RunStep, StepResult, Update
from support.coordinator import (
    BATCH,
    Scripted,
    commit,
    copies,
    of,
    of_messages,
    passed,
    replaced,
    saves,
)

BESIDE = Copy(1, 0, save=True)
"""The checkpoint of the first step, where workers have one memory."""


# Beside steps.


def test_a_checkpoint_that_is_asked_for_is_written_beside_the_next_step() -> None:
    job = Scripted(2, recompute="never").running()
    job.save_asked()
    assert job.state() is State.STEPPING
    effects = job.step(1)
    following = Advance(RunStep(2, BATCH, False), Update(1), BESIDE)
    assert of_messages(effects, Advance) == [following] * 2
    assert of(effects, StepResult)
    assert job.saved() == [commit(1)]
    assert job.state() is State.STEPPING
    assert of(job.committed(), Send) == []
    effects = job.step(2)  # asked for once, taken once
    assert of_messages(effects, Advance) == [Advance(RunStep(3, BATCH, True), Update(2))] * 2


def test_steps_go_on_while_parts_are_written() -> None:
    """However long the slower worker takes."""
    job = Scripted(2, steps=9).running()
    job.save_asked()
    job.step(1)
    files = [(File(f"model-{rank}", 10 + rank, 7),) for rank in job.ranks]
    assert job.says(Saved(1, 1, files[1])) == []
    for step in (2, 3):
        job.step(step)
    assert [run.step for run in job.runs(0)] == [1, 2, 3, 4]
    whole = dataclasses.replace(commit(1), files=(*files[0], *files[1]))
    assert job.says(Saved(0, 1, files[0])) == [whole]
    assert [type(effect) for effect in job.says(Saved(0, 1, files[0]))] == [Dropped]


def test_a_checkpoint_takes_no_part_in_the_seconds_of_a_step() -> None:
    job = Scripted(2).running()
    job.save_asked()
    job.step(1)
    job.now += 1.0
    job.saved()
    job.committed()
    assert of(job.step(2), StepResult)[0].seconds == 1.0


def test_one_that_holds_up_the_loop_is_not_part_of_the_next_step() -> None:
    job = Scripted(2, checkpoint_every="1", checkpoint_busy="wait").running()
    job.step(1)
    job.step(2)
    assert job.state() is State.SAVING
    job.now += 5.0
    job.saved(1)
    job.saved(2)
    job.now += 5.0
    job.committed(1)
    job.committed(2)
    job.now += 1.0
    assert of(job.step(3), StepResult)[0].seconds == 1.0


def test_asked_for_many_times_it_is_taken_once() -> None:
    job = Scripted(2).running()
    for _ in range(3):
        job.save_asked()
    assert copies(job.step(1)) == [BESIDE] * 2
    job.saved()
    job.committed()
    effects = job.step(2)
    assert (copies(effects), saves(effects)) == ([], [])


@pytest.mark.parametrize("joined", [False, True])
def test_before_the_first_step_it_is_taken_after_it(joined: bool) -> None:
    job = Scripted(2)
    if joined:
        job.join()
    job.save_asked()
    job.running() if not joined else (job.describe(), job.ready())
    assert copies(job.step(1)) == [BESIDE] * 2


def test_all_mini_batches_of_the_step_come_first() -> None:
    """What is between them is no state that can be gone on from."""
    job = Scripted(2, accumulate=2, checkpoint_every="1").running()
    job.save_asked()
    for step in (1, 2):
        assert copies(job.step(step)) == []
        effects = job.step(step)
        assert copies(effects) == [Copy(step, 0, save=True)] * 2
        updates = [a.update for a in of_messages(effects, Advance)]
        assert updates == [Update(step, 2.0)] * 2
        job.saved()


def test_a_checkpoint_comes_behind_the_evaluation_of_its_step() -> None:
    """What a scheduler made of its loss is in it, and who resumes has none to make up for."""
    job = Scripted(2, evaluate_every=1, recompute="never").running()
    job.save_asked()
    assert of_messages(job.step(1), Advance) == [Advance(Evaluate(1), Update(1))] * 2
    told = of_messages(job.evaluated(1), Advance)
    assert told == [Advance(RunStep(2, BATCH, False), Evaluated(0.5), BESIDE)] * 2
    assert job.saved() == [commit(1, evaluation=passed(1))]


def test_an_evaluation_of_another_step_is_not_that_of_the_checkpoint() -> None:
    job = Scripted(2, evaluate_every=1, steps=None).running()
    job.step(1)
    job.evaluated(1)
    job.save_asked()
    job.interrupt()
    job.step(2, batch=None)
    job.evaluated(2, 0.25)
    assert job.saved() == [commit(2, evaluation=passed(2, 0.25))]
    plain = Scripted(2, evaluate_every=2).running()
    for step in (1, 2):
        plain.step(step)
    plain.evaluated(2)
    plain.step(3)
    assert plain.saved() == [commit(3)]


@pytest.mark.parametrize("evaluate", [None, 2])
def test_every_so_many_steps(evaluate: int | None) -> None:
    job = Scripted(2, steps=5, checkpoint_every="2", evaluate_every=evaluate).running()
    for step in range(1, 6):
        job.step(step)
        if job.state() is State.EVALUATING:
            job.evaluated(step)
        if job.told_to_write(0)[-1:] == [step]:
            job.saved()
            job.committed()
    assert [done.step for done in of(job.effects, Commit)] == [2, 4, 5]
    assert [done.evaluation is not None for done in of(job.effects, Commit)] == [
        *([bool(evaluate)] * 2),
        False,
    ]
    assert job.ended.status is Status.DONE


def test_every_so_many_minutes() -> None:
    job = Scripted(1, steps=9, checkpoint_every="2m").running()
    for step in range(1, 10):
        job.now += 50.0
        job.step(step)
        if job.told_to_write(0)[-1:] == [step]:
            job.now += 15.0
            job.saved()
            job.committed()
    assert of(job.effects, Commit) == [commit(3), commit(6), commit(9)]


def test_time_passes_from_when_one_is_begun() -> None:
    """Else each step would begin another one for as long as it is written."""
    job = replaced(steps=99, checkpoint_every="2m", snapshot_every=50).running()
    begun = []
    for step in range(1, 13):
        job.now += 50.0
        begun += [copy.step for copy in copies(job.step(step))[:1]]
        if step in (5, 8, 11):
            job.saved()
            job.committed()
    assert begun == [3, 6, 9, 12]


def test_time_passes_from_an_attempt_that_failed_as_well() -> None:
    job = Scripted(1, steps=99, checkpoint_every="2m").running()
    for step in range(1, 6):
        job.now += 50.0
        told = copies(job.step(step))
        assert [copy.step for copy in told] == [3] * (step == 3)
        if told:
            job.saved(error="no space left")
    job.now += 50.0
    assert [copy.step for copy in copies(job.step(6))] == [6]


def test_asked_for_during_an_evaluation_it_comes_after_it() -> None:
    job = Scripted(2, evaluate_every=1).running()
    job.step(1)
    job.save_asked()
    effects = job.evaluated(1)
    assert copies(effects) == [BESIDE] * 2
    assert of(effects, Evaluation)


def test_asked_for_in_the_last_step_it_is_the_last_one() -> None:
    job = Scripted(1, steps=1).running()
    job.save_asked()
    job.step(1)
    job.saved()
    job.committed()
    assert job.ended.status is Status.DONE
    assert of(job.effects, Commit) == [commit(1)]


def test_asked_for_while_one_is_written_it_is_taken_after_the_step() -> None:
    job = Scripted(1).running()
    job.save_asked()
    job.step(1)
    job.save_asked()
    job.saved()
    job.save_asked()
    job.committed()
    assert copies(job.step(2)) == [Copy(2, 0, save=True)]
    job.saved()
    job.committed()
    job.step(3)
    job.saved()
    assert of(job.effects, Commit) == [commit(1), commit(2), commit(3)]


def test_the_last_one_comes_behind_those_that_are_still_written() -> None:
    job = Scripted(2, steps=2).running()
    job.save_asked()
    job.step(1)
    assert saves(job.step(2)) == [Advance(Save(2), Update(2))] * 2
    assert job.saved(1) == [commit(1)]
    job.committed()
    assert job.state() is State.SAVING
    assert job.saved(2) == [commit(2)]
    job.committed()
    assert job.ended.status is Status.DONE


def test_the_loss_scale_is_in_every_checkpoint() -> None:
    """That of the step that is written, however long it takes."""
    job = Scripted(1, precision="fp16", steps=9).running()
    job.save_asked()
    job.step(1)
    job.step(2)
    assert job.saved() == [commit(1, Scaler(2.0**16, 1))]


# While one is still being written.


def test_one_for_which_there_is_no_room_yet_is_skipped() -> None:
    job = Scripted(2, steps=9, checkpoint_every="1").running()
    assert copies(job.step(1)) == [BESIDE] * 2
    effects = job.step(2)
    assert (copies(effects), job.state()) == ([], State.STEPPING)
    assert of(effects, Log) == [Log("no checkpoint of step 2: others are still written")]
    job.saved()
    job.committed()
    effects = job.step(3)
    assert copies(effects) == [Copy(3, 0, save=True)] * 2
    assert of(effects, Log) == []


def test_one_that_is_asked_for_is_taken_as_soon_as_there_is_room() -> None:
    job = Scripted(2, steps=9).running()
    job.save_asked()
    job.step(1)
    job.save_asked()
    for step in (2, 3):
        assert copies(job.step(step)) == []
    job.saved(1)
    assert copies(job.step(4)) == [Copy(4, 0, save=True)] * 2
    job.saved(4)
    assert copies(job.step(5)) == []


def test_with_two_memories_two_may_be_on_their_way() -> None:
    """Both are whole copies; the third finds no room."""
    job = replaced(checkpoint_every="1").running()
    for step, slot in ((1, 0), (2, 1)):
        assert copies(job.step(step)) == [Copy(step, slot, save=True)] * 2
    assert copies(job.step(3)) == []
    job.saved(1)
    assert copies(job.step(4)) == [Copy(4, 0, save=True)] * 2
    assert job.saved(2) == [commit(2)]
    assert job.saved(4) == [commit(4)]


def test_with_checkpoint_busy_wait_the_loop_waits_instead() -> None:
    job = Scripted(2, steps=9, checkpoint_every="1", checkpoint_busy="wait").running()
    assert copies(job.step(1)) == [BESIDE] * 2
    assert saves(job.step(2)) == [Advance(Save(2), Update(2))] * 2
    assert job.state() is State.SAVING
    job.saved(1)
    assert job.state() is State.SAVING
    assert job.saved(2) == [commit(2)]
    job.committed(1)
    assert job.state() is State.COMMITTING
    job.committed(2)
    assert [run.step for run in job.runs(0)] == [1, 2, 3]
    assert copies(job.step(3)) == [Copy(3, 0, save=True)] * 2  # nothing is being written


# Interrupts.


def test_an_interrupt_ends_the_job_with_a_checkpoint_of_the_step() -> None:
    job = Scripted(2).running()
    job.interrupt()
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2
    assert job.saved() == [commit(1)]
    job.committed()
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 1)


def test_an_interrupt_while_one_is_written_saves_the_end_of_the_step_as_well() -> None:
    job = Scripted(2).running()
    job.save_asked()
    job.step(1)
    job.interrupt()
    job.step(2)
    job.saved(1)
    job.saved(2)
    job.committed(1)
    assert not job.job.over
    job.committed(2)
    assert of(job.effects, Commit) == [commit(1), commit(2)]
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 2)


def test_an_interrupt_while_the_loop_is_held_up_ends_behind_the_checkpoint() -> None:
    job = Scripted(2, steps=9, checkpoint_every="1", checkpoint_busy="wait").running()
    job.step(1)
    job.step(2)
    job.interrupt()
    job.saved(1)
    assert job.saved(2) == [commit(2)]
    job.committed(1)
    job.committed(2)
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 2)


def test_a_checkpoint_that_is_asked_for_and_an_interrupt_give_one() -> None:
    job = Scripted(2).running()
    job.save_asked()
    job.interrupt()
    effects = job.step(1)
    assert (len(saves(effects)), copies(effects)) == (2, [])
    job.saved()
    job.committed()
    assert job.ended.status is Status.INTERRUPTED
    assert of(job.effects, Commit) == [commit(1)]


def test_an_interrupt_waits_for_the_evaluation_that_is_due() -> None:
    """Else who resumes would lack it."""
    job = Scripted(2, evaluate_every=1).running()
    job.interrupt()
    assert saves(job.step(1)) == []
    assert job.state() is State.EVALUATING
    assert saves(job.evaluated(1)) == [Advance(Save(1), Evaluated(0.5))] * 2
