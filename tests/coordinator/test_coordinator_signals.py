"""Signals that workers are sent from outside: a notice, or the wish that one or all of them end."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import Ended, Status
from pipeworker.coordinator.states import State
from pipeworker.wire.lines import Again
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.calls import CallKind
from pipeworker.wire.messages.checkpoint import Copy, Save
from pipeworker.wire.messages.failure import Cause, Failed, Failure, Signalled
from pipeworker.wire.messages.presence import Heartbeat
from pipeworker.wire.messages.step import Update
from support.coordinator import (
    NOWHERE,
    TIMINGS,
    Scripted,
    commit,
    copies,
    of,
    own,
    replaced,
    saves,
)

ENDED = "the worker of stage 1 was ended by SIGTERM"


def passes(job: Scripted, seconds: float = TIMINGS.echo) -> None:
    """Time, in which all workers are alive."""
    job.now += seconds
    for rank in job.ranks:
        job.says(Heartbeat(rank, NOWHERE))
    job.tick()


@pytest.mark.parametrize("job", [replaced(), Scripted(2)], ids=["replaced", "not replaced"])
def test_a_notice_asks_for_a_checkpoint(job: Scripted) -> None:
    """The whole job gets it: once for all of them."""
    job.running()
    for rank in job.ranks:
        job.says(Signalled(rank, "SIGUSR1"))
    job.save_asked()  # as the launcher does
    assert copies(job.step(1)) == [Copy(1, 0, save=True)] * 2
    assert job.saved() == [commit(1)]
    job.committed()
    assert not [copy for copy in copies(job.step(2)) if copy.save]
    assert not job.job.over


def test_a_notice_comes_at_any_time() -> None:
    job = Scripted(2, evaluate_every=1)
    job.join()
    job.says(Signalled(0, "SIGUSR1"))
    job.describe()
    job.ready()
    job.step(1)
    job.says(Signalled(1, "SIGUSR1"))
    assert copies(job.evaluated(1)) == [Copy(1, 0, save=True)] * 2


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
def test_a_worker_that_alone_is_to_end_is_replaced(signal: str) -> None:
    job = replaced().running()
    job.step(1)
    job.says(Signalled(1, signal))
    passes(job, TIMINGS.echo - 0.1)
    assert job.state() is State.STEPPING  # it may be the whole job's
    passes(job, 0.1)
    (begun,) = of(job.effects, Again)
    assert begun.cause == f"the worker of stage 1 was ended by {signal} (stage 1)"


def test_it_is_replaced_while_stages_are_built_as_well() -> None:
    for state in (State.JOINING, State.BUILDING):
        job = replaced()
        job.join()
        if state is State.BUILDING:
            job.describe()
        assert job.state() is state
        job.says(Signalled(1, "SIGTERM"))
        passes(job)
        assert [begun.cause for begun in of(job.effects, Again)] == [f"{ENDED} (stage 1)"]


def test_a_worker_that_ends_by_a_signal_is_replaced_at_once() -> None:
    job = replaced().running()
    job.says(Signalled(1, "SIGTERM"))
    job.exited(1, 143)
    assert [begun.cause for begun in of(job.effects, Again)] == [f"{ENDED} (stage 1)"]


def test_the_whole_job_goes_on_to_the_end_of_its_step_though_each_worker_is_told() -> None:
    """As by scancel: workers stay until the checkpoint is there, however long the step is."""
    for told_first in (False, True):
        job = replaced().running()
        if not told_first:
            job.interrupt()
        for rank in job.ranks:
            job.says(Signalled(rank, "SIGTERM"))
        if told_first:
            job.interrupt()
        for _ in range(9):
            passes(job)
        assert job.state() is State.STEPPING
        assert saves(job.step(1)) == [Advance(Save(1, 0), Update(1))] * 2
        for _ in range(9):
            passes(job)
        assert job.saved() == [commit(1)]
        job.committed()
        assert job.ended.status is Status.INTERRUPTED


def test_an_interrupted_job_does_not_wait_for_a_worker_that_a_signal_has_ended() -> None:
    """There is nobody to save its part."""
    job = Scripted(2).running()
    job.interrupt()
    job.says(Failed(1, Failure(Cause.SIGNAL, ENDED)))
    job.now += TIMINGS.echo
    job.says(Heartbeat(0, NOWHERE))
    job.tick()
    assert job.ended.status is Status.INTERRUPTED


def test_where_workers_are_not_replaced_a_signal_to_one_stops_the_job_with_a_checkpoint() -> None:
    job = Scripted(2).running()
    job.says(Signalled(1, "SIGTERM"))
    assert of(job.says(Signalled(0, "SIGTERM")), Ended) == []
    passes(job, 3 * TIMINGS.echo)
    assert len(saves(job.step(1))) == 2
    job.saved()
    job.committed()
    assert (job.ended.status, job.ended.exit_status) == (Status.INTERRUPTED, 130)


def test_before_there_is_a_step_nothing_is_saved() -> None:
    for state in (State.JOINING, State.BUILDING):
        job = Scripted(2)
        job.join()
        if state is State.BUILDING:
            job.describe()
        job.says(Signalled(1, "SIGTERM"))
        assert job.state() is state
        passes(job)
        assert job.ended.status is Status.INTERRUPTED


def test_a_loop_of_the_users_own_stops_within_the_time_of_an_interrupt() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.says(Signalled(1, "SIGTERM"))
    passes(job, TIMINGS.interrupt)
    assert job.state() is State.STEPPING
    job.step(1)
    assert job.state() is State.SAVING
    job.saved()
    job.committed()
    assert job.ended.status is Status.INTERRUPTED
