"""Checkpoints that cannot be written: one costs itself, two in a row the job."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import Commit, Discard, Dropped, Effect, Send, Status, Warn
from pipeworker.coordinator.events import Uncommitted
from pipeworker.coordinator.states import State
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.calls import CallKind
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.wire.messages.failure import Cause
from support.coordinator import Scripted, commit, copies, of, own, replaced, saves

FULL = "cannot write model.safetensors: no space left"
GOES_ON = "the job goes on until the next one"
AGAIN = "it is tried again"


def warned(step: int, more: str, text: str = FULL) -> Warn:
    return Warn(f"there is no checkpoint of step {step}: {text}; {more}")


def fail(job: Scripted, where: str) -> list[Effect]:
    """The last checkpoint that was begun cannot be written by workers, or not completed."""
    if where == "workers":
        return job.saved(error=FULL)
    job.saved()
    return job.uncommitted(FULL)


def beside(*, replaceable: bool = False) -> Scripted:
    """A checkpoint is written at every step."""
    begin = replaced if replaceable else Scripted
    job = begin(2, steps=9, checkpoint_every="1").running()
    job.step(1)
    return job


WHERE = pytest.mark.parametrize("where", ["workers", "coordinator"])


@WHERE
@pytest.mark.parametrize("replaceable", [False, True])
def test_one_that_fails_beside_steps_is_discarded_and_the_job_goes_on(
    where: str, replaceable: bool
) -> None:
    job = beside(replaceable=replaceable)
    assert fail(job, where) == [Discard(1), warned(1, GOES_ON)]
    assert job.state() is State.STEPPING
    (told, _) = copies(job.step(2))
    assert (told.step, told.save) == (2, True)
    assert job.saved() == [commit(2)]
    job.committed()
    assert job.job.progress.saved == 2


@WHERE
def test_the_second_in_a_row_ends_the_job(where: str) -> None:
    job = beside()
    fail(job, where)
    job.step(2)
    effects = fail(job, where)
    assert effects[0] == Discard(2)
    assert (job.failure.cause, job.failure.message) == (Cause.INTERNAL, FULL)
    assert (job.ended.exit_status, job.ended.steps) == (1, 2)
    assert len(of(job.effects, Warn)) == 1


def test_one_that_succeeds_between_two_is_a_new_beginning() -> None:
    job = beside()
    for step in (2, 3, 4, 5):
        if step % 2:
            job.saved()
            job.committed()
        else:
            job.saved(error=FULL)
        job.step(step)
    assert not job.job.over
    assert of(job.effects, Discard) == [Discard(1), Discard(3)]


def test_what_is_there_goes_when_all_have_said_what_became_of_theirs() -> None:
    """Another one may still be at it."""
    job = beside()
    assert job.says(Saved(1, 1, error=FULL)) == []
    assert job.says(Saved(0, 1, error="something else")) == [Discard(1), warned(1, GOES_ON)]
    assert of(job.effects, Commit) == []
    assert [type(e) for e in job.handle(Uncommitted(1, FULL))] == [Dropped]


@pytest.mark.parametrize("slow", [0, 1])
def test_one_worker_whose_disk_is_full_is_enough(slow: int) -> None:
    job = beside()
    assert job.says(Saved(1 - slow, 1, error="" if slow else FULL)) == []
    effects = job.says(Saved(slow, 1, error=FULL if slow else ""))
    assert effects == [Discard(1), warned(1, GOES_ON)]


def at_the_end() -> Scripted:
    job = Scripted(2, steps=1).running()
    job.step(1)
    return job


def on_an_interrupt() -> Scripted:
    job = replaced().running()
    job.interrupt()
    job.step(1)
    return job


def held_up() -> Scripted:
    """By a checkpoint of step 2, where that of step 1 is complete."""
    job = Scripted(2, steps=9, checkpoint_every="1", checkpoint_busy="wait").running()
    job.step(1)
    job.step(2)
    job.saved(1)
    job.committed(1)
    return job


def by_the_users_loop() -> Scripted:
    job = own()
    job.called(CallKind.SAVE)
    return job


@WHERE
@pytest.mark.parametrize("begin", [at_the_end, on_an_interrupt, held_up, by_the_users_loop])
def test_what_the_job_waits_for_is_tried_again(where: str, begin: object) -> None:
    assert callable(begin)
    job: Scripted = begin()
    (told, _) = saves(job.effects)
    assert isinstance(told.next, Save)
    step = told.next.step
    discarded, *rest = fail(job, where)
    assert discarded == Discard(step)  # before anybody begins again
    assert rest[0] == warned(step, AGAIN)
    assert [send.message for send in of(rest, Send)] == [Advance(told.next)] * 2
    assert job.state() is State.SAVING
    assert [done.step for done in of(job.saved(), Commit)] == [step]
    job.committed()
    assert job.state() is not State.SAVING
    assert of(job.effects, Warn) == [warned(step, AGAIN)]


@WHERE
@pytest.mark.parametrize(
    ("begin", "steps"),
    [(at_the_end, 1), (on_an_interrupt, 1), (held_up, 2), (by_the_users_loop, 0)],
)
def test_and_then_no_more(where: str, begin: object, steps: int) -> None:
    assert callable(begin)
    job: Scripted = begin()
    fail(job, where)
    fail(job, where)
    assert (job.failure.cause, job.failure.message) == (Cause.INTERNAL, FULL)
    assert (job.ended.status, job.ended.steps) == (Status.FAILED, steps)
    assert len(of(job.effects, Discard)) == 2


def test_one_that_fails_while_the_last_is_written_counts_as_well() -> None:
    for error in ("", FULL):
        job = Scripted(2, steps=2, checkpoint_every="1").running()
        job.step(1)
        job.step(2)
        assert job.state() is State.SAVING
        assert job.saved(1, error=FULL) == [Discard(1), warned(1, GOES_ON)]
        assert job.state() is State.SAVING
        job.saved(2, error=error)
        if not error:
            job.committed()
        assert job.ended.status is (Status.FAILED if error else Status.DONE)


def test_a_failure_to_write_is_no_loss() -> None:
    """Copies in memory are whole all the same."""
    job = beside(replaceable=True)
    job.saved(error=FULL)
    job.step(2)
    job.exited(1, -9)
    job.again()
    assert job.job.progress.steps == 1


def test_what_was_discarded_by_a_loss_is_no_attempt_that_failed() -> None:
    job = beside(replaceable=True)
    job.saved(error=FULL)
    job.step(2)
    job.exited(1, -9)
    assert of(job.effects, Discard) == [Discard(1), Discard(2)]
    job.again()
    assert copies(job.step(2)) == [Copy(2, 1, save=True)] * 2
    job.saved()
    job.committed()
    assert not job.job.over
