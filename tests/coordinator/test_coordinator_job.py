"""A job from its first Hello to the verdict: events in, effects out, time by hand."""

from __future__ import annotations

import dataclasses
import math
import pickle

import pytest

from pipeworker.coordinator.effects import Dropped, Log, Send, WritePlan
from pipeworker.coordinator.events import (
    Disconnected,
    EffectFailed,
    MessageReceived,
    ParentLost,
)
from pipeworker.coordinator.waiting import State
from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.step import StepResult
from pipeworker.plan.actions import format_actions
from pipeworker.wire.lines import Joined, Planned, Verdict, WorkerExited
from pipeworker.wire.messages.checkpoint import Save, Saved
from pipeworker.wire.messages.directions import Advance, Finish, FromWorker
from pipeworker.wire.messages.plan import Built, Described, Plan, Ready, StageRange
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Hello, Welcome
from pipeworker.wire.messages.step import RunStep, StepDone, Update
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest
from support.pure.coordinator import BATCH, LAYERS, NOWHERE, ScriptedJob, commit, ends, of, sent_to
from support.pure.orders import build


def test_a_job_from_start_to_end() -> None:
    job = ScriptedJob(2, recompute="never")
    held = ((0,), (1,))
    assert job.join(0)[1] == Send(b"w0", Welcome(job.options.to_json(), "runs/x", held, 1), 1)
    assert job.join(1)[-1] == Log("all ranks joined")

    assert job.receive(Described(0, LAYERS, ())) == [Joined(0)]
    plans = job.receive(Described(1, LAYERS, ()))
    edges = ("0>1/activation", "0>1/target", "1>0/gradient")
    layers = (StageRange(0, 0, 3, "never"),), (StageRange(1, 3, 5, "never"),)
    evaluation = ("0F0 0>A0 0>T0@1", "1<A0 1<T0@0 1F0")
    assert of(plans, Send) == [
        Send(b"w%d" % rank, Plan(layers[rank], edges, (), (), evaluation[rank], held, steps=3), 1)
        for rank in (0, 1)
    ]
    assert "schedule gpipe is proven" in of(plans, Log)[0].text

    job.now += 5
    assert job.receive(Ready(0, (Built(0, 0, LAYERS[:3], 40),), "cpu", BATCH)) == []
    written, planned, *first = job.receive(Ready(1, (Built(1, 3, LAYERS[3:], 20),), "cpu", None))
    assert isinstance(written, WritePlan)
    stages = written.content["stages"]
    assert [stage["layers"] for stage in stages] == [[0, 3], [3, 5]]
    assert [tuple(stage["classes"]) for stage in stages] == [LAYERS[:3], LAYERS[3:]]
    assert [stage["parameters"] for stage in stages] == [40, 20]
    assert isinstance(planned, Planned)
    assert planned.bubble == pytest.approx(1 / 5)
    actions = [format_actions(worker) for worker in build("gpipe", 2, 4, "never").workers]
    assert first == [
        Send(b"w%d" % rank, Advance(RunStep(1, BATCH, False, actions[rank])), 1) for rank in (0, 1)
    ]

    job.now += 2.0
    assert job.done(1, 1) == []
    onward = job.done(0, 1)
    row = StepResult(
        step=1,
        loss=0.75,
        samples=10,
        seconds=2.0,
        samples_per_second=5.0,
        grad_norm=math.sqrt(2.0),
        lr=0.1,
        bubble=0.75,
        epoch=0,
    )
    advance = Advance(RunStep(2, BATCH, False, ""), Update(1))
    assert onward == [Send(b"w0", advance, 1), row, Send(b"w1", advance, 1)]

    job.now += 1.0
    assert sent_to(job.step(2), 0) == [Advance(RunStep(3, BATCH, True, ""), Update(2))]
    assert sent_to(job.step(3), 1) == [Advance(Save(3), Update(3))]
    assert job.state() is State.SAVING

    assert job.receive(Saved(1, 3)) == []
    assert job.receive(Saved(0, 3)) == [commit(3)]
    assert job.state() is State.COMMITTING
    assert job.checkpoint_committed() == [
        Log("ended: done"),
        Send(b"w0", Advance(Finish()), 1),
        Send(b"w1", Advance(Finish()), 1),
        Verdict(
            "done",
            0,
            3,
            8.0,
            (3, 103),
            job.ended.bubble,
            None,
            busy=(0.5, 0.5),
            speed=job.ended.speed,
        ),
    ]
    assert job.ended.bubble == pytest.approx((0.75 + 0.5 + 0) / 3)
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2, 3]


def test_nothing_happens_after_the_end() -> None:
    job = ScriptedJob(2).running()
    job.exited(1, 1)
    assert job.job.end
    assert job.step(4) == job.join() == job.tick(1000) == job.exited(0, -9) == []
    assert (
        job.interrupt() == job.handle(ParentLost(text="x")) == job.handle(EffectFailed("x")) == []
    )
    assert (
        job.request_checkpoint() == job.checkpoint_committed(1) == job.handle(ParentLost(-1)) == []
    )
    assert job.handle(Disconnected(b"w0")) == []
    assert job.handle(MessageReceived(b"w0", 7, Heartbeat(0, NOWHERE))) == []


@pytest.mark.parametrize("microbatches", [1, 4, 64])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_two_messages_per_worker_and_step(workers: int, microbatches: int) -> None:
    job = ScriptedJob(workers, microbatches=microbatches, steps=50)
    batch = dataclasses.replace(BATCH, microbatches=microbatches)
    job.described()
    job.ready(batch)
    for step in range(1, 11):
        before = len(of(job.effects, Send))
        for rank in range(workers):  # one in
            job.done(rank, step, batch=batch if rank == 0 else None)
        assert len(of(job.effects, Send)) - before == workers  # one out
        for rank in range(workers):
            advance = job.sent(rank, Advance)[-1]
            assert advance == Advance(RunStep(step + 1, batch, False, ""), Update(step))


def test_two_ranks_exchange_values_by_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    job = ScriptedJob(2)
    job.join()
    get = StoreRequest(0, 1, StoreOperation.GET, ("k",))
    assert job.receive(get) == []
    assert job.receive(StoreRequest(1, 1, StoreOperation.SET, ("k",), b"v")) == [
        Send(b"w1", StoreReply(1), 1),
        Send(b"w0", StoreReply(1, (b"v",)), 1),
    ]
    monkeypatch.setattr("pipeworker.coordinator.store.MAX_BYTES", 9)
    job.receive(StoreRequest(1, 2, StoreOperation.SET, ("other",), b"value"))
    assert job.failure.rank == 1
    assert "sent an invalid message: StoreRequest: the store is full" in job.failure.message


@pytest.mark.parametrize("event", ["abandoned", "lost", "defect"])
def test_a_lost_dependency_ends_the_job(event: str) -> None:
    job = ScriptedJob(2).running()
    match event:
        case "abandoned":
            job.handle(ParentLost(-1))
            assert job.failure.message == "the process that started the job is gone"
            assert job.ended.status == "lost"
        case "lost":
            job.handle(ParentLost(text="no agent"))
            assert (job.failure.cause, job.failure.message) == (Cause.LOST, "no agent")
        case "defect":
            job.handle(EffectFailed("disk full"))
            assert (job.failure.cause, job.failure.message) == (Cause.INTERNAL, "disk full")
    assert job.ended.exit_status == 1


def test_a_parent_that_is_a_worker_is_lost_as_a_worker() -> None:
    job = ScriptedJob(2).running()
    job.handle(ParentLost(0))
    assert job.failure.message == "the worker of stage 0 (pid 1000 on host) is gone"
    assert job.ended.status == "failed"


# Generations.


def test_every_message_carries_the_generation() -> None:
    job = ScriptedJob(2, generation=2).running()
    job.receive(StoreRequest(0, 1, StoreOperation.SET, ("k",)))
    job.receive(Hello(0, "elsewhere", 5), peer=b"late")
    for step in (1, 2, 3):
        job.step(step)
    job.checkpointed()
    assert job.ended.status == "done"
    assert {send.generation for send in of(job.effects, Send)} == {2}


OF_ANOTHER: list[FromWorker] = [
    Hello(0, "host", 1),
    Heartbeat(0, NOWHERE),
    StepDone(0, 1, (), (), (), 0.0, 0.0, 0, BATCH),
    Failed(0, Failure(Cause.USER, "no")),
    StoreRequest(0, 1, StoreOperation.SET, ("k",)),
]


@pytest.mark.parametrize("message", OF_ANOTHER, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("number", [1, 3])
def test_a_message_of_another_generation_is_dropped(message: FromWorker, number: int) -> None:
    job = ScriptedJob(2, generation=2).running()
    before = pickle.dumps(job.job)
    job.now += 1.0
    effects = job.handle(MessageReceived(b"w0", number, message))
    assert effects == [Dropped(f"{type(message).__name__} of generation {number}")]
    assert pickle.dumps(job.job) == before


def test_an_exit_of_another_generation_is_dropped() -> None:
    job = ScriptedJob(2, generation=2).running()
    before = pickle.dumps(job.job)
    effects = job.handle(WorkerExited(0, 1, -9, NOWHERE))
    assert effects == [Dropped("WorkerExited of generation 1")]
    assert pickle.dumps(job.job) == before
    job.handle(WorkerExited(0, 2, -9, NOWHERE))
    assert job.failure.message == "the worker of stage 0 was killed by SIGKILL"


def test_a_worker_of_another_generation_cannot_join() -> None:
    job = ScriptedJob(1, generation=2)
    assert of(job.handle(MessageReceived(b"w0", 1, Hello(0, "host", 1))), Send) == []
    assert job.job.peers == []
    job.join()
    assert job.job.peers == [b"w0"]


def test_the_end_is_sent_to_members_only() -> None:
    job = ScriptedJob(3)
    job.join(2, 0)
    job.receive(Hello(0, "host", 1), peer=b"late")
    effects = job.handle(ParentLost(text="x"))
    assert [send.peer for send in ends(effects)] == [b"w2", b"w0"]
    assert of(effects, Send) == [Send(peer, Abort("x", AGAIN), 1) for peer in (b"w2", b"w0")]
