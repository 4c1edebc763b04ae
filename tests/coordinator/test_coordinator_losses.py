"""What a job goes on after, for how often, and who takes part in it then."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from pipeworker.coordinator.effects import Dropped, Effect, Send, Warn
from pipeworker.coordinator.events import Arrived
from pipeworker.coordinator.restarts import WINDOW
from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.coordinator.states import State
from pipeworker.plan.actions import format_actions
from pipeworker.plan.orders import build
from pipeworker.wire.lines import Again, CannotStart, HostLost, Joined, WorkerExited
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.failure import Cause, Failed, Failure
from pipeworker.wire.messages.plan import Plan
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Heartbeat, Welcome
from pipeworker.wire.messages.step import StepDone
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest
from support.coordinator import (
    BATCH,
    NOWHERE,
    PATIENCE,
    TIMINGS,
    Scripted,
    ends,
    of,
    replaced,
    runs,
)

KILLED = "the worker of stage 1 was killed by signal 9"


# Who takes part.


def test_a_generation_hears_its_own_workers_alone() -> None:
    job = replaced().running()
    job.step(1)
    job.exited(1, -9)
    job.join()
    before = pickle.dumps(job.job)
    done = StepDone(0, 2, (), (), (), 0.0, 0.0, 0, BATCH, 1)
    for late in (done, Saved(0, 1), Heartbeat(0, NOWHERE), Failed(0, Failure(Cause.USER, "no"))):
        name = type(late).__name__
        dropped = [Dropped(f"{name} of generation 1")]
        assert job.handle(Arrived(b"w0", 1, late)) == dropped
    exited = WorkerExited(0, 1, -9, NOWHERE)
    assert job.handle(exited) == [Dropped("an exit of generation 1")]
    assert pickle.dumps(job.job) == before
    effects = [*job.describe(), *job.ready()]
    assert {send.generation for send in of(effects, Send)} == {2}


def test_new_workers_are_told_all_that_the_old_ones_were() -> None:
    """The plan, the store of their own to meet at, and their actions."""
    job = replaced(recompute="never").running()
    job.says(StoreRequest(0, 1, StoreOperation.SET, ("k",), b"v"))
    job.step(1)
    job.exited(1, -9)
    assert [s.message for s in of(job.join(0), Send)] == [
        Welcome(job.options.to_json(), "runs/x", ((0,), (1,)), 1, None)
    ]
    job.join(1)
    (reply,) = job.says(StoreRequest(0, 1, StoreOperation.CHECK, ("k",)))
    assert reply == Send(b"w0", StoreReply(1, (), 0), 2)
    effects = [*job.describe(), *job.ready()]
    old, new = job.sent(1, Plan)
    assert old == new
    first = [format_actions(worker) for worker in build("gpipe", 2, 4, "never").workers]
    assert [run.actions for run in runs(effects)] == first
    assert of(effects, Joined) == []
    assert of(job.effects, Joined) == [Joined(0), Joined(0)]


def hung(job: Scripted) -> list[Effect]:
    """Worker 1 is silent for as long as it may be."""
    effects = []
    for _ in range(3):
        job.now += PATIENCE / 2
        job.says(Heartbeat(0, NOWHERE))
        effects += job.tick()
    return effects


def echoed(job: Scripted) -> list[Effect]:
    """A channel closed, and nobody knows why."""
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += TIMINGS.echo
    job.says(Heartbeat(1, NOWHERE))
    return job.tick()


def transient(job: Scripted) -> list[Effect]:
    return job.says(Failed(1, Failure(Cause.TRANSIENT, "no route")))


def stuck(job: Scripted) -> list[Effect]:
    """Both wait for what does not come."""
    effects = []
    for _ in range(4):
        for rank in job.ranks:
            job.says(Heartbeat(rank, Position(Phase.WAITING, 1), waits=True))
        effects += job.tick(PATIENCE / 2)
    return effects


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (hung, "stage 1 (pid 1001 on host) has not answered for 60 s"),
        (echoed, "0>1 closed, and nobody reported why"),
        (transient, "no route"),
        (stuck, "stage 0 and stage 1 wait for what does not come: nothing has moved for 60 s"),
    ],
)
def test_whatever_need_not_happen_again_is_gone_on_after(
    lose: Callable[[Scripted], list[Effect]], said: str
) -> None:
    job = replaced(worker_timeout=PATIENCE).running()
    job.step(1)
    (begun,) = of(lose(job), Again)
    assert begun.cause.startswith(said)
    assert not job.job.over
    job.again()
    assert job.state() is State.STEPPING


def test_workers_that_do_not_join_are_replaced() -> None:
    job = replaced(worker_timeout=PATIENCE)
    job.join(0)
    for _ in range(2 * JOIN_FACTOR):
        job.tick(PATIENCE / 2)
        job.says(Heartbeat(0, NOWHERE))
    (begun,) = of(job.tick(0.1), Again)
    assert begun.cause == "rank 1 did not join within 300 s"
    job.again()
    assert job.state() is State.STEPPING


@pytest.mark.parametrize("cause", [Cause.USER, Cause.USAGE, Cause.INTERNAL])
def test_what_will_happen_again_ends_the_job(cause: Cause) -> None:
    job = replaced().running()
    job.step(1)
    job.says(Failed(1, Failure(cause, "no")))
    assert job.failure.message == "no"
    assert job.ended.causes == ()


def test_where_workers_cannot_be_replaced_the_first_loss_ends_the_job() -> None:
    job = Scripted(2).running()
    job.step(1)
    job.exited(1, -9)
    assert job.failure.message == KILLED
    assert (job.ended.steps, job.ended.causes) == (1, ())
    assert not of(job.effects, Again)


# The end.


def lose(job: Scripted, *layers: int) -> None:
    """Its worker 1 is killed in these layers, one after the other, and comes back."""
    for layer in layers:
        job.exited(1, -9, Position(Phase.FORWARD, 1, 0, layer))
        if not job.job.over:
            job.again()


def test_after_so_many_losses_it_ends_and_says_why() -> None:
    job = replaced(restarts=2).running()
    lose(job, 3, 4, 3)
    where = "layer {} ({}), micro-batch 0, step 1)"
    assert job.failure.message == KILLED
    assert job.ended.causes == tuple(
        f"{KILLED} (stage 1, {where.format(*layer)}" for layer in ((3, "Tanh"), (4, "Linear"))
    )
    why = "the job does not go on: 2 restarts within an hour are all used (--restarts)"
    assert of(job.effects, Warn)[-1] == Warn(why)
    assert job.effects[-1] == job.ended
    assert [send.generation for send in ends(job.effects)] == [3, 3]


def test_what_happens_again_at_the_same_place_ends_it_at_once() -> None:
    job = replaced(restarts=9).running()
    lose(job, 3, 3)
    assert job.failure.message == KILLED
    assert len(job.ended.causes) == 1
    why = "the job does not go on: it happened again at the same place"
    assert of(job.effects, Warn)[-1] == Warn(why)


def test_with_restarts_0_the_first_loss_ends_it() -> None:
    job = replaced(restarts=0).running()
    lose(job, 3)
    assert job.failure.message == KILLED
    assert (job.ended.causes, of(job.effects, Warn)) == ((), [])


def test_an_hour_later_losses_count_no_more() -> None:
    job = replaced(restarts=1).running()
    lose(job, 3)
    job.now += WINDOW
    lose(job, 4)
    assert not job.job.over
    lose(job, 3)
    assert len(job.ended.causes) == 2


def test_of_several_losses_on_the_way_back_all_are_told() -> None:
    job = replaced().running()
    job.step(1)
    job.exited(1, -9)
    job.now += 2.0
    job.join()
    job.exited(0, -9)
    job.now += 3.0
    job.again()
    both = f"{KILLED} (stage 1); the worker of stage 0 was killed by signal 9 (stage 0)"
    back = "went on after step 0, 1 step repeated, in 5.0 s"
    assert of(job.effects, Warn) == [Warn(f"{both}; {back}")]


def test_a_worker_that_cannot_be_started_is_no_restart() -> None:
    job = replaced().running()
    job.exited(1, -9)
    job.handle(CannotStart(1, 1, "of the generation before"))
    assert not job.job.over
    job.handle(CannotStart(1, 2, "cannot start a worker: no processes are left"))
    assert job.failure.message == "cannot start a worker: no processes are left"
    assert job.failure.rank == 1
    assert len(job.ended.causes) == 1
    assert of(job.effects, Warn) == []


def test_a_host_that_is_lost_takes_its_memory_along() -> None:
    job = replaced(snapshot_every=1).running()
    for step in (1, 2, 3):
        job.step(step)
    job.handle(HostLost((1,), "host b is lost: its connection closed"))
    assert of(job.effects, Again)[-1].cause == "host b is lost: its connection closed (stage 1)"
    job.join()
    assert [welcome.restore for welcome in job.sent(1, Welcome)][-1] is None
    job.describe()
    assert runs(job.ready())[0].step == 1
    assert all(job.step(step) for step in (1, 2, 3))
    assert job.rows == [1, 2, 3]  # each is recorded once


def test_with_fewer_places_on_hosts_a_job_goes_on_with_as_many_stages() -> None:
    job = replaced(4, elastic=1).running()
    job.handle(HostLost((2, 3), "host b is lost"))
    job.handle(CannotStart(2, 2, "host b: no route to host", 2))
    assert of(job.effects, Again)[-1].stages == 2
    job.handle(CannotStart(0, 3, "host a: no route to host", 0))
    assert job.failure.message == "host a: no route to host"


def test_a_job_that_fails_on_the_way_back_had_done_what_is_recorded() -> None:
    job = replaced(snapshot_every=50).running()
    for step in (1, 2, 3):
        job.step(step)
    job.exited(1, -9)
    job.again()
    job.step(1)
    job.says(Failed(1, Failure(Cause.USER, "no")))
    assert job.failure.message == "no"
    assert (job.ended.steps, job.rows) == (3, [1, 2, 3])
