"""The calls of an own loop, which all ranks make and which arrive in any order."""

from __future__ import annotations

import itertools

import pytest

from pipeworker.coordinator.effects import Commit, Dropped, Effect, Send
from pipeworker.coordinator.lifecycle import State
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.facts.failure import Cause
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.lines import Planned
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import (
    Call,
    CallKind,
    Evaluate,
    Evaluated,
    Loaded,
    RunStep,
    Update,
    Wait,
)
from support.coordinator import (
    BATCH,
    ScriptedJob,
    commit,
    messages_of,
    of,
    own_loop_job,
    runs,
    saves,
    sent_to,
    updates,
)


def test_nothing_runs_before_a_call() -> None:
    job = own_loop_job()
    (planned,) = of(job.effects, Planned)
    after = job.effects[job.effects.index(planned) + 1 :]
    assert [sent_to(after, rank) for rank in (0, 1)] == [[Advance(Wait())]] * 2


def test_a_step_begins_after_all_calls_and_returns_its_result_to_all_ranks() -> None:
    job = own_loop_job()
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
def test_the_next_call_may_arrive_before_all_ranks_have_run(first: int) -> None:
    """Two mini-batches of one step, which one update applies."""
    job = own_loop_job()
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
def test_a_call_before_the_end_of_the_ranks_own_step_is_dropped(kind: CallKind) -> None:
    """Otherwise a step could begin, or the job end, with the last step half done."""
    job = own_loop_job()
    job.called(CallKind.STEP)
    for rank in (0, 1):
        (dropped,) = job.called(kind, rank)
        assert isinstance(dropped, Dropped)
        assert dropped.text.startswith("Call while waiting for StepDone of rank 0, 1:")
    assert updates(job.step(1)) == [Update(1)] * 2
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [2, 2]


def test_an_evaluation_is_awaited_and_a_prediction_is_not() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.step(1)
    expected = [Advance(Evaluate(1))] * 2
    assert messages_of(job.called(CallKind.EVALUATE), Advance) == expected
    assert job.state() is State.EVALUATING
    effects = job.evaluated(1)
    result = Evaluation(1, 0.5, ("accuracy",), (0.75,))
    advance = Advance(Wait(result), Evaluated(0.5))
    assert effects == [Send(b"w0", advance, 1), result, Send(b"w1", advance, 1)]
    assert messages_of(job.called(CallKind.PREDICT), Advance) == expected
    assert job.state() is State.CALLING
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [2, 2]


def test_an_evaluation_does_not_begin_a_step() -> None:
    job = own_loop_job()
    for _ in range(2):
        job.called(CallKind.EVALUATE)
        job.evaluated(0)
        job.called(CallKind.PREDICT, everywhere=True)
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [1, 1]


def test_close_saves_a_checkpoint() -> None:
    job = own_loop_job()
    assert messages_of(job.called(CallKind.CLOSE), Advance) == [Advance(Save(0))] * 2
    assert job.state() is State.SAVING
    job.saved()
    job.checkpoint_committed()
    assert job.ended.status == "done"


def test_an_interrupt_between_calls_expires_if_no_rank_calls() -> None:
    job = own_loop_job()
    job.interrupt()
    job.tick(job.job.generation.timings.interrupt + 0.1)
    assert job.ended.status == "interrupted"


def test_an_interrupt_takes_effect_after_the_step_unless_the_loop_closes_first() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.interrupt()
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2
    job.saved()
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == ("interrupted", 1)
    job = own_loop_job()
    job.interrupt()
    job.called(CallKind.CLOSE)
    job.saved()
    job.checkpoint_committed()
    assert job.ended.status == "done"


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
def test_different_calls_are_a_usage_error(one: Call, other: Call, shown: tuple[str, str]) -> None:
    for calls in itertools.permutations((one, other)):
        job = own_loop_job()
        for call in calls:
            job.receive(call)
        assert job.failure.cause is Cause.USAGE
        names = [f"stage {rank} called {what}" for rank, what in enumerate(shown)]
        assert all(name in job.failure.message for name in names)


def test_a_step_needs_a_mini_batch_on_the_first_stage() -> None:
    job = own_loop_job(1)
    job.receive(Call(0, CallKind.STEP))
    assert job.failure.message == (
        "step(): the first stage was given no mini-batch; pass one on its rank"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_calls_of_a_job_file_are_dropped(rank: int) -> None:
    """Both before and after the rank has run its part of the step."""
    job = ScriptedJob(2).running()
    job.done(1, 1)
    (dropped,) = job.receive(Call(rank, CallKind.STEP, BATCH))
    why = "an update happens on all stages or on none"
    assert dropped == Dropped(f"Call while waiting for StepDone of rank 0: {why}")
    assert job.state() is State.STEPPING


# Checkpoints.


def test_an_own_loop_waits_for_its_checkpoint() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.request_checkpoint()
    effects = job.step(1)
    (row,) = of(effects, StepResult)
    assert saves(effects) == [Advance(Save(1), Update(1))] * 2
    job.saved()
    assert messages_of(job.checkpoint_committed(), Advance) == [Advance(Wait(row))] * 2
    assert job.state() is State.CALLING
    effects = job.called(CallKind.STEP)
    assert [a.next for a in messages_of(effects, Advance)] == [RunStep(2, BATCH, False)] * 2


def test_a_checkpoint_requested_between_calls_is_saved_after_the_next_step() -> None:
    job = own_loop_job()
    job.request_checkpoint()
    assert saves(job.called(CallKind.PREDICT)) == []
    assert saves(job.called(CallKind.STEP)) == []
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2


def test_each_save_call_writes_the_current_state() -> None:
    """Between two calls the loop may have changed a weight."""
    job = own_loop_job()
    for _ in range(2):
        assert saves(job.called(CallKind.SAVE)) == [Advance(Save(0))] * 2
        assert job.saved() == [commit(0)]
        assert messages_of(job.checkpoint_committed(), Advance) == [Advance(Wait())] * 2
    job.called(CallKind.STEP)
    job.step(1)
    assert saves(job.called(CallKind.SAVE)) == [Advance(Save(1))] * 2
    job.saved()
    job.checkpoint_committed()
    assert job.state() is State.CALLING


def test_a_checkpoint_requested_twice_is_saved_once() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.request_checkpoint()
    job.step(1)
    job.saved()
    job.checkpoint_committed()
    job.request_checkpoint()
    job.called(CallKind.EVALUATE)
    assert saves(job.evaluated(1)) == []
    assert of(job.effects, Commit) == [commit(1)]


def closed(job: ScriptedJob) -> list[Effect]:
    """Close the job and return its effects."""
    effects = job.called(CallKind.CLOSE)
    if job.state() is State.SAVING:
        effects += [*job.saved(), *job.checkpoint_committed()]
    assert job.ended.status == "done"
    return effects


def test_close_saves_no_checkpoint_that_exists() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.request_checkpoint()
    job.step(1)
    job.saved()
    job.checkpoint_committed()
    assert saves(closed(job)) == []


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
    job = own_loop_job()
    for number in (1, 2):
        job.called(CallKind.STEP)
        job.step(number)
    job.called(CallKind.SAVE)
    job.saved()
    job.checkpoint_committed()
    job.called(CallKind.LOAD, loaded=Loaded(step))
    assert saves(closed(job)) == [Advance(Save(step))] * 2
    assert job.ended.steps == step
