"""The last whole step of an own loop, which is saved before the job ends with a failure."""

from __future__ import annotations

from typing import Any

import pytest

from pipeworker.coordinator.effects import Dropped
from pipeworker.coordinator.events import Tick
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import Verdict, Warned
from pipeworker.wire.messages.checkpoint import Save, Saved
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.presence import Failed, Heartbeat
from pipeworker.wire.messages.step import (
    CallKind,
)
from support.pure.coordinator import (
    TIMINGS,
    ScriptedJob,
    commit,
    of,
    own_loop_job,
    saves,
)


def after_a_step(**options: Any) -> ScriptedJob:
    job = own_loop_job(**options)
    job.called(CallKind.STEP)
    job.step(1)
    return job


FAILURES = {
    "user": (Failed(1, Failure(Cause.USER, "no")), "failed"),
    "usage": (Failed(1, Failure(Cause.USAGE, "no")), "failed"),
    "interrupt": (Failed(1, Failure(Cause.SIGNAL, "^C")), "interrupted"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("within", ["", "step", "pass"])
def test_the_last_whole_step_is_saved_before_the_job_ends(failure: str, within: str) -> None:
    job = after_a_step()
    if within == "step":
        job.called(CallKind.STEP)
        job.done(0, 2)
    elif within == "pass":
        job.called(CallKind.EVALUATE)
    message, status = FAILURES[failure]
    assert saves(job.receive(message)) == [Advance(Save(1))] * 2
    job.receive(Failed(0, Failure(Cause.PEER, "the channel closed")))
    job.tick(TIMINGS.grace + 0.1)  # the secondary failure of the rank is no cause
    assert job.saved() == [commit(1)]
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == (status, 1)


def test_an_interrupt_of_all_ranks_saves_the_last_whole_step() -> None:
    """Ctrl-C reaches every process of a terminal; torchrun passes a signal on to every rank."""
    job = after_a_step()
    job.called(CallKind.STEP)
    for rank, expected in ((1, [Advance(Save(1))] * 2), (0, [])):
        assert saves(job.receive(Failed(rank, Failure(Cause.SIGNAL, "^C")))) == expected
    assert not of(job.effects, Verdict)
    assert job.saved() == [commit(1)]
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == ("interrupted", 1)


@pytest.mark.parametrize("failure", FAILURES)
def test_without_a_new_step_nothing_is_saved(failure: str) -> None:
    job = own_loop_job()
    assert saves(job.receive(FAILURES[failure][0])) == []
    assert job.ended.status == FAILURES[failure][1]
    job = after_a_step()
    job.called(CallKind.SAVE)
    job.checkpointed()
    assert saves(job.receive(FAILURES[failure][0])) == []
    assert job.ended.status == FAILURES[failure][1]


def test_a_lost_rank_cannot_save() -> None:
    job = after_a_step()
    job.receive(Failed(0, Failure(Cause.LOST, "gone")))
    assert saves(job.effects) == []
    assert job.ended.status == "failed"


def test_a_last_checkpoint_that_fails_is_not_tried_again() -> None:
    job = after_a_step()
    job.receive(FAILURES["user"][0])
    effects = job.saved(error="no space left")
    assert [w.text for w in of(effects, Warned)] == ["step 1 is not saved: no space left"]
    assert job.ended.error == "no\n  stage 1"


@pytest.mark.parametrize("waits", [True, False])
def test_a_last_checkpoint_is_given_up_when_a_rank_does_not_answer(waits: bool) -> None:
    """Soon if it is in its own code, and later if it computes a layer."""
    job = after_a_step(worker_timeout=9.0)
    job.receive(FAILURES["user"][0])
    job.receive(Saved(1, 1))
    phase = Phase.WAITING if waits else Phase.FORWARD
    job.receive(Heartbeat(0, Position(phase), waiting=waits))
    for limit in (TIMINGS.interrupt, 9.0):
        job.tick()
        assert not of(job.effects, Verdict)
        for rank in (0, 1):
            job.now += limit / 2
            job.receive(Heartbeat(1 - rank, Position(phase), waiting=waits))
            job.receive(Heartbeat(rank, Position(phase), waiting=waits))
        job.tick(0.1)
        if waits:
            break
    (warned,) = of(job.effects, Warned)
    assert warned.text.startswith("step 1 is not saved: stage 0 did not answer within ")
    assert job.ended.status == "failed"


def test_an_interrupt_while_a_checkpoint_is_written_waits_for_it() -> None:
    job = after_a_step()
    job.called(CallKind.SAVE)
    assert saves(job.receive(FAILURES["interrupt"][0])) == []
    job.checkpointed()
    assert job.ended.status == "interrupted"


def test_an_interrupt_does_not_expire_while_a_checkpoint_is_written() -> None:
    job = after_a_step()
    job.called(CallKind.SAVE)
    job.interrupt()
    for _ in range(4):
        for rank in (0, 1):
            job.receive(Heartbeat(rank, Position(Phase.SAVING)))
        assert job.tick(TIMINGS.interrupt / 2) == []
    job.checkpointed()
    assert (job.ended.status, job.ended.steps) == ("interrupted", 1)


def test_a_last_checkpoint_may_take_long_to_write() -> None:
    job = after_a_step(worker_timeout=9.0)
    job.receive(FAILURES["user"][0])
    for _ in range(10):
        for rank in (0, 1):
            job.receive(Heartbeat(rank, Position(Phase.SAVING)))
        job.tick(5.0)
        assert not of(job.effects, Verdict)
    job.saved()
    for _ in range(2):  # it is being completed
        for rank in (0, 1):
            job.receive(Heartbeat(rank, Position(), waiting=1))
        job.tick(5.0)
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == ("failed", 1)
    assert not of(job.effects, Warned)


def test_a_loop_whose_last_checkpoint_fails_does_not_start_again() -> None:
    """Although an evaluation has changed the state of a step that is saved."""
    job = after_a_step()
    job.called(CallKind.SAVE)
    job.checkpointed()
    job.called(CallKind.EVALUATE)
    job.evaluated(1)
    job.receive(FAILURES["user"][0])
    job.saved(error="no space left")
    assert job.ended.error == "no\n  stage 1"


def test_a_rank_that_is_lost_while_the_last_checkpoint_is_written_is_not_the_cause() -> None:
    job = after_a_step()
    job.receive(FAILURES["user"][0])
    job.receive(Failed(0, Failure(Cause.LOST, "gone")))
    assert job.ended.error == "no\n  stage 1"


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_checkpoint_is_completed_behind_an_earlier_one(fails: bool) -> None:
    """``pipeworker.train`` writes checkpoints beside steps."""
    job = ScriptedJob(2, steps=9, checkpoint_every="1", checkpoint_busy="skip").running()
    job.step(1)
    job.step(2)
    assert (
        saves(job.receive(Failed(1, Failure(Cause.USER, "no"), stays=True)))
        == [Advance(Save(2))] * 2
    )
    job.saved(1, error="no space left" if fails else "")
    if not fails:
        job.checkpoint_committed(1)
    assert not of(job.effects, Verdict)
    assert job.saved(2) == [commit(2)]
    job.checkpoint_committed(2)
    assert (job.ended.status, job.ended.steps) == ("failed", 2)


def test_the_last_checkpoint_is_written_again_by_all_ranks() -> None:
    """While one of them writes its files beside the steps, another one may write them again."""
    job = ScriptedJob(2, steps=9, checkpoint_every="1").running()
    job.step(1)
    job.receive(Failed(1, Failure(Cause.USER, "no"), stays=True))
    for rank in (0, 1):
        assert of(job.receive(Saved(rank, 1, beside=True)), Dropped)
    assert job.saved() == [commit(1)]


def test_a_script_saves_no_weights_that_differ_between_replicas() -> None:
    job = ScriptedJob(1, replicas=2, steps=9).running()
    job.step(1)
    assert not saves(job.receive(Failed(1, Failure(Cause.DIVERGED, "no"), stays=True)))
    assert job.ended.status == "failed"


def test_the_last_checkpoint_is_tried_although_an_earlier_one_has_failed() -> None:
    job = ScriptedJob(2, steps=9, checkpoint_every="1").running()
    job.step(1)
    job.saved(error="no space left")
    job.step(2)
    job.receive(Failed(1, Failure(Cause.USER, "no"), stays=True))
    assert job.saved(2) == [commit(2)]
    job.checkpoint_committed()
    assert (job.ended.status, job.ended.steps) == ("failed", 2)


def test_a_rank_that_fails_in_its_part_of_a_checkpoint_writes_no_last_one() -> None:
    """The state of its scheduler may be what cannot be saved."""
    job = after_a_step()
    job.called(CallKind.SAVE)
    assert saves(job.receive(FAILURES["user"][0])) == []
    assert job.ended.status == "failed"


def test_a_suspension_does_not_count_for_the_interrupt_of_a_loop() -> None:
    job = after_a_step()
    job.called(CallKind.STEP)  # a second step runs
    job.interrupt()
    job.now += 10 * TIMINGS.interrupt + 0.4
    assert saves(job.handle(Tick(10 * TIMINGS.interrupt))) == []
    job.tick(TIMINGS.interrupt + 0.1)
    assert saves(job.effects)
