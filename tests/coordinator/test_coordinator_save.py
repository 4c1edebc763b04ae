"""Checkpoints: at the end, and whenever one is asked for."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import Commit, Effect, Status
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import State
from pipeworker.wire.messages import (
    Advance,
    CallKind,
    Evaluate,
    Evaluated,
    Evaluation,
    RunStep,
    Save,
    StepResult,
    Update,
    Wait,
)
from support.coordinator import BATCH, Scripted, commit, of, of_messages, own


def saves(effects: list[Effect]) -> list[Advance]:
    return [a for a in of_messages(effects, Advance) if isinstance(a.next, Save)]


def test_a_checkpoint_that_is_asked_for_stands_between_two_steps() -> None:
    job = Scripted(2, recompute="never").running()
    job.save_asked()
    assert job.state() is State.STEPPING
    effects = job.step(1)
    assert of_messages(effects, Advance) == [Advance(Save(1), Update(1))] * 2
    assert of(effects, StepResult)
    assert job.saved() == [commit(1)]
    assert job.state() is State.COMMITTING
    following = Advance(RunStep(2, BATCH, False))
    assert of_messages(job.committed(), Advance) == [following] * 2
    assert job.state() is State.STEPPING
    effects = job.step(2)  # asked for once, taken once
    assert of_messages(effects, Advance) == [Advance(RunStep(3, BATCH, True), Update(2))] * 2


def test_a_checkpoint_is_not_part_of_the_next_step() -> None:
    job = Scripted(2).running()
    job.save_asked()
    job.step(1)
    job.now += 5.0
    job.saved()
    job.now += 5.0
    job.committed()
    job.now += 1.0
    assert of(job.step(2), StepResult)[0].seconds == 1.0


def test_asked_for_many_times_it_is_taken_once() -> None:
    job = Scripted(2).running()
    for _ in range(3):
        job.save_asked()
    job.step(1)
    job.saved()
    job.committed()
    assert saves(job.step(2)) == []


@pytest.mark.parametrize("joined", [False, True])
def test_before_the_first_step_it_is_taken_after_it(joined: bool) -> None:
    job = Scripted(2)
    if joined:
        job.join()
    job.save_asked()
    job.running() if not joined else (job.describe(), job.ready())
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2


def test_all_mini_batches_of_the_step_come_first() -> None:
    job = Scripted(2, accumulate=2).running()
    job.save_asked()
    assert saves(job.step(1)) == []
    assert saves(job.step(1)) == [Advance(Save(1), Update(1, 2.0))] * 2


def test_a_checkpoint_comes_behind_the_evaluation_of_its_step() -> None:
    """What a scheduler made of its loss is in it, and who resumes has none to make up for."""
    job = Scripted(2, evaluate_every=1).running()
    job.save_asked()
    assert of_messages(job.step(1), Advance) == [Advance(Evaluate(1), Update(1))] * 2
    assert saves(job.evaluated(1)) == [Advance(Save(1), Evaluated(0.5))] * 2


@pytest.mark.parametrize("evaluate", [None, 2])
def test_every_so_many_steps(evaluate: int | None) -> None:
    job = Scripted(2, steps=5, checkpoint_every="2", evaluate_every=evaluate).running()
    for step in range(1, 6):
        job.step(step)
        if job.state() is State.EVALUATING:
            job.evaluated(step)
        if job.state() is State.SAVING:
            job.saved()
            job.committed()
    assert of(job.effects, Commit) == [commit(2), commit(4), commit(5)]
    assert job.ended.status is Status.DONE


def test_every_so_many_minutes() -> None:
    job = Scripted(1, steps=9, checkpoint_every="2m").running()
    for step in range(1, 10):
        job.now += 50.0
        job.step(step)
        if job.state() is State.SAVING:
            job.now += 15.0  # what it takes does not count
            job.saved()
            job.committed()
    assert of(job.effects, Commit) == [commit(3), commit(6), commit(9)]


def test_asked_for_during_an_evaluation_it_comes_after_it() -> None:
    job = Scripted(2, evaluate_every=1).running()
    job.step(1)
    job.save_asked()
    effects = job.evaluated(1)
    assert saves(effects) == [Advance(Save(1), Evaluated(0.5))] * 2
    assert of(effects, Evaluation)
    job.saved()
    run = RunStep(2, BATCH, False)
    assert of_messages(job.committed(), Advance) == [Advance(run)] * 2


def test_asked_for_in_the_last_step_it_is_the_last_one() -> None:
    job = Scripted(1, steps=1).running()
    job.save_asked()
    job.step(1)
    job.saved()
    job.committed()
    assert job.ended.status is Status.DONE
    assert of(job.effects, Commit) == [commit(1)]


def test_asked_for_while_saving_it_is_taken_after_the_next_step() -> None:
    job = Scripted(1).running()
    job.save_asked()
    job.step(1)
    job.save_asked()
    job.saved()
    job.save_asked()
    job.committed()
    assert saves(job.step(2)) == [Advance(Save(2), Update(2))]
    job.saved()
    job.committed()
    job.step(3)
    job.saved()
    assert of(job.effects, Commit) == [commit(1), commit(2), commit(3)]


def test_an_interrupt_while_a_checkpoint_is_taken_ends_after_it() -> None:
    job = Scripted(2).running()
    job.save_asked()
    job.step(1)
    job.interrupt()
    assert job.saved() == [commit(1)]
    job.committed()
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.steps == 1


def test_an_interrupt_goes_before_a_checkpoint() -> None:
    job = Scripted(2).running()
    job.save_asked()
    job.interrupt()
    job.step(1)
    assert job.ended.status is Status.INTERRUPTED
    assert saves(job.effects) == []


def test_the_loss_scale_is_in_every_checkpoint() -> None:
    job = Scripted(1, precision="fp16").running()
    job.save_asked()
    job.step(1)
    assert job.saved() == [commit(1, Scaler(2.0**16, 1))]


def test_a_loop_of_the_users_own_waits_for_its_checkpoint() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.save_asked()
    effects = job.step(1)
    (row,) = of(effects, StepResult)
    assert saves(effects) == [Advance(Save(1), Update(1))] * 2
    job.saved()
    assert of_messages(job.committed(), Advance) == [Advance(Wait(row))] * 2
    assert job.state() is State.CALLING
    effects = job.called(CallKind.STEP)
    assert [a.next for a in of_messages(effects, Advance)] == [RunStep(2, BATCH, False)] * 2


def test_between_two_calls_it_is_taken_after_the_next_step() -> None:
    job = own()
    job.save_asked()
    assert saves(job.called(CallKind.PREDICT)) == []
    assert saves(job.called(CallKind.STEP)) == []
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2


def test_the_checkpoint_of_a_step_is_made_once_though_it_is_asked_for_twice() -> None:
    job = Scripted(2, evaluate_every=1).running()
    job.save_asked()
    job.step(1)
    job.saved()
    job.committed()
    job.save_asked()  # during the evaluation that follows
    job.evaluated(1)
    if job.state() is State.SAVING:
        job.saved()
    assert of(job.effects, Commit) == [commit(1)]


def test_a_close_does_not_make_a_checkpoint_that_is_there() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.save_asked()
    job.step(1)
    job.saved()
    job.committed()
    job.called(CallKind.CLOSE)
    if job.state() is State.SAVING:
        job.saved()
    assert of(job.effects, Commit) == [commit(1)]
