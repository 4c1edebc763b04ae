"""An interrupt where a worker is lost: what there is in memory is saved before the job ends."""

from __future__ import annotations

import pytest

from pipeworker.coordinator.effects import Ended, Send, Status
from pipeworker.coordinator.job import Start
from pipeworker.coordinator.states import State
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.wire.lines import Again
from pipeworker.wire.messages.advance import Advance
from pipeworker.wire.messages.checkpoint import Restore, Save
from pipeworker.wire.messages.failure import Abort
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Heartbeat
from support.coordinator import (
    NOWHERE,
    PATIENCE,
    Scripted,
    commit,
    of,
    of_messages,
    replaced,
    runs,
    saves,
)


def far() -> Scripted:
    """Three steps are done, and the second is in memory."""
    job = replaced(worker_timeout=PATIENCE).running()
    for step in (1, 2, 3):
        job.step(step)
    return job


def ends_with_the_snapshot(job: Scripted) -> None:
    """As soon as it is restored, without another step."""
    effects = job.ready()
    assert saves(effects) == [Advance(Save(2, 0))] * 2
    assert runs(effects) == []
    assert job.saved() == [commit(2)]
    job.committed()
    assert (job.ended.status, job.ended.exit_status) == (Status.INTERRUPTED, 130)
    assert job.ended.steps == 3


def test_a_loss_behind_an_interrupt_is_gone_on_after_to_save_the_snapshot() -> None:
    job = far()
    job.interrupt()
    assert of(job.exited(1, -9), Again)
    job.join()
    job.describe()
    ends_with_the_snapshot(job)


@pytest.mark.parametrize("state", [State.JOINING, State.BUILDING], ids=lambda s: s.value)
def test_an_interrupt_on_the_way_back_waits_to_save_the_snapshot(state: State) -> None:
    job = far()
    job.exited(1, -9)
    if state is State.JOINING:
        assert of(job.interrupt(), Ended) == []
    job.join()
    job.describe()
    if state is State.BUILDING:
        assert of(job.interrupt(), Ended) == []
    ends_with_the_snapshot(job)


def test_an_interrupt_on_the_way_back_does_not_wait_for_who_does_not_come() -> None:
    job = far()
    job.exited(1, -9)
    job.interrupt()
    job.join(0)
    for _ in range(3):
        job.says(Heartbeat(0, Position(Phase.LOADING)))
        job.tick(PATIENCE / 2)
    assert job.ended.status is Status.INTERRUPTED


def test_however_long_ago_the_interrupt_was_the_new_workers_are_given_time() -> None:
    job = far()
    job.interrupt()
    for microbatch in range(4):  # the step takes long
        for rank in job.ranks:
            job.says(Heartbeat(rank, Position(Phase.FORWARD, 4, microbatch)))
        job.tick(PATIENCE - 1.0)
    job.exited(1, -9)
    job.tick(1.0)
    assert not job.job.over
    job.join()
    job.describe()
    ends_with_the_snapshot(job)


def saved_already() -> Scripted:
    """Two steps are done, and the first is in memory and on disk."""
    job = replaced().running()
    job.save_asked()
    for step in (1, 2):
        job.step(step)
    job.saved()
    job.committed()
    return job


def nothing_yet() -> Scripted:
    """Of two steps nothing is left."""
    job = replaced(snapshot_every=50).running()
    for step in (1, 2):
        job.step(step)
    return job


@pytest.mark.parametrize("begin", [saved_already, nothing_yet], ids=lambda b: b.__name__)
def test_where_there_is_nothing_to_save_the_job_ends_at_once(begin: object) -> None:
    """And says so to whoever is left."""
    assert callable(begin)
    job: Scripted = begin()
    job.interrupt()
    effects = job.exited(1, -9)
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 2)
    assert (job.ended.failure, job.ended.causes) == (None, ())
    assert not of(effects, Again)
    assert len(of_messages(effects, Abort)) == 2
    job = begin()
    job.exited(1, -9)
    job.join()
    effects = job.interrupt()
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 2)
    assert len(job.ended.causes) == 1
    assert [send.generation for send in of(effects, Send)] == [2, 2]


def test_what_is_on_disk_already_is_not_saved_again_on_the_way_to_it() -> None:
    """Another coordinator had come to step 8; this one goes on from what is in memory."""
    start = Start(snapshot=(Mark(5), Restore(5, slot=1, ranks=2)), recorded=9, saved=8)
    job = replaced(start=start).running()
    job.step(6)
    job.interrupt()
    effects = job.step(7)
    assert saves(effects) == []
    assert (job.ended.status, job.ended.steps) == (Status.INTERRUPTED, 9)


def test_where_no_worker_is_replaced_a_loss_behind_an_interrupt_is_a_failure() -> None:
    """There is no checkpoint of what was done, and that is said."""
    for job in (Scripted(2, steps=9).running(), replaced(restarts=0).running()):
        job.step(1)
        job.interrupt()
        job.exited(1, -9)
        assert job.failure.message == "the worker of stage 1 was killed by signal 9"
    job = replaced(restarts=1).running()
    for step in (1, 2, 3):
        job.step(step)
    job.interrupt()
    job.exited(1, -9)
    job.exited(0, -9)
    assert job.failure.message == "the worker of stage 0 was killed by signal 9"


def test_a_second_interrupt_changes_nothing() -> None:
    job = far()
    job.interrupt()
    job.exited(1, -9)
    assert job.interrupt() == []
    job.join()
    assert job.interrupt() == []
    job.says(Heartbeat(0, NOWHERE))
    job.describe()
    ends_with_the_snapshot(job)
