"""The loop of a job file: steps, mini-batches of several sizes, evaluation passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pipeworker.coordinator import blueprint
from pipeworker.coordinator.effects import Send
from pipeworker.coordinator.steps import loop as loop_module
from pipeworker.coordinator.steps.loop import LONG_PASS, FileLoop
from pipeworker.coordinator.steps.progress import Progress
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.job.options import Options
from pipeworker.plan.actions import format_actions
from pipeworker.plan.check import LiveMicroBatches, check
from pipeworker.plan.orders import Order
from pipeworker.plan.schedule import Schedule
from pipeworker.wire.lines import Warned
from pipeworker.wire.messages.checkpoint import Copy, Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import (
    Evaluate,
    Evaluated,
    EvaluationDone,
    RunStep,
    StepDone,
    Upcoming,
    Update,
)
from support.pure.coordinator import BATCH, ScriptedJob, commit, of, sent_to
from support.pure.orders import build

SMALL = dataclasses.replace(BATCH, microbatches=2, samples=2)


# Mini-batches.


def test_the_first_step_ends_the_data_of_one_pass() -> None:
    """Without --steps the job ends when the first stage has no next mini-batch."""
    job = ScriptedJob(2, steps=None).running()
    advance = Advance(Save(1), Update(1, epoch_ended=True))
    assert job.step(1, batch=None)[0] == Send(b"w0", advance, 1)
    assert job.state() is State.SAVING


@pytest.mark.parametrize(
    ("options", "length", "ends", "noted"),
    [
        ({}, 0, False, True),
        ({"epochs": 3}, 0, False, True),
        ({"steps": 20_000}, 0, False, False),
        ({}, 30_000, False, False),  # of known length
        ({"epochs": 3}, 0, True, False),
    ],
)
def test_a_pass_that_does_not_end_is_noted_once(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    length: int,
    ends: bool,
    noted: bool,
) -> None:
    assert LONG_PASS == 10_000
    monkeypatch.setattr(loop_module, "LONG_PASS", 1000)
    job = Options("job.py", 1, 4, **options)
    loop = FileLoop(job, job.placement, Progress())
    loop.start(BATCH, job.total_steps(length))
    found = []
    for step in range(1, 1050):
        loop.next(0.0)
        following = dataclasses.replace(BATCH, epoch=1) if ends and step > 900 else BATCH
        done = StepDone(0, step, (0.5,), (), (1.0,), 1.0, 0.1, 0, following)
        found += [each for each in loop.step_done([done], 1.0).effects if isinstance(each, Warned)]
    assert [each.note for each in found] == [True] * noted
    assert all(each.text.startswith("data(): a pass has not ended after 10000 ") for each in found)


def test_without_data_the_job_is_done_at_once() -> None:
    job = ScriptedJob(2).described()
    job.ready(batch=None)
    assert job.sent(1, Advance) == [Advance(Save(0))]
    assert job.saved() == [commit(0)]
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == ("done", 0)


def test_actions_are_sent_again_when_the_batch_size_changes() -> None:
    job = ScriptedJob(2, steps=None, recompute="never").running()
    job.step(1, batch=SMALL)
    job.step(2, batch=SMALL)
    job.step(3)
    four, two = (format_actions(build("gpipe", 2, m, "never").workers[0]) for m in (4, 2))
    assert [run.actions for run in job.runs(0)] == [four, two, "", four]


@pytest.mark.parametrize("save", [False, True])
def test_actions_are_sent_only_when_they_have_changed(save: bool) -> None:
    """Also with a checkpoint or an evaluation between two steps."""
    job = ScriptedJob(2, steps=None, evaluate_every=1).running()
    for step, batch in ((1, BATCH), (2, SMALL), (3, SMALL)):
        if save:
            job.request_checkpoint()
        job.step(step, batch=batch)
        job.evaluated(step)
        if save:
            job.checkpointed()
    assert [bool(run.actions) for run in job.runs(1)] == [True, False, True, False]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The schedules that are built and checked, by their number of micro-batches."""
    calls: list[tuple[str, int]] = []
    real = Order.build

    def built(*arguments: Any, **more: Any) -> Schedule:
        schedule = real(*arguments, **more)
        calls.append(("build", schedule.microbatches))
        return schedule

    def checked(schedule: Schedule) -> LiveMicroBatches:
        if not schedule.forward_only:
            calls.append(("check", schedule.microbatches))
        return check(schedule)

    with monkeypatch.context() as patch:
        patch.setattr(Order, "build", built)
        patch.setattr(blueprint, "check", checked)
        yield calls


def test_a_schedule_is_made_when_its_mini_batch_is_announced(made: list[tuple[str, int]]) -> None:
    job = ScriptedJob(2).running()
    assert made == [("build", 4), ("check", 4)]
    assert job.receive(Upcoming(0, 2)) == []
    assert made[2:] == [("build", 2), ("check", 2)]  # within the step
    assert job.state() is State.STEPPING
    job.step(1, batch=SMALL)
    assert job.runs(0)[-1].actions
    job.step(2)
    job.receive(Upcoming(0, 2))  # announced again: it exists
    assert len(made) == 4


def test_the_number_of_cached_schedules_is_limited(made: list[tuple[str, int]]) -> None:
    job = ScriptedJob(2, microbatches=40).running()
    for _ in range(2):
        for count in range(5, 40):
            job.receive(Upcoming(0, count))
            job.receive(Upcoming(0, count))
    built = [count for what, count in made if what == "build"]
    assert built == [40, 4, *range(5, 40), *range(5, 40)]  # 4 is that of the running step
    job.receive(Upcoming(0, 40))
    job.receive(Upcoming(0, 39 - 8))
    assert len(made) == 2 * len(built)


def test_an_unannounced_mini_batch_runs_too(made: list[tuple[str, int]]) -> None:
    job = ScriptedJob(2).running()
    job.step(1, batch=SMALL)
    assert made[2:] == [("build", 2), ("check", 2)]
    assert job.runs(1)[-1].batch == SMALL


def test_an_announcement_does_not_end_the_step() -> None:
    job = ScriptedJob(1).running()
    job.receive(Upcoming(0, 2))
    assert len(job.runs(0)) == 1
    job.step(1)
    assert [run.step for run in job.runs(0)] == [1, 2]


# Evaluation passes.


def test_an_evaluation_comes_after_the_update_and_before_the_next_step() -> None:
    job = ScriptedJob(2, evaluate_every=2).running()
    job.step(1)
    effects = job.step(2)
    expected = Advance(Evaluate(2), Update(2))
    assert [sent_to(effects, rank) for rank in (0, 1)] == [[expected], [expected]]
    late = StepDone(0, 2, (), (), (), 0.0, 0.1, 0, BATCH)
    assert of(job.receive(late), Send) == []  # not awaited, and ignored
    job.now += 5.0
    effects = job.evaluated(2)
    result = Evaluation(2, 0.5, ("accuracy",), (0.75,))
    advance = Advance(RunStep(3, BATCH, True, ""), Evaluated(0.5), Copy(2, 0, save=True))
    assert effects == [Send(b"w0", advance, 1), result, Send(b"w1", advance, 1)]
    job.now += 1.0
    row = of(job.step(3), StepResult)[0]
    assert row.seconds == 1.0  # the evaluation is not part of the step


def test_evaluations_follow_the_ends_of_epochs() -> None:
    """Two mini-batches each, with a limit of steps at the end of an epoch and within one."""
    for steps, ends in ((5, [2, 4]), (4, [2, 4])):
        job = ScriptedJob(1, evaluate_every="epoch", steps=steps).running()
        for step in range(1, 1 + steps):
            job.step(step, batch=dataclasses.replace(BATCH, epoch=step // 2))
            if job.state() is State.EVALUATING:
                job.evaluated(step)
        assert [found.step for found in of(job.effects, Evaluation)] == ends
        assert not any(run.last for run in job.runs(0))
        assert job.state() is State.SAVING


def test_an_evaluation_after_the_last_step_comes_before_the_save() -> None:
    job = ScriptedJob(1, steps=1, evaluate_every=1).running()
    job.step(1)
    assert job.state() is State.EVALUATING
    assert sent_to(job.evaluated(1), 0) == [Advance(Save(1), Evaluated(0.5))]


def test_no_step_begins_before_every_worker_has_evaluated() -> None:
    job = ScriptedJob(3, evaluate_every=1).running()
    job.step(1)
    for rank in (2, 0, 2):
        result = Evaluation(1, 0.5) if rank == 2 else None
        assert job.receive(EvaluationDone(rank, 1, 0, result)) == []
    job.receive(EvaluationDone(1, 1, 7000, None))
    assert [run.step for run in job.runs(0)] == [1, 2]
    assert job.job.generation.roster.peak_memory()[1] == 7000


def test_an_evaluation_without_a_result_is_a_defect() -> None:
    job = ScriptedJob(1, evaluate_every=1).running()
    job.step(1)
    job.receive(EvaluationDone(0, 1, 0, None))
    assert job.failure.cause is Cause.INTERNAL
    assert job.failure.message == "no worker reported the result of the evaluation pass"


def test_an_evaluation_result_is_not_reused_by_the_next_pass() -> None:
    job = ScriptedJob(1, evaluate_every=1).running()
    job.step(1)
    job.evaluated(1)
    job.step(2)
    job.receive(EvaluationDone(0, 2, 0, None))
    assert job.failure.cause is Cause.INTERNAL
