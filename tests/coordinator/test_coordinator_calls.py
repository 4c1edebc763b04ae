"""A loop of the user's own: calls that all ranks make, in any order of their arrival."""

from __future__ import annotations

import itertools

import pytest

from pipeworker.coordinator.effects import Commit, Dropped, Effect, Planned, Send, Status
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.states import State
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.calls import Call, CallKind, Loaded, Wait
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.evaluation import Evaluate, Evaluated, Evaluation
from pipeworker.wire.messages.failure import Cause
from pipeworker.wire.messages.step import RunStep, StepResult, Update
from support.coordinator import (
    BATCH,
    Scripted,
    commit,
    of,
    of_messages,
    own,
    runs,
    saves,
    sent_to,
    updates,
)


def test_nothing_runs_before_it_is_called() -> None:
    job = own()
    (planned,) = of(job.effects, Planned)
    after = job.effects[job.effects.index(planned) + 1 :]
    assert [sent_to(after, rank) for rank in (0, 1)] == [[Advance(Wait())]] * 2


def test_a_step_begins_when_all_have_called_and_ends_with_its_result_for_all() -> None:
    job = own()
    assert job.called(CallKind.STEP, 1) == []
    effects = job.called(CallKind.STEP, 0)
    assert [(run.step, run.batch, run.first) for run in runs(effects)] == [(1, BATCH, 0)] * 2
    assert all(run.actions for run in runs(effects))
    job.now += 2.0
    effects = job.step(1)
    (result,) = of(effects, StepResult)
    assert result.seconds == 2.0
    advance = Advance(Wait(result), Update(1))
    assert effects == [Send(b"w0", advance, 1), result, Send(b"w1", advance, 1)]
    effects = job.called(CallKind.STEP)
    assert [(run.step, run.actions) for run in runs(effects)] == [(2, "")] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_the_next_call_may_arrive_before_all_have_run(first: int) -> None:
    """Of two mini-batches of one step; what is updated is both."""
    job = own()
    job.called(CallKind.STEP, last=False)
    assert job.done(first, 1) == []
    assert job.called(CallKind.STEP, first) == []
    assert job.done(1 - first, 1) == []
    effects = job.called(CallKind.STEP, 1 - first)
    assert [(run.step, run.first) for run in runs(effects)] == [(1, 4)] * 2
    effects = job.step(1)
    assert of(effects, StepResult)[0].samples == 20
    assert updates(effects) == [Update(1, divisor=2.0)] * 2


@pytest.mark.parametrize("kind", [CallKind.STEP, CallKind.CLOSE])
def test_a_call_before_the_end_of_ones_own_step_is_dropped(kind: CallKind) -> None:
    """Else a step could begin, or the job end, with the last one half done."""
    job = own()
    job.called(CallKind.STEP)
    for rank in (0, 1):
        (dropped,) = job.called(kind, rank)
        assert isinstance(dropped, Dropped)
        assert dropped.text.startswith("Call while waiting for StepDone of rank 0, 1:")
    assert updates(job.step(1)) == [Update(1)] * 2
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [2, 2]


def test_an_evaluation_is_told_to_all_and_a_prediction_is_not_waited_for() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.step(1)
    asked = [Advance(Evaluate(1))] * 2
    assert of_messages(job.called(CallKind.EVALUATE), Advance) == asked
    assert job.state() is State.EVALUATING
    effects = job.evaluated(1)
    result = Evaluation(1, 0.5, ("accuracy",), (0.75,))
    advance = Advance(Wait(result), Evaluated(0.5))
    assert effects == [Send(b"w0", advance, 1), result, Send(b"w1", advance, 1)]
    assert of_messages(job.called(CallKind.PREDICT), Advance) == asked
    assert job.state() is State.CALLING
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [2, 2]


def test_an_evaluation_does_not_begin_a_step() -> None:
    job = own()
    for _ in range(2):
        job.called(CallKind.EVALUATE)
        job.evaluated(0)
        job.called(CallKind.PREDICT, everywhere=True)
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [1, 1]


def test_a_close_saves() -> None:
    job = own()
    assert of_messages(job.called(CallKind.CLOSE), Advance) == [Advance(Save(0))] * 2
    assert job.state() is State.SAVING
    job.saved()
    job.committed()
    assert job.ended.status is Status.DONE


def test_an_interrupt_between_calls_is_overdue_when_nobody_calls() -> None:
    job = own()
    job.interrupt()
    job.tick(job.job.generation.timings.interrupt + 0.1)
    assert job.ended.status is Status.INTERRUPTED


def test_an_interrupt_ends_after_the_step_and_a_close_goes_before_it() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.interrupt()
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2
    job.saved()
    job.committed()
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 1)
    job = own()
    job.interrupt()
    job.called(CallKind.CLOSE)
    job.saved()
    job.committed()
    assert job.ended.status is Status.DONE


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (Call(0, CallKind.STEP, BATCH), Call(1, CallKind.CLOSE), ("step(batch)", "close()")),
        (
            Call(0, CallKind.STEP, BATCH),
            Call(1, CallKind.STEP, last=False),
            ("step(batch)", "step(batch, of several)"),
        ),
        (
            Call(0, CallKind.PREDICT, everywhere=True),
            Call(1, CallKind.PREDICT),
            ("predict(batch, everywhere=True)", "predict(batch)"),
        ),
        (
            Call(0, CallKind.SAVE),
            Call(1, CallKind.LOAD, loaded=Loaded(7)),
            ("save()", "load(a checkpoint of step 7)"),
        ),
        (
            Call(0, CallKind.LOAD, loaded=Loaded(6)),
            Call(1, CallKind.LOAD, loaded=Loaded(7)),
            ("load(a checkpoint of step 6)", "load(a checkpoint of step 7)"),
        ),
    ],
)
def test_different_calls_are_the_users_mistake(
    one: Call, other: Call, shown: tuple[str, str]
) -> None:
    for calls in itertools.permutations((one, other)):
        job = own()
        for call in calls:
            job.says(call)
        assert job.failure.cause is Cause.USAGE
        names = [f"stage {rank} called {what}" for rank, what in enumerate(shown)]
        assert all(name in job.failure.message for name in names)


def test_a_step_needs_a_mini_batch_on_the_first_stage() -> None:
    job = own(1)
    job.says(Call(0, CallKind.STEP))
    assert job.failure.message == "step() was given no mini-batch on the first stage"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_file_makes_no_calls(rank: int) -> None:
    """Neither before nor after its own part of the step."""
    job = Scripted(2).running()
    job.done(1, 1)
    (dropped,) = job.says(Call(rank, CallKind.STEP, BATCH))
    why = "an update happens on all stages or on none"
    assert dropped == Dropped(f"Call while waiting for StepDone of rank 0: {why}")
    assert job.state() is State.STEPPING


# Checkpoints.


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


def test_save_saves_the_state_as_it_is_each_time() -> None:
    """Between two of them the loop may have changed a weight."""
    job = own()
    for _ in range(2):
        assert saves(job.called(CallKind.SAVE)) == [Advance(Save(0))] * 2
        assert job.saved() == [commit(0)]
        assert of_messages(job.committed(), Advance) == [Advance(Wait())] * 2
    job.called(CallKind.STEP)
    job.step(1)
    assert saves(job.called(CallKind.SAVE)) == [Advance(Save(1))] * 2
    job.saved()
    job.committed()
    assert job.state() is State.CALLING


def test_the_checkpoint_of_a_step_is_made_once_though_it_is_asked_for_twice() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.save_asked()
    job.step(1)
    job.saved()
    job.committed()
    job.save_asked()
    job.called(CallKind.EVALUATE)
    assert saves(job.evaluated(1)) == []
    assert of(job.effects, Commit) == [commit(1)]


def closed(job: Scripted) -> list[Effect]:
    """What it does until it is over."""
    effects = job.called(CallKind.CLOSE)
    if job.state() is State.SAVING:
        effects += [*job.saved(), *job.committed()]
    assert job.ended.status is Status.DONE
    return effects


def test_a_close_does_not_make_a_checkpoint_that_is_there() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.save_asked()
    job.step(1)
    job.saved()
    job.committed()
    assert saves(closed(job)) == []


def test_steps_go_on_from_what_was_loaded() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.step(1)
    loaded = Loaded(7)
    assert of_messages(job.called(CallKind.LOAD, loaded=loaded), Advance) == [Advance(Wait())] * 2
    effects = job.called(CallKind.STEP)
    assert [a.next for a in of_messages(effects, Advance)] == [RunStep(8, BATCH, False)] * 2
    assert [row.step for row in of(job.step(8), StepResult)] == [8]
    assert saves(closed(job)) == [Advance(Save(8))] * 2
    assert job.ended.steps == 8


def test_steps_that_are_done_again_behind_a_load_are_recorded_again() -> None:
    """With other mini-batches they are other steps."""
    job = own()
    for step in (1, 2):
        job.called(CallKind.STEP)
        job.step(step)
    job.called(CallKind.LOAD, loaded=Loaded(1))
    job.called(CallKind.STEP)
    assert [row.step for row in of(job.step(2), StepResult)] == [2]


@pytest.mark.parametrize(
    ("loaded", "scale"),
    [(Loaded(3, 8.0, 5), Scaler(8.0, 5)), (Loaded(3), Scaler(2.0**16, 0))],
)
def test_the_loss_scale_is_loaded_where_there_is_one(loaded: Loaded, scale: Scaler) -> None:
    job = own(precision="fp16")
    job.called(CallKind.LOAD, loaded=loaded)
    job.called(CallKind.SAVE)
    assert job.saved() == [commit(3, scale)]
    job.committed()
    job.called(CallKind.STEP)
    assert job.runs(0)[-1].loss_scale == scale.scale
    plain = own()
    plain.called(CallKind.LOAD, loaded=Loaded(3, 8.0))
    plain.called(CallKind.STEP)
    assert plain.runs(0)[-1].loss_scale == 1.0


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_was_loaded_is_not_in_a_checkpoint_of_this_job_yet(step: int) -> None:
    """Whatever is there of the same step, or of a later one."""
    job = own()
    for number in (1, 2):
        job.called(CallKind.STEP)
        job.step(number)
    job.called(CallKind.SAVE)
    job.saved()
    job.committed()
    job.called(CallKind.LOAD, loaded=Loaded(step))
    assert saves(closed(job)) == [Advance(Save(step))] * 2
    assert job.ended.steps == step
