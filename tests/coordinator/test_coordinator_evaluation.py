"""Evaluation passes between steps."""

from __future__ import annotations

from coordinator_job import (
    BATCH,
    Job,
    evaluation,
    of,
    sent_to,
)

from pipeworker.coordinator.effects import (
    Status,
)
from pipeworker.coordinator.machine import (
    State,
)
from pipeworker.wire.messages import (
    Advance,
    Evaluate,
    Evaluation,
    RunStep,
    Save,
    StepDone,
    StepResult,
    Update,
)


def test_an_evaluation_comes_after_the_update_and_before_the_next_step() -> None:
    job = Job(2, evaluate_every=2).running()
    job.step(1)
    effects = job.step(2)
    asked = Advance(Update(2, 1.0), None, Evaluate(2))
    assert [sent_to(effects, rank) for rank in (0, 1)] == [[asked], [asked]]
    assert job.says(StepDone(0, 2, (), (), (), 0.0, 0.1, 0, BATCH)) == []  # not awaited, no harm
    job.now += 5.0
    effects = evaluation(job, 2)
    result = Evaluation(2, 0.5, ("accuracy",), (0.75,))
    assert effects[0] == result
    assert sent_to(effects, 1) == [Advance(None, RunStep(3, BATCH, True, ""), None, result)]
    job.now += 1.0
    row = of(job.step(3), StepResult)[0]
    assert row.seconds == 1.0  # the evaluation is not part of the step


def test_an_evaluation_after_the_last_step_comes_before_the_save() -> None:
    job = Job(1, steps=1, evaluate_every=1).running()
    job.step(1)
    assert job.machine.state is State.RUNNING
    evaluated = Evaluation(1, 0.5, ("accuracy",), (0.75,))
    assert sent_to(evaluation(job, 1), 0) == [Advance(None, None, None, evaluated), Save(1)]


def test_an_interrupt_during_an_evaluation_ends_after_it() -> None:
    job = Job(2, evaluate_every=1).running()
    job.step(1)
    job.interrupt()
    assert job.machine.state is State.RUNNING
    evaluation(job, 1)
    assert job.ended.status is Status.INTERRUPTED
