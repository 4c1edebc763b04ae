"""Signals from outside: to save, or to end one worker or all of them."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import Restart, Verdict
from pipeworker.wire.messages.checkpoint import Copy, Save
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.presence import Failed, Heartbeat, Signalled
from pipeworker.wire.messages.step import CallKind, Update
from support.pure.coordinator import (
    NOWHERE,
    PATIENCE,
    TIMINGS,
    ScriptedJob,
    commit,
    copies,
    of,
    own_loop_job,
    replaceable_job,
    saves,
)

ENDED = "the worker of stage 1 was ended by SIGTERM"


def passes(job: ScriptedJob, seconds: float = TIMINGS.grace) -> None:
    """Let time pass while all workers send heartbeats."""
    job.now += seconds
    for rank in job.ranks:
        job.receive(Heartbeat(rank, NOWHERE))
    job.tick()


@pytest.mark.parametrize(
    "job", [replaceable_job(), ScriptedJob(2)], ids=["replaced", "not replaced"]
)
def test_sigusr1_requests_a_checkpoint(job: ScriptedJob) -> None:
    """The whole job receives it: all workers together request one checkpoint."""
    job.running()
    for rank in job.ranks:
        job.receive(Signalled(rank, "SIGUSR1"))
    job.request_checkpoint()  # as the launcher does
    assert copies(job.step(1)) == [Copy(1, 0, save=True)] * 2
    assert job.saved() == [commit(1)]
    job.checkpoint_committed()
    assert not [copy for copy in copies(job.step(2)) if copy.save]
    assert not job.job.end


def test_sigusr1_is_handled_in_every_state() -> None:
    job = ScriptedJob(2, evaluate_every=1)
    job.join()
    job.receive(Signalled(0, "SIGUSR1"))
    job.describe()
    job.ready()
    job.step(1)
    job.receive(Signalled(1, "SIGUSR1"))
    assert copies(job.evaluated(1)) == [Copy(1, 0, save=True)] * 2


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_worker_that_alone_is_signalled_is_replaced(signal: str) -> None:
    job = replaceable_job().running()
    job.step(1)
    job.receive(Signalled(1, signal))
    passes(job, TIMINGS.grace - 0.1)
    assert job.state() is State.STEPPING  # the signal may be for the whole job
    passes(job, 0.1)
    (restart,) = of(job.effects, Restart)
    assert restart.cause == f"the worker of stage 1 was ended by {signal}"


def test_a_signal_is_not_attributed_to_the_layer_that_ran() -> None:
    """The last heartbeat is old, and the worker continues until it is replaced."""
    job = replaceable_job().running()
    job.receive(Heartbeat(1, Position(Phase.FORWARD, step=1, microbatch=1, layer=2)))
    job.receive(Signalled(1, "SIGTERM"))
    passes(job)
    assert [restart.cause for restart in of(job.effects, Restart)] == [ENDED]


def test_a_signalled_worker_is_replaced_while_stages_are_built() -> None:
    for state in (State.JOINING, State.BUILDING):
        job = replaceable_job()
        job.join()
        if state is State.BUILDING:
            job.describe()
        assert job.state() is state
        job.receive(Signalled(1, "SIGTERM"))
        passes(job)
        assert [restart.cause for restart in of(job.effects, Restart)] == [ENDED]


def test_a_worker_that_exits_by_a_signal_is_replaced_at_once() -> None:
    job = replaceable_job().running()
    job.receive(Signalled(1, "SIGTERM"))
    job.exited(1, 143)
    assert [restart.cause for restart in of(job.effects, Restart)] == [ENDED]


def test_a_job_that_is_signalled_as_a_whole_completes_its_step() -> None:
    """As by scancel: workers stay until the checkpoint is complete, however long that takes."""
    for told_first in (False, True):
        job = replaceable_job().running()
        if not told_first:
            job.interrupt()
        for rank in job.ranks:
            job.receive(Signalled(rank, "SIGTERM"))
        if told_first:
            job.interrupt()
        for _ in range(9):
            passes(job)
        assert job.state() is State.STEPPING
        assert saves(job.step(1)) == [Advance(Save(1, 0), Update(1))] * 2
        for _ in range(9):
            passes(job)
        assert job.saved() == [commit(1)]
        job.checkpoint_committed()
        assert job.ended.status == "interrupted"


def test_a_job_that_is_signalled_as_a_whole_watches_its_workers() -> None:
    """A worker may hold the interpreter's lock for seconds, but not for the worker timeout."""
    job = replaceable_job(worker_timeout=PATIENCE).running()
    job.step(1)
    job.step(2)
    job.interrupt()
    for rank in job.ranks:
        job.receive(Signalled(rank, "SIGTERM"))
    job.step(3)
    assert job.state() is State.SAVING
    for silent in (TIMINGS.grace, PATIENCE):
        assert of(job.effects, Restart) == []
        job.now += silent
        job.receive(Heartbeat(1, NOWHERE))
        job.tick()
    (restart,) = of(job.effects, Restart)
    assert restart.cause == "stage 0 (pid 1000 on host) has not answered for 60 s"


def test_an_interrupted_job_does_not_wait_for_a_worker_that_exited_by_a_signal() -> None:
    """No worker could save its part."""
    job = ScriptedJob(2).running()
    job.interrupt()
    job.receive(Failed(1, Failure(Cause.SIGNAL, ENDED)))
    job.now += TIMINGS.grace
    job.receive(Heartbeat(0, NOWHERE))
    job.tick()
    assert job.ended.status == "interrupted"


def test_without_replacement_a_signal_to_one_worker_stops_the_job_with_a_checkpoint() -> None:
    job = ScriptedJob(2).running()
    job.receive(Signalled(1, "SIGTERM"))
    assert of(job.receive(Signalled(0, "SIGTERM")), Verdict) == []
    passes(job, 3 * TIMINGS.grace)
    assert len(saves(job.step(1))) == 2
    job.checkpointed()
    assert (job.ended.status, job.ended.exit_status) == ("interrupted", 130)


def test_a_signal_before_the_first_step_saves_nothing() -> None:
    for state in (State.JOINING, State.BUILDING):
        job = ScriptedJob(2)
        job.join()
        if state is State.BUILDING:
            job.describe()
        job.receive(Signalled(1, "SIGTERM"))
        assert job.state() is state
        passes(job)
        assert job.ended.status == "interrupted"


def test_an_own_loop_stops_within_the_interrupt_timeout() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.receive(Signalled(1, "SIGTERM"))
    passes(job, TIMINGS.interrupt)
    assert job.state() is State.STEPPING
    job.step(1)
    assert job.state() is State.SAVING
    job.checkpointed()
    assert job.ended.status == "interrupted"


@pytest.mark.parametrize(
    ("job", "awaits"),
    [(ScriptedJob(2), True), (replaceable_job(), False)],
    ids=["ranks", "launched"],
)
def test_only_ranks_that_no_launcher_ends_are_told_late_that_the_job_has_ended(
    job: ScriptedJob, awaits: bool
) -> None:
    job.join(0)
    job.interrupt()
    assert job.ended.status == "interrupted"
    assert job.job.awaits_late_workers is awaits
