"""The last in-memory snapshot is saved before a job that fails in user code ends."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import Restart, Warned
from pipeworker.wire.messages.checkpoint import Restore, Save
from pipeworker.wire.messages.presence import Failed, Welcome
from support.pure.coordinator import (
    BATCH,
    ScriptedJob,
    of,
    replaceable_job,
    saves,
)

RAISED = Failed(1, Failure(Cause.USER, "metrics() raised", -1, Position(Phase.EVALUATION, 3)))
MESSAGE = "metrics() raised"


def failed_with_memory(**options: Any) -> ScriptedJob:
    """Return a job that fails in the evaluation after step 3, with a snapshot of step 2."""
    job = replaceable_job(evaluate_every=3, **options).running()
    for step in (1, 2, 3):
        job.step(step)
    assert job.state() is State.EVALUATING
    job.receive(RAISED)
    return job


def test_the_last_snapshot_is_saved_before_a_failed_job_ends() -> None:
    """New workers save it and run nothing; the error and the status stay."""
    job = failed_with_memory()
    (restart,) = of(job.effects, Restart)
    assert (restart.generation, restart.recovers) == (2, False)
    assert of(job.effects, Warned) == [Warned("the job failed; step 2 is saved before it ends")]
    effects = job.start()
    assert [welcome.restore for welcome in job.sent(0, Welcome)] == [
        None,
        Restore(2, slot=1, ranks=2),
    ]
    assert [advance.next for advance in saves(effects)] == [Save(2, slot=0)] * 2
    job.saved()
    job.checkpoint_committed(2)
    assert (job.ended.status, job.ended.exit_status, job.ended.steps) == ("failed", 1, 3)
    assert job.failure.message == MESSAGE
    assert job.ended.causes == ()  # nothing was lost


def test_the_first_error_stays_the_verdict_if_saving_fails() -> None:
    def lost(job: ScriptedJob) -> None:
        job.exited(0, -9)

    def fails_otherwise(job: ScriptedJob) -> None:
        job.receive(Failed(0, Failure(Cause.USER, "model() raised")))

    def fails_again(job: ScriptedJob) -> None:
        """As data() does which no longer reaches what it reads."""
        job.receive(RAISED)

    def disk_is_full(job: ScriptedJob) -> None:
        job.describe()
        job.ready()
        for _ in range(2):
            job.saved()
            job.checkpoint_failed()

    for what in (lost, fails_otherwise, fails_again, disk_is_full):
        job = failed_with_memory()
        job.join()
        what(job)
        assert job.job.end
        assert job.job.end.failure
        assert (job.job.end.failure.message, job.ended.exit_status) == (MESSAGE, 1)
        assert len(of(job.effects, Restart)) == 1
        assert of(job.effects, Warned)[-1].text.startswith("step 2 is not saved: ")


@pytest.mark.parametrize(
    "options", [{"snapshot_every": 9}, {"max_restarts": 0}, {"checkpoint_every": "2"}]
)
def test_without_a_newer_snapshot_nothing_is_saved(options: dict[str, Any]) -> None:
    job = replaceable_job(evaluate_every=3, **options).running()
    for step in (1, 2, 3):
        job.step(step)
        for written in set(job.saves_requested(0)) - {job.job.progress.saved}:
            job.saved(written)
            job.checkpoint_committed(written)
    job.receive(RAISED)
    assert job.failure.message == MESSAGE


def test_the_snapshot_is_saved_if_replicas_read_other_data() -> None:
    """The mistake is no rank's alone."""
    job = replaceable_job(1, replicas=2).running()
    for step in (1, 2):
        job.step(step)
    job.done(0, 3)
    job.done(1, 3, batch=dataclasses.replace(BATCH, digest=1))
    (warned,) = of(job.effects, Warned)
    assert warned.text == "the job failed; step 2 is saved before it ends"
    assert [advance.next for advance in saves(job.start())] == [Save(2, slot=0)] * 2
    job.saved()
    job.checkpoint_committed(2)
    assert job.failure.message.startswith("data(): replica 1 read another mini-batch for step 4")


def test_weights_that_differ_between_replicas_are_not_saved() -> None:
    job = replaceable_job(1, replicas=2).running()
    for step in (1, 2):
        job.step(step)
    job.receive(Failed(1, Failure(Cause.DIVERGED, "they differ")))
    assert (job.failure.message, job.ended.exit_status) == ("they differ", 1)


def test_weights_that_give_nan_are_not_saved() -> None:
    job = replaceable_job(stop_on_nan=True).running()
    for step in (1, 2):
        job.step(step)
    for rank in job.ranks:
        job.done(rank, 3, losses=(math.nan, 0.5) if rank == job.last else ())
    assert job.failure.message == "loss is nan at step 3"
