"""The losses that a job recovers from, how often, and its new workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from pipeworker.coordinator.effects import Dropped, Effect, Send
from pipeworker.coordinator.events import MessageReceived
from pipeworker.coordinator.restart_policy import WINDOW
from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.plan.actions import format_actions
from pipeworker.plan.orders import ORDERS
from pipeworker.wire.lines import (
    CannotStart,
    HostLost,
    Joined,
    Planned,
    Restart,
    Warned,
    WorkerExited,
)
from pipeworker.wire.messages.checkpoint import Save, Saved
from pipeworker.wire.messages.plan import Plan
from pipeworker.wire.messages.presence import Failed, Heartbeat, Welcome
from pipeworker.wire.messages.step import StepDone
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest
from support.pure.coordinator import (
    BATCH,
    NOWHERE,
    PATIENCE,
    TIMINGS,
    ScriptedJob,
    ends,
    of,
    replaceable_job,
    runs,
    saves,
)
from support.pure.orders import build

KILLED = "the worker of stage 1 was killed by SIGKILL"


# New workers.


def test_messages_of_earlier_workers_are_dropped() -> None:
    job = replaceable_job().running()
    job.step(1)
    job.exited(1, -9)
    job.join()
    before = pickle.dumps(job.job)
    done = StepDone(0, 2, (), (), (), 0.0, 0.0, 0, BATCH, 1)
    for late in (done, Saved(0, 1), Heartbeat(0, NOWHERE), Failed(0, Failure(Cause.USER, "no"))):
        name = type(late).__name__
        dropped = [Dropped(f"{name} of generation 1")]
        assert job.handle(MessageReceived(b"w0", 1, late)) == dropped
    exited = WorkerExited(0, 1, -9, NOWHERE)
    assert job.handle(exited) == [Dropped("WorkerExited of generation 1")]
    assert pickle.dumps(job.job) == before
    effects = [*job.describe(), *job.ready()]
    assert {send.generation for send in of(effects, Send)} == {2}


def test_a_new_worker_that_cannot_reach_the_coordinator_names_its_host() -> None:
    """The line may break after the first start; a worker that has not joined has no known host."""
    job = replaceable_job().running()
    job.exited(1, -9)
    job.join(0)
    job.handle(WorkerExited(1, 2, AGAIN, NOWHERE, "host b cannot reach the coordinator"))
    (restart,) = of(job.effects, Restart)[-1:]
    assert restart.cause == "host b cannot reach the coordinator (stage 1)"


def test_new_workers_receive_everything_the_earlier_ones_did() -> None:
    """The plan, a new store, and their actions."""
    job = replaceable_job(recompute="never").running()
    job.receive(StoreRequest(0, 1, StoreOperation.SET, ("k",), b"v"))
    job.step(1)
    job.exited(1, -9)
    assert [s.message for s in of(job.join(0), Send)] == [
        Welcome(job.options.to_json(), "runs/x", ((0,), (1,)), 1, None)
    ]
    job.join(1)
    (reply,) = job.receive(StoreRequest(0, 1, StoreOperation.CHECK, ("k",)))
    assert reply == Send(b"w0", StoreReply(1), 2)
    effects = [*job.describe(), *job.ready()]
    old, new = job.sent(1, Plan)
    assert old == new
    first = [format_actions(worker) for worker in build("gpipe", 2, 4, "never").workers]
    assert [run.actions for run in runs(effects)] == first
    assert of(effects, Joined) == []
    assert of(job.effects, Joined) == [Joined(0), Joined(0)]


def hung(job: ScriptedJob) -> list[Effect]:
    """Let worker 1 be silent until its timeout."""
    effects = []
    for _ in range(3):
        job.now += PATIENCE / 2
        job.receive(Heartbeat(0, NOWHERE))
        effects += job.tick()
    return effects


def echoed(job: ScriptedJob) -> list[Effect]:
    """Report a closed channel without a cause."""
    job.receive(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += TIMINGS.grace
    job.receive(Heartbeat(1, NOWHERE))
    return job.tick()


def transient(job: ScriptedJob) -> list[Effect]:
    return job.receive(Failed(1, Failure(Cause.TRANSIENT, "no route")))


def stuck(job: ScriptedJob) -> list[Effect]:
    """Let both workers wait without progress."""
    effects = []
    for _ in range(4):
        for rank in job.ranks:
            job.receive(Heartbeat(rank, Position(Phase.WAITING, 1), waiting=1))
        effects += job.tick(PATIENCE / 2)
    return effects


@pytest.mark.parametrize(
    ("lose", "text"),
    [
        (hung, "stage 1 (pid 1001 on host) has not answered for 60 s"),
        (echoed, "0>1 closed; no worker reported a cause"),
        (transient, "no route"),
        (stuck, "stage 0 and stage 1 have waited 60 s without progress (deadlock?)"),
    ],
)
def test_the_job_restarts_after_a_failure_that_need_not_recur(
    lose: Callable[[ScriptedJob], list[Effect]], text: str
) -> None:
    job = replaceable_job(worker_timeout=PATIENCE).running()
    job.step(1)
    (restart,) = of(lose(job), Restart)
    assert restart.cause.startswith(text)
    assert not job.job.end
    job.start()
    assert job.state() is State.STEPPING


def test_workers_that_do_not_join_are_replaced() -> None:
    job = replaceable_job(worker_timeout=PATIENCE)
    job.join(0)
    for _ in range(2 * JOIN_FACTOR):
        job.tick(PATIENCE / 2)
        job.receive(Heartbeat(0, NOWHERE))
    (restart,) = of(job.tick(0.1), Restart)
    assert restart.cause == "rank 1 did not join within 300 s"
    job.start()
    assert job.state() is State.STEPPING


@pytest.mark.parametrize("cause", [Cause.USER, Cause.USAGE, Cause.INTERNAL])
def test_a_failure_that_will_recur_ends_the_job(cause: Cause) -> None:
    job = replaceable_job().running()
    job.step(1)
    job.receive(Failed(1, Failure(cause, "no")))
    assert job.failure.message == "no"
    assert job.ended.causes == ()


def test_without_replacement_the_first_loss_ends_the_job() -> None:
    job = ScriptedJob(2).running()
    job.step(1)
    job.exited(1, -9)
    assert job.failure.message == KILLED
    assert (job.ended.steps, job.ended.causes) == (1, ())
    assert not of(job.effects, Restart)


# The end of the job.


def lose(job: ScriptedJob, *layers: int) -> None:
    """Kill worker 1 in each of these layers, and let the job restart."""
    for layer in layers:
        job.exited(1, -9, Position(Phase.FORWARD, 1, 0, layer))
        if not job.job.end:
            job.start()


def test_a_job_over_the_restart_limit_ends_with_the_reason() -> None:
    job = replaceable_job(max_restarts=2).running()
    lose(job, 3, 4, 3)
    where = "layer {} ({}), micro-batch 0, step 1)"
    assert job.failure.message == KILLED
    assert job.ended.causes == tuple(
        f"{KILLED} ({where.format(*layer)}" for layer in ((3, "Tanh"), (4, "Linear"))
    )
    why = "the job is not restarted: all 2 restarts within an hour are used (--max-restarts)"
    assert of(job.effects, Warned)[-1] == Warned(why)
    assert job.effects[-1] == job.ended
    assert [send.generation for send in ends(job.effects)] == [3, 3]


def test_a_repeated_failure_at_the_same_place_ends_the_job() -> None:
    job = replaceable_job(max_restarts=9).running()
    lose(job, 3, 3)
    assert job.failure.message == KILLED
    assert len(job.ended.causes) == 1
    why = "the job is not restarted: it failed again at the same place"
    assert of(job.effects, Warned)[-1] == Warned(why)


def test_with_max_restarts_0_the_first_loss_ends_the_job() -> None:
    job = replaceable_job(max_restarts=0).running()
    lose(job, 3)
    assert job.failure.message == KILLED
    assert (job.ended.causes, of(job.effects, Warned)) == ((), [])


def test_losses_no_longer_count_after_an_hour() -> None:
    job = replaceable_job(max_restarts=1).running()
    lose(job, 3)
    job.now += WINDOW
    lose(job, 4)
    assert not job.job.end
    lose(job, 3)
    assert len(job.ended.causes) == 2


def test_several_losses_during_a_restart_are_all_reported() -> None:
    job = replaceable_job().running()
    job.step(1)
    job.exited(1, -9)
    job.now += 2.0
    job.join()
    job.exited(0, -9)
    job.now += 3.0
    job.start()
    both = f"{KILLED}; the worker of stage 0 was killed by SIGKILL"
    back = "resumed after step 0, 1 step repeated, in 5.0 s"
    assert of(job.effects, Warned) == [Warned(f"{both}; {back}")]


def test_a_worker_that_cannot_be_started_counts_as_no_restart() -> None:
    job = replaceable_job().running()
    job.exited(1, -9)
    job.handle(CannotStart(1, 1, "of the generation before"))
    assert not job.job.end
    job.handle(CannotStart(1, 2, "cannot start a worker: no processes are left"))
    assert job.failure.message == "cannot start a worker: no processes are left"
    assert job.failure.rank == 1
    assert len(job.ended.causes) == 1
    assert of(job.effects, Warned) == []


def test_a_lost_host_loses_its_memory() -> None:
    job = replaceable_job(snapshot_every=1).running()
    for step in (1, 2, 3):
        job.step(step)
    job.handle(HostLost((1,), "host b is lost: its connection closed"))
    assert of(job.effects, Restart)[-1].cause == "host b is lost: its connection closed (stage 1)"
    job.join()
    assert [welcome.restore for welcome in job.sent(1, Welcome)][-1] is None
    job.describe()
    assert runs(job.ready())[0].step == 1
    assert all(job.step(step) for step in (1, 2, 3))
    assert job.rows == [1, 2, 3]  # each step is recorded once


def test_a_cable_that_is_out_costs_one_restart_for_all_hosts() -> None:
    job = replaceable_job(4, max_restarts=2).running()
    for rank in range(4):
        job.handle(HostLost((rank,), f"host {rank} is lost"))
    assert [restart.stages for restart in of(job.effects, Restart)] == [4] * 4
    for _ in range(2):
        assert job.running().step(1)
        job.handle(HostLost((0,), "host 0 is lost"))
    assert job.failure.message == "host 0 is lost"
    assert len(job.ended.causes) == 5


def test_the_job_shrinks_to_the_room_on_its_hosts() -> None:
    job = replaceable_job(4, min_stages=1).running()
    job.handle(HostLost((2, 3), "host b is lost"))
    job.handle(CannotStart(2, 2, "host b: no route to host", 2))
    assert of(job.effects, Restart)[-1].stages == 2
    job.handle(CannotStart(0, 3, "host a: no route to host", 0))
    assert job.failure.message == "host a: no route to host"


def test_attempts_to_start_all_workers_again_count_as_no_losses() -> None:
    """A host that stays away costs one restart, however often the job tries it."""
    job = replaceable_job(4, min_stages=1, max_restarts=2).running()
    job.handle(HostLost((2, 3), "host b is lost"))
    for attempt in range(3):
        job.handle(CannotStart(2, job.number, "host b: no route to host", 2))
        assert job.running().placement.workers == 2
        job.now += TIMINGS.grow * 2**attempt
        job.done(0, 1)
        assert job.placement.workers == 4
    job.handle(CannotStart(2, job.number, "host b: no route to host", 2))
    assert of(job.running().exited(1, -9), Restart)
    assert not of(job.running().exited(0, -9), Restart)
    assert job.ended.status == "failed"


def test_a_new_coordinator_goes_on_with_the_stages_that_are_left() -> None:
    start = Start(causes=("the coordinator was killed",), stages=2)
    job = ScriptedJob(4, replaceable=True, min_stages=1, start=start).running()
    assert runs(job.effects)
    job.now += TIMINGS.grow + 1
    job.step(1)
    assert [restart.stages for restart in of(job.effects, Restart)] == [4]


def test_a_lost_host_that_held_copies_of_earlier_workers_has_no_rank() -> None:
    job = replaceable_job(4, min_stages=2).running()
    job.handle(HostLost((2, 3), "host b is lost"))
    job.handle(CannotStart(2, 2, "host b: no route to host", 2))
    job.running()
    job.handle(HostLost((3,), "host c is lost"))
    assert of(job.effects, Restart)[-1].cause == "host c is lost"


def test_an_interrupted_job_does_not_try_all_workers_again() -> None:
    """The restart would repeat steps that it is about to save."""
    start = Start(causes=("the coordinator was killed",), stages=2)
    job = ScriptedJob(4, replaceable=True, min_stages=1, start=start).running()
    job.interrupt()
    job.now += TIMINGS.grow + 1
    job.step(1)
    job.checkpointed()
    assert not of(job.effects, Restart)
    assert (job.ended.status, job.ended.steps) == ("interrupted", 1)


@pytest.mark.parametrize("least", [None, 3])
def test_without_room_for_all_the_last_snapshot_is_saved_by_those_that_have_it(
    least: int | None,
) -> None:
    """As for a user's error: at most the steps since the snapshot are lost."""
    job = replaceable_job(4, snapshot_every=1, min_stages=least).running()
    job.step(1)
    job.step(2)
    job.handle(HostLost((2, 3), "host b is lost", survives=True))
    job.handle(CannotStart(2, 2, "host b: no route to host", 2))
    assert of(job.effects, Restart)[-1].stages == 2
    text = "step 1 is saved before it ends, with the 2 workers for which there is room"
    assert of(job.effects, Warned)[-1] == Warned(f"the job failed; {text}")
    assert [advance.next for advance in saves(job.start())] == [Save(1, slot=1)] * 2
    job.saved()
    job.checkpoint_committed(1)
    assert job.failure.message == "host b: no route to host"
    assert (job.ended.status, job.ended.exit_status) == ("failed", 1)


@pytest.mark.parametrize("room", [2, 0])
def test_a_stopped_job_saves_the_last_snapshot_by_those_that_have_it(room: int) -> None:
    """Its cluster kills the processes that are left after a grace period."""
    job = replaceable_job(4, snapshot_every=1).running()
    job.step(1)
    job.step(2)
    job.handle(HostLost((2, 3), "host b is lost", survives=True))
    job.interrupt()
    job.handle(CannotStart(2, 2, "host b: no route to host", room))
    if room:
        text = "step 1 is saved before it ends, with the 2 workers for which there is room"
        assert of(job.effects, Warned)[-1] == Warned(f"the job stops; {text}")
        assert [advance.next for advance in saves(job.start())] == [Save(1, slot=1)] * 2
        job.saved()
        job.checkpoint_committed(1)
    else:
        (warned,) = of(job.effects, Warned)
        assert warned.text.startswith("step 1 is not saved: host b: no route to host")
    assert (job.ended.status, job.ended.exit_status) == ("interrupted", 130)
    assert job.ended.error is None


@pytest.mark.parametrize("room", [0, -1])
def test_nothing_is_saved_where_no_worker_can_be_started(room: int) -> None:
    job = replaceable_job(4, snapshot_every=1).running()
    job.step(1)
    job.step(2)
    job.handle(HostLost((2, 3), "host b is lost", survives=True))
    job.handle(CannotStart(2, 2, "host b: no route to host", room))
    assert job.failure.message == "host b: no route to host"


@pytest.mark.parametrize("schedule", sorted(ORDERS))
def test_fewer_workers_run_the_same_schedule(schedule: str) -> None:
    job = replaceable_job(3, min_stages=1, schedule=schedule, layers=("Linear",) * 6).running()
    job.step(1)
    job.exited(1, -9)
    job.handle(CannotStart(1, 2, "no room", 2))
    assert of(job.effects, Restart)[-1].stages == 2
    job.start()
    before, now = of(job.effects, Planned)
    assert (before.schedule, now.schedule) == (schedule, schedule)
    assert (len(before.held), len(now.held)) == (3, 2)
    job.step(1)
    job.step(2)
    assert job.rows == [1, 2]


def test_fewer_workers_run_the_default_schedule_instead_of_the_jobs_own() -> None:
    lines = [
        f"{s}: " + " ".join(f"{s}{kind}{m}" for kind in "FB" for m in range(4)) for s in range(3)
    ]
    own = "\n".join(["mine stages=3 microbatches=4", *lines])
    job = replaceable_job(3, min_stages=1, microbatches=4, schedule=own).running()
    assert of(job.effects, Planned)[-1].schedule == "mine"
    job.exited(1, -9)
    job.handle(CannotStart(1, 2, "no room", 2))
    restart = of(job.effects, Restart)[-1]
    assert restart.stages == 2
    assert restart.cause.endswith(
        "the job continues with 2 workers and gpipe, because --schedule mine is for all"
    )
    job.start()
    assert of(job.effects, Planned)[-1].schedule == "gpipe"


def test_a_job_that_fails_during_a_restart_reports_its_recorded_steps() -> None:
    job = replaceable_job(snapshot_every=50).running()
    for step in (1, 2, 3):
        job.step(step)
    job.exited(1, -9)
    job.start()
    job.step(1)
    job.receive(Failed(1, Failure(Cause.USER, "no")))
    assert job.failure.message == "no"
    assert (job.ended.steps, job.rows) == (3, [1, 2, 3])
