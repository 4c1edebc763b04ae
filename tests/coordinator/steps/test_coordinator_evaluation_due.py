"""An interrupt does not wait for an evaluation pass; the run that resumes begins with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeworker.coordinator.effects import Commit, Effect, JobState
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.step import Evaluation
from pipeworker.wire.lines import Warned
from pipeworker.wire.messages.checkpoint import Restore, Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import CallKind, EndPass, Evaluate, Evaluated, RunStep, Update
from support.pure.coordinator import (
    ScriptedJob,
    commit,
    evaluation_of,
    messages_of,
    of,
    own_loop_job,
    replaceable_job,
    saves,
    sent_to,
)


def due(step: int) -> Start:
    """Return the start of a run whose evaluation after `step` was interrupted."""
    state = JobState(step, evaluation_due=True)
    return Start(
        (state, Restore(step, f"runs/x/checkpoints/{step}")),
        recorded=step,
        checkpoints=frozenset({step}),
        saved=step,
    )


def interrupted_after(job: ScriptedJob, effects: list[Effect], update: Update | None) -> None:
    """Check that a job saves step 1 without its evaluation, and ends."""
    expected = Advance(Save(1), update)
    assert saves(effects) == [expected] * len(job.ranks)
    (note,) = [effect.text for effect in of(effects, Warned)]
    assert note == "the evaluation after step 1 is not complete; --resume begins with it"
    (written,) = job.saved()
    due = dataclasses.replace(commit(1).state, evaluation_due=True)
    assert written == dataclasses.replace(commit(1), state=due)
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.exit_status) == ("interrupted", 130)
    assert of(job.effects, Evaluation) == []


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_pass_that_has_begun_ends_with_what_has_been_read(steps: int, replicas: int) -> None:
    job = ScriptedJob(2, evaluate_every=1, steps=steps, replicas=replicas).running()
    job.step(1)
    effects = job.interrupt()
    assert messages_of(effects, EndPass) == sent_to(effects, 0) == [EndPass(1)]
    assert messages_of(job.interrupt(), EndPass) == []
    assert job.state() is State.EVALUATING
    interrupted_after(job, job.evaluated(1), None)


@pytest.mark.parametrize("steps", [1, 9])
def test_a_pass_that_is_due_does_not_begin(steps: int) -> None:
    job = ScriptedJob(2, evaluate_every=1, steps=steps).running()
    job.interrupt()
    interrupted_after(job, job.step(1), Update(1))
    assert messages_of(job.effects, EndPass) == []


def test_the_resumed_run_begins_with_the_pass() -> None:
    better, there = (evaluation_of(1),), frozenset({1, 2})
    start = dataclasses.replace(due(2), evaluations=better, checkpoints=there)
    job = ScriptedJob(2, evaluate_every=2, steps=4, start=start)
    assert messages_of(job.start(), Advance) == [Advance(Evaluate(2))] * 2
    effects = job.evaluated(2, 0.7)
    assert of(effects, Evaluation) == [evaluation_of(2, 0.7)]
    assert [run.update for run in messages_of(effects, Advance)] == [Evaluated(0.7)] * 2
    assert job.runs(0)[-1].step == 3
    job.step(3)
    job.step(4)
    job.evaluated(4)
    assert job.saved() == [commit(4, evaluation=evaluation_of(4))]


def test_the_pass_that_is_the_best_is_saved_with_its_step() -> None:
    """The best checkpoint is found by the figures that each of them has."""
    job = ScriptedJob(2, evaluate_every=2, steps=4, start=due(2))
    job.start()
    assert saves(job.evaluated(2)) == [Advance(Save(2), Evaluated(0.5))] * 2
    assert job.saved() == [commit(2, evaluation=evaluation_of(2))]
    job.checkpoint_committed()
    assert job.runs(0)[-1].step == 3


@pytest.mark.parametrize("more", [{}, {"patience": 1}])
def test_the_pass_after_the_last_step_is_saved_with_it(more: dict[str, Any]) -> None:
    """The checkpoint that the interrupt left has neither the figures nor their effects."""
    job = ScriptedJob(2, evaluate_every=2, steps=2, start=due(2), **more)
    job.start()
    assert saves(job.evaluated(2)) == [Advance(Save(2), Evaluated(0.5))] * 2
    assert job.saved() == [commit(2, evaluation=evaluation_of(2))]
    job.checkpoint_committed()
    assert job.ended.status == "done"


def test_a_worse_pass_after_the_last_step_is_saved_too() -> None:
    better, there = (evaluation_of(1),), frozenset({1, 2})
    start = dataclasses.replace(due(2), evaluations=better, checkpoints=there)
    job = ScriptedJob(2, evaluate_every=2, steps=2, start=start)
    job.start()
    assert saves(job.evaluated(2, 0.7)) == [Advance(Save(2), Evaluated(0.7))] * 2


def test_a_second_interrupt_keeps_the_checkpoint() -> None:
    job = ScriptedJob(2, evaluate_every=2, start=due(2))
    job.start()
    job.interrupt()
    job.evaluated(2)
    assert (job.ended.status, of(job.effects, Commit)) == ("interrupted", [])


def test_a_run_resumed_without_evaluations_trains() -> None:
    job = ScriptedJob(2, steps=3, start=due(2))
    runs = messages_of(job.start(), Advance)
    assert [type(run.next) for run in runs] == [RunStep] * 2
    job.step(3)
    assert job.saved() == [commit(3)]


def test_a_loss_in_the_resumed_pass_repeats_it() -> None:
    job = replaceable_job(evaluate_every=2, steps=4, start=due(2))
    job.start()
    job.exited(1, -9)
    assert messages_of(job.start(), Advance) == [Advance(Evaluate(2))] * 2
    assert of(job.evaluated(2), Evaluation) == [evaluation_of(2)]


def test_an_evaluation_alone_ends_at_once() -> None:
    job = ScriptedJob(2, evaluate_only=True)
    job.start()
    assert job.state() is State.EVALUATING
    job.interrupt()
    assert (job.ended.status, job.ended.exit_status) == ("interrupted", 130)


def test_a_pass_of_a_loop_of_the_users_own_is_completed() -> None:
    """The loop is a script: it would not repeat the pass."""
    job = own_loop_job().running()
    job.called(CallKind.STEP)
    job.step(1)
    job.called(CallKind.EVALUATE)
    assert messages_of(job.interrupt(), EndPass) == []
    assert saves(job.evaluated(1)) == [Advance(Save(1), Evaluated(0.5))] * 2
