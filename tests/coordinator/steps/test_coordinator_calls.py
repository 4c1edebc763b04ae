"""The calls of an own loop, which all ranks make and which arrive in any order."""

from __future__ import annotations

import itertools

import pytest

from pipeworker.coordinator.effects import Commit, Dropped, Send
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Position
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.lines import Planned
from pipeworker.wire.messages.checkpoint import Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.presence import Heartbeat
from pipeworker.wire.messages.step import (
    Call,
    CallKind,
    Evaluate,
    Evaluated,
    EvaluationDone,
    Loaded,
    RunStep,
    Update,
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
    reply_of,
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


def test_a_loop_may_compute_for_long_between_two_calls() -> None:
    job = own_loop_job(worker_timeout=9.0)
    for _ in range(9):
        for rank in (0, 1):
            job.receive(Heartbeat(rank, Position(), waiting=1))
        assert job.tick(5.0) == []


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


def test_evaluations_and_predictions_are_awaited() -> None:
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
    assert job.state() is State.EVALUATING
    assert messages_of(job.predicted(1), Advance) == [Advance(Wait())] * 2
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [2, 2]


def test_a_scheduler_gets_the_figure_of_which_more_is_better() -> None:
    job = own_loop_job(best="max:accuracy")
    job.called(CallKind.STEP)
    job.step(1)
    job.called(CallKind.EVALUATE)
    effects = job.evaluated(1)
    assert [run.update for run in messages_of(effects, Advance)] == [Evaluated(0.5, 0.75)] * 2


def test_an_evaluation_does_not_begin_a_step() -> None:
    job = own_loop_job()
    for _ in range(2):
        job.called(CallKind.EVALUATE)
        job.evaluated(0)
        job.called(CallKind.PREDICT, everywhere=True)
        job.predicted(0)
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [1, 1]


def test_close_saves_a_checkpoint() -> None:
    job = own_loop_job()
    assert messages_of(job.called(CallKind.CLOSE), Advance) == [Advance(Save(0))] * 2
    assert job.state() is State.SAVING
    job.checkpointed()
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
    job.checkpointed()
    assert (job.ended.status, job.ended.steps) == ("interrupted", 1)
    job = own_loop_job()
    job.interrupt()
    job.called(CallKind.CLOSE)
    job.checkpointed()
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
        (
            Call(0, CallKind.LOAD, loaded=Loaded(7, checksum=1)),
            Call(1, CallKind.LOAD, loaded=Loaded(7, checksum=2)),
            ("load(a checkpoint of step 7, checksum 1)", "load(a checkpoint of step 7, checksum 2"),
        ),
        (
            Call(0, CallKind.LOAD, mistake="no such folder"),
            Call(1, CallKind.SAVE),
            ("load(checkpoint)", "save()"),
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


def test_a_wrong_argument_fails_the_call_on_all_ranks_and_changes_nothing() -> None:
    job = own_loop_job()
    for rank, kind in itertools.product((0, 1), (CallKind.STEP, CallKind.PREDICT, CallKind.LOAD)):
        loaded = Loaded(7) if kind is CallKind.LOAD else None
        batch = BATCH if kind is CallKind.STEP and rank else None
        calls = Call(rank, kind, mistake="no pair"), Call(1 - rank, kind, batch, loaded=loaded)
        for first, second in itertools.permutations(calls):
            assert job.receive(first) == []
            failure = reply_of(job.receive(second))
            assert (failure.cause, failure.message, failure.rank) == (Cause.USAGE, "no pair", rank)
            assert job.state() is State.CALLING
    missing = reply_of(job.called(CallKind.STEP, batch=None))
    assert missing.message == (
        "step(): the first stage was given no mini-batch; pass one on its rank"
    )
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [1, 1]


@pytest.mark.parametrize("kind", [CallKind.EVALUATE, CallKind.PREDICT])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_pass_that_failed_changes_nothing(kind: CallKind, failing: int) -> None:
    job = own_loop_job()
    job.called(kind)
    failure = Failure(Cause.USER, "no")
    for rank in (0, 1):
        result = Evaluation(0, 0.5) if rank and kind is CallKind.EVALUATE else None
        done = EvaluationDone(rank, 0, 1000, result, failure if rank == failing else None)
        effects = job.receive(done)
    found = reply_of(effects)
    assert (found.message, found.stage) == ("no", f"stage {failing}")
    assert of(effects, Evaluation) == []
    job.called(kind)
    (reply, _) = messages_of(job.evaluated(0), Advance)
    assert isinstance(reply.next, Wait)
    assert not isinstance(reply.next.result, Failure)
    job.called(CallKind.STEP)
    replies = [a.next for a in messages_of(job.step(1), Advance)]
    assert replies == [Wait(of(job.effects, StepResult)[0])] * 2


def test_an_evaluation_without_the_figure_of_best_changes_nothing() -> None:
    job = own_loop_job(best="max:acuracy")
    job.called(CallKind.EVALUATE)
    effects = job.evaluated(0)
    message = "--best max:acuracy: the evaluation has no such figure; use one of loss, accuracy, "
    assert reply_of(effects).message.startswith(message)
    assert of(effects, Evaluation) == []
    assert [run.step for run in runs(job.called(CallKind.STEP))] == [1, 1]


def test_a_pass_of_a_job_file_may_not_fail_quietly() -> None:
    job = ScriptedJob(1, evaluate_every=1).running()
    job.step(1)
    job.receive(EvaluationDone(0, 1, 0, None, Failure(Cause.USER, "no")))
    assert "a pass that failed" in job.failure.message


# The last checkpoint.


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
    assert saves([*job.called(CallKind.PREDICT), *job.predicted(0)]) == []
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
    job.checkpointed()
    assert job.state() is State.CALLING


@pytest.mark.parametrize("change", [CallKind.EVALUATE, CallKind.END_EPOCH, CallKind.PREDICT])
def test_close_saves_a_step_again_if_a_scheduler_has_stepped_since(change: CallKind) -> None:
    job = own_loop_job(checkpoint_every="1")
    job.called(CallKind.STEP)
    assert saves(job.step(1)) == [Advance(Save(1), Update(1))] * 2
    job.checkpointed()
    for _ in range(2):
        effects = job.called(change)
        if change is CallKind.EVALUATE:
            effects += job.evaluated(1)
        elif change is CallKind.PREDICT:
            effects += job.predicted(1)
        assert saves(effects) == []  # only the end is worth another checkpoint of the step
    expected = [] if change is CallKind.PREDICT else [Advance(Save(1))] * 2
    assert saves(job.called(CallKind.CLOSE)) == expected
    if expected:
        job.checkpointed()
    assert job.ended.status == "done"


def test_close_saves_a_step_again_if_a_rank_reports_that_its_script_has_changed_it() -> None:
    job = own_loop_job()
    job.called(CallKind.SAVE)
    job.checkpointed()
    job.called(CallKind.CLOSE, 0)
    assert saves(job.called(CallKind.CLOSE, 1, changed=True)) == [Advance(Save(0))] * 2


def test_a_checkpoint_requested_twice_is_saved_once() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.request_checkpoint()
    job.step(1)
    job.checkpointed()
    job.request_checkpoint()
    job.called(CallKind.EVALUATE)
    assert saves(job.evaluated(1)) == []
    assert of(job.effects, Commit) == [commit(1)]


def test_a_checkpoint_requested_before_an_evaluation_of_a_saved_step_is_not_lost() -> None:
    """The command that requests it waits for another checkpoint than the one that exists."""
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.step(1)
    job.called(CallKind.SAVE)
    job.checkpointed()
    job.request_checkpoint()
    job.called(CallKind.EVALUATE)
    assert saves(job.evaluated(1)) == []
    job.called(CallKind.STEP)
    assert saves(job.step(2)) == [Advance(Save(2), Update(2))] * 2


def test_close_saves_no_checkpoint_that_exists() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.request_checkpoint()
    job.step(1)
    job.checkpointed()
    assert saves(closed(job)) == []
