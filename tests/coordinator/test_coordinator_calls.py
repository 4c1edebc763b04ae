"""A loop of the user's own: calls that all ranks make, in any order of their arrival."""

from __future__ import annotations

import itertools

import pytest
from coordinator_job import BATCH, Job, evaluation, of, of_messages, sent_to

from pipeworker.coordinator.effects import Dropped, Effect, Planned, Status
from pipeworker.coordinator.machine import State
from pipeworker.wire.messages import (
    Advance,
    Call,
    CallKind,
    Cause,
    Evaluate,
    Evaluation,
    RunStep,
    Save,
    StepResult,
    Update,
)


def own(stages: int = 2, **options: object) -> Job:
    return Job(stages, own_loop=True, steps=None, **options).running()


def called(job: Job, kind: CallKind, *ranks: int, **more: object) -> list[Effect]:
    for rank in ranks or range(job.stages):
        batch = BATCH if kind is CallKind.STEP and rank == 0 else None
        effects = job.says(Call(rank, kind, batch, **more))  # type: ignore[arg-type]
    return effects


def runs(effects: list[Effect]) -> list[RunStep | None]:
    return [advance.run for advance in of_messages(effects, Advance)]


def test_nothing_runs_before_it_is_called() -> None:
    job = own()
    (planned,) = of(job.effects, Planned)
    after = job.effects[job.effects.index(planned) + 1 :]
    assert [sent_to(after, rank) for rank in (0, 1)] == [[Advance(None, None)]] * 2


def test_a_step_begins_when_all_have_called_and_ends_with_its_result_for_all() -> None:
    job = own()
    assert called(job, CallKind.STEP, 1) == []
    effects = called(job, CallKind.STEP, 0)
    assert [(run.step, run.batch, run.first) for run in runs(effects) if run] == [(1, BATCH, 0)] * 2
    assert all(run and run.actions for run in runs(effects))
    job.now += 2.0
    effects = job.step(1)
    (result,) = of(effects, StepResult)
    assert result.seconds == 2.0
    assert of_messages(effects, Advance) == [Advance(Update(1, 1.0), None, result=result)] * 2
    effects = called(job, CallKind.STEP)
    assert [(run.step, run.actions) for run in runs(effects) if run] == [(2, "")] * 2


@pytest.mark.parametrize("first", [0, 1])
def test_the_next_call_may_arrive_before_all_have_run(first: int) -> None:
    """Of two mini-batches of one step; what is updated is both."""
    job = own()
    called(job, CallKind.STEP, last=False)
    assert job.done(first, 1) == []
    assert called(job, CallKind.STEP, first) == []
    assert job.done(1 - first, 1) == []
    effects = called(job, CallKind.STEP, 1 - first)
    assert [(run.step, run.first) for run in runs(effects) if run] == [(1, 4)] * 2
    effects = job.step(1)
    assert of(effects, StepResult)[0].samples == 20
    assert [advance.update for advance in of_messages(effects, Advance)] == [Update(1, 0.5)] * 2


def test_an_evaluation_is_told_to_all_and_a_prediction_is_not_waited_for() -> None:
    job = own()
    called(job, CallKind.STEP)
    job.step(1)
    assert (
        of_messages(called(job, CallKind.EVALUATE), Advance)
        == [Advance(None, None, Evaluate(1))] * 2
    )
    effects = evaluation(job, 1)
    result = Evaluation(1, 0.5, ("accuracy",), (0.75,))
    assert effects[0] == result
    assert of_messages(effects, Advance) == [Advance(None, None, evaluated=result)] * 2
    assert (
        of_messages(called(job, CallKind.PREDICT), Advance)
        == [Advance(None, None, Evaluate(1))] * 2
    )
    assert [run.step for run in runs(called(job, CallKind.STEP)) if run] == [2, 2]


def test_a_close_saves() -> None:
    job = own()
    assert of_messages(called(job, CallKind.CLOSE), Save) == [Save(0)] * 2
    assert job.machine.state is State.SAVING
    job.saved()
    job.did(job.machine.committed())
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


def test_a_job_file_makes_no_calls() -> None:
    job = Job(1).running()
    (dropped,) = job.says(Call(0, CallKind.STEP, BATCH))
    assert dropped == Dropped("Call while running")
    assert job.machine.state is State.RUNNING
