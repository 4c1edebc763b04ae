"""Checkpoints that cannot be written: the second failure in a row ends the job."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import Commit, Discard, Dropped, Effect, Send
from pipeworker.coordinator.events import CheckpointEnded
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause
from pipeworker.wire.lines import Warned
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import CallKind
from support.pure.coordinator import (
    ScriptedJob,
    commit,
    copies,
    of,
    own_loop_job,
    replaceable_job,
    saves,
)

FULL = "model.safetensors: cannot be written: no space left"
CONTINUES = "training continues until the next one"
RETRYING = "retrying"


def warned(step: int, more: str, text: str = FULL) -> Warned:
    return Warned(f"the checkpoint of step {step} failed: {text}; {more}")


def fail(job: ScriptedJob, where: str) -> list[Effect]:
    """Fail the last checkpoint on the workers or in the coordinator."""
    if where == "workers":
        return job.saved(error=FULL)
    job.saved()
    return job.checkpoint_failed(FULL)


def beside(*, replaceable: bool = False) -> ScriptedJob:
    """Return a job that saves at every step."""
    begin = replaceable_job if replaceable else ScriptedJob
    job = begin(2, steps=9, checkpoint_every="1").running()
    job.step(1)
    return job


WHERE = pytest.mark.parametrize("where", ["workers", "coordinator"])


@WHERE
@pytest.mark.parametrize("replaceable", [False, True])
def test_a_checkpoint_that_fails_beside_steps_is_discarded_and_the_job_continues(
    where: str, replaceable: bool
) -> None:
    job = beside(replaceable=replaceable)
    assert fail(job, where) == [Discard(1), warned(1, CONTINUES)]
    assert job.state() is State.STEPPING
    (copy, _) = copies(job.step(2))
    assert (copy.step, copy.save) == (2, True)
    assert job.saved() == [commit(2)]
    job.checkpoint_committed()
    assert job.job.progress.saved == 2


@WHERE
def test_the_second_failed_checkpoint_in_a_row_ends_the_job(where: str) -> None:
    job = beside()
    fail(job, where)
    job.step(2)
    effects = fail(job, where)
    assert effects[0] == Discard(2)
    assert (job.failure.cause, job.failure.message) == (Cause.INTERNAL, FULL)
    assert (job.ended.exit_status, job.ended.steps) == (1, 2)
    assert len(of(job.effects, Warned)) == 1


def test_a_complete_checkpoint_resets_the_count_of_failures() -> None:
    job = beside()
    for step in (2, 3, 4, 5):
        if step % 2:
            job.checkpointed()
        else:
            job.saved(error=FULL)
        job.step(step)
    assert not job.job.end
    assert of(job.effects, Discard) == [Discard(1), Discard(3)]


def test_parts_are_discarded_after_every_rank_has_reported() -> None:
    """Another worker may still be writing."""
    job = beside()
    assert job.receive(Saved(1, 1, error=FULL)) == []
    assert job.receive(Saved(0, 1, error="something else")) == [Discard(1), warned(1, CONTINUES)]
    assert of(job.effects, Commit) == []
    assert [type(e) for e in job.handle(CheckpointEnded(1, error=FULL))] == [Dropped]


@pytest.mark.parametrize("slow", [0, 1])
def test_one_full_disk_fails_the_checkpoint(slow: int) -> None:
    job = beside()
    assert job.receive(Saved(1 - slow, 1, error="" if slow else FULL)) == []
    effects = job.receive(Saved(slow, 1, error=FULL if slow else ""))
    assert effects == [Discard(1), warned(1, CONTINUES)]


def at_the_end() -> ScriptedJob:
    job = ScriptedJob(2, steps=1).running()
    job.step(1)
    return job


def on_an_interrupt() -> ScriptedJob:
    job = replaceable_job().running()
    job.interrupt()
    job.step(1)
    return job


def held_up() -> ScriptedJob:
    """Return a job that waits for the checkpoint of step 2; that of step 1 is complete."""
    job = ScriptedJob(2, steps=9, checkpoint_every="1", checkpoint_busy="wait").running()
    job.step(1)
    job.step(2)
    job.saved(1)
    job.checkpoint_committed(1)
    return job


def by_the_users_loop() -> ScriptedJob:
    job = own_loop_job()
    job.called(CallKind.SAVE)
    return job


@WHERE
@pytest.mark.parametrize("begin", [at_the_end, on_an_interrupt, held_up, by_the_users_loop])
def test_a_blocking_checkpoint_that_fails_is_retried(where: str, begin: object) -> None:
    assert callable(begin)
    job: ScriptedJob = begin()
    (advance, _) = saves(job.effects)
    assert isinstance(advance.next, Save)
    step = advance.next.step
    discarded, *rest = fail(job, where)
    assert discarded == Discard(step)  # before any worker retries
    assert rest[0] == warned(step, RETRYING)
    assert [send.message for send in of(rest, Send)] == [Advance(advance.next)] * 2
    assert job.state() is State.SAVING
    assert [done.state.step for done in of(job.saved(), Commit)] == [step]
    job.checkpoint_committed()
    assert job.state() is not State.SAVING
    assert of(job.effects, Warned) == [warned(step, RETRYING)]


@WHERE
@pytest.mark.parametrize(
    ("begin", "steps"),
    [(at_the_end, 1), (on_an_interrupt, 1), (held_up, 2), (by_the_users_loop, 0)],
)
def test_a_blocking_checkpoint_that_fails_twice_ends_the_job(
    where: str, begin: object, steps: int
) -> None:
    assert callable(begin)
    job: ScriptedJob = begin()
    fail(job, where)
    fail(job, where)
    assert (job.failure.cause, job.failure.message) == (Cause.INTERNAL, FULL)
    assert (job.ended.status, job.ended.steps) == ("failed", steps)
    assert len(of(job.effects, Discard)) == 2


def test_a_failure_while_the_last_checkpoint_is_written_counts() -> None:
    for error in ("", FULL):
        job = ScriptedJob(2, steps=2, checkpoint_every="1").running()
        job.step(1)
        job.step(2)
        assert job.state() is State.SAVING
        assert job.saved(1, error=FULL) == [Discard(1), warned(1, CONTINUES)]
        assert job.state() is State.SAVING
        job.saved(2, error=error)
        if not error:
            job.checkpoint_committed()
        assert job.ended.status == ("failed" if error else "done")


def test_a_failed_checkpoint_keeps_the_snapshots() -> None:
    """Copies in memory are complete nevertheless."""
    job = beside(replaceable=True)
    job.saved(error=FULL)
    job.step(2)
    job.exited(1, -9)
    job.start()
    assert job.job.progress.steps == 1


def test_a_checkpoint_discarded_by_a_loss_is_no_failure() -> None:
    job = beside(replaceable=True)
    job.saved(error=FULL)
    job.step(2)
    job.exited(1, -9)
    assert of(job.effects, Discard) == [Discard(1), Discard(2)]
    job.start()
    assert copies(job.step(2)) == [Copy(2, 1, save=True)] * 2
    job.checkpointed()
    assert not job.job.end


def test_a_checkpoint_of_the_first_weights_that_fails_is_not_awaited_by_later_workers() -> None:
    """They are before the same step, but do not wait for its checkpoint."""
    job = replaceable_job(evaluate_first=True, evaluate_every=1)
    job.start()
    job.evaluated(0)
    job.saved()
    job.exited(1, -9)
    assert job.checkpoint_failed(FULL) == [Discard(0), warned(0, CONTINUES)]
    assert job.state() is State.JOINING
