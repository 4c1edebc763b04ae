"""The checkpoint of the best evaluation: when it is written, and what a loss does to it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeworker.coordinator.effects import Commit, JobState
from pipeworker.coordinator.steps.evaluations import Evaluations
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.step import Evaluation
from pipeworker.wire.messages.checkpoint import Copy, Restore
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import Evaluate, EvaluationDone
from support.pure.coordinator import (
    ScriptedJob,
    commit,
    copies,
    evaluation_of,
    messages_of,
    of,
    replaceable_job,
)


def train(job: ScriptedJob, losses: dict[int, float], *, saves: bool = True) -> None:
    """Run steps, each with the loss of its evaluation; complete checkpoints if it `saves`."""
    for step, loss in losses.items():
        job.step(step)
        job.evaluated(step, loss)
        if saves and job.saves_requested(0)[-1:] == [step]:
            job.checkpointed()


@pytest.mark.parametrize(
    ("best", "saved"),
    [("loss", [1, 4, 6, 7]), ("max:loss", [1, 2, 7]), ("max:accuracy", [1, 7])],
)
@pytest.mark.parametrize("make", [ScriptedJob, replaceable_job])
def test_each_better_evaluation_and_the_end_are_saved(
    make: Any, best: str, saved: list[int]
) -> None:
    job = make(2, evaluate_every=1, steps=7, best=best, snapshot_every=50).running()
    train(job, {1: 0.5, 2: 0.7, 3: math.nan, 4: 0.4, 5: 0.4, 6: 0.3, 7: 0.35})
    assert [written.state.step for written in of(job.effects, Commit)] == saved
    assert all(written.state.evaluation for written in of(job.effects, Commit))
    assert job.ended.status == "done"


def test_the_best_one_is_not_skipped_while_others_are_written() -> None:
    """Each of two slots is being written: training waits."""
    job = replaceable_job(evaluate_every=1, snapshot_every=50).running()
    train(job, {1: 0.5, 2: 0.4, 3: 0.3}, saves=False)
    assert job.state() is State.SAVING
    assert job.saves_requested(0) == [1, 2, 3]


def test_one_that_a_loss_interrupted_is_written_by_the_next_workers() -> None:
    job = replaceable_job(evaluate_every=1, snapshot_every=1).running()
    train(job, {1: 0.5}, saves=False)
    job.step(2)
    job.exited(1, -9)
    assert copies(job.start()) == [Copy(1, 1, save=True)] * 2
    job.step(2)
    (written,) = job.saved(1)
    assert isinstance(written, Commit)
    assert written.state.evaluation == evaluation_of(1)


def lossy(*, loses: bool) -> ScriptedJob:
    """Return a job after step 4, whose best evaluation is that of step 2.

    If it `loses`, the checkpoint of step 2 is not complete, and later workers have a newer state.
    """
    job = replaceable_job(evaluate_every=1, snapshot_every=1, steps=9).running()
    train(job, {1: 0.5})
    train(job, {2: 0.1}, saves=not loses)
    train(job, {3: 0.6})
    job.step(4)
    job.exited(1, -9)
    job.start()
    train(job, {4: 0.4, 5: 0.3})
    return job


def test_after_a_loss_the_best_of_those_that_exist_counts() -> None:
    assert [written.state.step for written in of(lossy(loses=False).effects, Commit)] == [1, 2]
    assert 3 not in lossy(loses=True).saves_requested(0)
    assert [written.state.step for written in of(lossy(loses=True).effects, Commit)][-2:] == [4, 5]


def test_after_a_full_disk_the_best_of_those_that_exist_counts() -> None:
    job = ScriptedJob(1, evaluate_every=1, steps=9).running()
    train(job, {1: 0.5})
    train(job, {2: 0.1}, saves=False)
    job.saved(2, error="no space left")
    train(job, {3: 0.6, 4: 0.3})
    assert job.saves_requested(0) == [1, 2, 4]


def test_a_later_coordinator_knows_the_earlier_evaluations() -> None:
    """The evaluation of step 2 is the best; a worker was killed before its checkpoint was whole."""
    passes = tuple(evaluation_of(step, loss) for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)))
    start = Start(
        snapshot=(JobState(2, None, passes[1]), Restore(2, slot=1, ranks=2)),
        recorded=3,
        evaluations=passes,
        checkpoints=frozenset({1}),
        saved=1,
        causes=("killed",),
    )
    job = replaceable_job(start=start, evaluate_every=1, steps=9)
    assert copies(job.start()) == [Copy(2, 0, save=True)] * 2
    train(job, {3: 0.4})
    assert of(job.effects, Evaluation) == []  # recorded before
    (written,) = job.saved(2)
    assert isinstance(written, Commit)
    assert written.state.evaluation == passes[1]
    assert job.saves_requested(0) == [2]


def test_a_later_pass_is_compared_with_the_best_that_has_a_checkpoint() -> None:
    """The weights of step 2 are gone."""
    passes = tuple(evaluation_of(step, loss) for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)))
    start = Start(
        (JobState(3, None, passes[2]), Restore(3, "runs/x/checkpoints/3")),
        recorded=3,
        evaluations=passes,
        checkpoints=frozenset({1, 3}),
        saved=3,
    )
    job = ScriptedJob(2, start=start, evaluate_every=1, steps=9).running()
    train(job, {4: 0.45, 5: 0.3})
    assert job.saves_requested(0) == [5]


def test_a_figure_that_no_evaluation_has_ends_the_job_after_a_checkpoint() -> None:
    for steps in (1, 9):
        job = ScriptedJob(2, evaluate_every=1, steps=steps, best="max:acc").running()
        job.step(1)
        job.evaluated(1)
        assert of(job.saved(), Commit)
        job.checkpoint_committed()
        assert (job.ended.status, job.ended.exit_status) == ("failed", 1)
        assert job.ended.error == (
            "--best max:acc: the evaluation has no such figure; use one of loss, accuracy, with "
            "max: before it if more is better"
        )


def test_an_evaluation_without_metrics_has_no_choice_of_figures() -> None:
    job = ScriptedJob(1, evaluate_every=1, best="max:accuracy").running()
    job.step(1)
    job.receive(EvaluationDone(0, 1, 1000, Evaluation(1, 0.5)))
    job.checkpointed()
    assert job.ended.error == (
        "--best max:accuracy: the evaluation has no figure but loss; have metrics() return "
        "accuracy, or leave the option out"
    )


def test_it_ends_the_job_before_any_step_without_one() -> None:
    job = ScriptedJob(2, evaluate_first=True, best="max:acc")
    job.start()
    assert job.state() is State.EVALUATING
    job.evaluated(0)
    assert (job.ended.status, job.ended.exit_status) == ("failed", 2)
    assert of(job.effects, Commit) == []
    assert of(job.effects, Evaluation) == []  # no row: nothing remains of the run


def test_an_evaluation_before_the_first_step_may_be_the_best() -> None:
    """Schedulers that use the loss of evaluations do not learn of it."""
    job = ScriptedJob(2, evaluate_first=True, evaluate_every=1, steps=2)
    assert messages_of(job.start(), Advance) == [Advance(Evaluate(0))] * 2
    effects = job.evaluated(0, 0.1)
    assert of(effects, Evaluation) == [evaluation_of(0, 0.1)]
    assert messages_of(effects, Advance)[0].update is None
    assert copies(effects) == [Copy(0, 0, save=True)] * 2
    assert job.saved() == [commit(0, evaluation=evaluation_of(0, 0.1))]
    job.checkpoint_committed()
    train(job, {1: 0.5, 2: 0.2})
    assert [written.state.step for written in of(job.effects, Commit)] == [0, 2]
    assert job.ended.status == "done"


# Patience.


@pytest.mark.parametrize(
    ("losses", "steps", "text"),
    [
        ([0.5, 0.6, 0.5], 9, "2 evaluations without a better loss than that of step 1"),
        ([0.5, 0.6, 0.5], 3, ""),  # all steps are done
        ([math.nan, math.inf], 9, "2 evaluations without a finite loss"),
        ([0.5, 0.6, 0.4, 0.5], 4, ""),
    ],
)
def test_so_many_evaluations_without_a_better_one_end_the_job(
    losses: list[float], steps: int, text: str
) -> None:
    job = ScriptedJob(1, evaluate_every=1, steps=steps, patience=2).running()
    train(job, dict(enumerate(losses, 1)))
    assert (job.ended.status, job.ended.steps) == ("done", len(losses))
    assert job.ended.stopped_early == (f"{text} (--patience 2)" if text else "")
    assert of(job.effects, Commit)[-1].state.step == len(losses)


def test_a_run_that_is_resumed_counts_its_earlier_evaluations() -> None:
    passes = tuple(evaluation_of(step, loss) for step, loss in ((5, 0.1), (7, 0.2)))
    disk = JobState(7), Restore(7, "runs/x/checkpoints/step-00000007")
    start = Start(disk, recorded=7, evaluations=passes, checkpoints=frozenset({5, 7}), saved=7)
    job = ScriptedJob(1, evaluate_every=1, steps=99, patience=2, start=start).running()
    job.step(8)
    job.evaluated(8, 0.3)
    job.checkpointed()
    assert job.ended.stopped_early.startswith("2 evaluations without a better loss than that of s")
    ended = ScriptedJob(1, evaluate_every=1, steps=99, patience=1, start=start)
    ended.start()
    assert (ended.ended.status, ended.ended.steps) == ("done", 7)
    assert ended.ended.stopped_early.startswith("1 evaluation without a better loss than that of s")


def test_recorded_passes_count_as_those_that_are_added() -> None:
    passes = [evaluation_of(step, loss) for step, loss in ((2, 0.5), (4, 0.3), (6, 0.4))]
    added = Evaluations(Criterion("loss"))
    for one in passes:
        added.add(one)
    assert Evaluations.of(Criterion("loss"), passes) == added
    assert Evaluations.of(Criterion("loss"), []) == Evaluations(Criterion("loss"))


def test_passes_before_a_loss_count_once() -> None:
    found = Evaluations(Criterion("loss"))
    kept = [found.add(evaluation_of(step, loss)) for step, loss in ((2, 0.5), (4, 0.3), (6, 0.4))]
    assert kept == [True, True, False]
    assert (found.best, found.since) == (4, 1)
    found.add(evaluation_of(6, 0.4))
    assert (found.best, found.since) == (4, 1)
    found.roll_back(3)
    assert (found.best, found.since) == (2, 0)
    found.roll_back(6)  # a checkpoint that was completed after the first loss
    assert (found.best, found.since) == (4, 1)


@pytest.mark.parametrize("every", [1, 5])
def test_a_loss_while_a_failed_job_saves_does_not_hide_its_error(every: int) -> None:
    job = replaceable_job(best="max:missing", evaluate_every=1, snapshot_every=every).running()
    job.step(1)
    job.evaluated(1)
    assert job.state() is State.SAVING
    job.exited(1, -9)
    while not job.job.end:
        job.start()
        if job.state() is State.STEPPING:
            job.step(1)
        if job.state() is State.EVALUATING:
            job.evaluated(1)
        job.checkpointed()
    assert (job.ended.status, job.ended.exit_status) == ("failed", 1)
    assert job.ended.error
    assert job.ended.error.startswith("--best max:missing: ")
