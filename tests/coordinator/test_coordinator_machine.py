"""The coordinator's decisions: events in, effects out, time by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
from coordinator_job import (
    BATCH,
    LAYERS,
    Job,
    of,
    sent_to,
)
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.coordinator.effects import (
    Commit,
    Dropped,
    Ended,
    Log,
    Planned,
    Send,
    Status,
)
from pipeworker.coordinator.machine import INTERRUPT_GRACE, State
from pipeworker.plan.schedule import build, format_actions
from pipeworker.wire.messages import (
    Advance,
    Cause,
    Described,
    Failed,
    Failure,
    Finish,
    FromWorker,
    Hello,
    Plan,
    Ready,
    RunStep,
    Save,
    Saved,
    StepDone,
    StepResult,
    Update,
    Welcome,
)

# The happy life.


def test_a_whole_life() -> None:
    job = Job(stages=2, recompute="never")
    assert job.join(0)[1] == Send(b"w0", Welcome(job.options.to_json(), "runs/x"))
    assert job.join(1)[-1] == Log("all ranks joined")

    assert job.says(Described(0, LAYERS, ())) == []
    plans = job.says(Described(1, LAYERS, ()))
    edges = ("0>1/activation", "0>1/target", "1>0/gradient")
    assert of(plans, Send) == [
        Send(b"w0", Plan(0, 2, 0, 3, edges, ())),
        Send(b"w1", Plan(1, 2, 3, 5, edges, ())),
    ]
    assert "schedule gpipe is proven" in of(plans, Log)[0].text

    job.now += 5
    assert job.says(Ready(0, LAYERS[:3], 40, "cpu", BATCH)) == []
    planned, *first = job.says(Ready(1, LAYERS[3:], 20, "cpu", None))
    assert isinstance(planned, Planned)
    assert [stage.layers for stage in planned.stages] == [(0, 3), (3, 5)]
    assert planned.proof.bubble == pytest.approx(1 / 5)
    actions = [format_actions(stage) for stage in build("gpipe", 2, 4, "never").stages]
    assert first == [
        Send(b"w%d" % rank, Advance(None, RunStep(1, BATCH, False, actions[rank])))
        for rank in (0, 1)
    ]

    job.now += 2.0
    assert job.done(1, 1) == []
    onward = job.done(0, 1)
    assert [onward[0], onward[2]] == [
        Send(b"w%d" % rank, Advance(Update(1, 1.0), RunStep(2, BATCH, False, "")))
        for rank in (0, 1)
    ]
    assert onward[1:2] == [
        StepResult(
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
    ]

    job.now += 1.0
    assert sent_to(job.step(2), 0) == [Advance(Update(2, 1.0), RunStep(3, BATCH, True, ""))]
    assert sent_to(job.step(3), 1) == [Advance(Update(3, 1.0), None), Save(3)]
    assert job.machine.state is State.SAVING

    assert job.says(Saved(1, 3)) == []
    assert job.says(Saved(0, 3)) == [Commit(3)]
    assert job.did(job.machine.committed())[1:] == [
        Send(b"w0", Finish("", 0)),
        Send(b"w1", Finish("", 0)),
        Ended(Status.DONE, 0, 3, (3, 103), pytest.approx((0.75 + 0.5 + 0) / 3), None),
    ]
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2, 3]
    assert job.step(4) == job.join() == job.tick(1000) == job.exited(0, -9) == []
    assert job.interrupt() == job.machine.lost("x") == job.machine.defect("x") == []


@pytest.mark.parametrize("microbatches", [1, 4, 64])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_two_messages_a_worker_a_step(stages: int, microbatches: int) -> None:
    job = Job(stages, microbatches=microbatches, steps=50)
    job.join()
    job.describe()
    job.ready(dataclasses.replace(BATCH, microbatches=microbatches))
    batch = dataclasses.replace(BATCH, microbatches=microbatches)
    for step in range(1, 11):
        before = len(of(job.effects, Send))
        for rank in range(stages):  # one in
            job.done(rank, step, batch=batch if rank == 0 else None)
        assert len(of(job.effects, Send)) - before == stages  # one out
        for rank in range(stages):
            advance = job.sent(rank, Advance)[-1]
            assert advance.update == Update(step, 1.0)
            assert advance.run == RunStep(step + 1, batch, False, "")


@given(stages=st.integers(1, 5), data=st.data())
def test_no_update_before_every_stage_is_done(stages: int, data: st.DataObject) -> None:
    """All-or-none: in whatever order stages answer, the last answer alone moves the job on."""
    job = Job(stages).running()
    for step in (1, 2):
        order = data.draw(st.permutations(range(stages)))
        for rank in order[:-1]:
            assert job.done(rank, step) == []
            assert job.done(rank, step) == []  # said twice, counted once
        updates = [send.message for send in of(job.done(order[-1], step), Send)]
        assert [u.update for u in updates if isinstance(u, Advance)] == [Update(step, 1.0)] * stages


def test_no_update_when_a_stage_fails_instead() -> None:
    job = Job(3).running()
    job.done(0, 1)
    job.done(2, 1)
    job.says(Failed(1, Failure(Cause.USER, "no")))
    assert job.done(1, 1) == []
    assert not any(a.update for rank in range(3) for a in job.sent(rank, Advance))
    assert job.ended.steps == 0


def test_the_first_step_ends_the_data_of_one_pass() -> None:
    """Without --steps the job ends where the first stage has no next mini-batch."""
    job = Job(2, steps=None).running()
    assert job.step(1, batch=None)[0] == Send(
        b"w0", Advance(Update(1, 1.0, epoch_ended=True), None)
    )
    assert job.machine.state is State.SAVING


def test_a_smaller_batch_gets_its_own_actions_and_a_larger_one_again() -> None:
    small = dataclasses.replace(BATCH, microbatches=2, samples=2)
    job = Job(2, steps=None, recompute="never").running()
    job.step(1, batch=small)
    job.step(2, batch=small)
    job.step(3)
    run = [a.run.actions for a in job.sent(0, Advance) if a.run]
    four, two = (format_actions(build("gpipe", 2, m, "never").stages[0]) for m in (4, 2))
    assert run == [four, two, "", four]


# Interrupts.


def test_an_interrupt_takes_effect_at_the_end_of_the_step() -> None:
    job = Job(2).running()
    job.step(1)
    assert of(job.interrupt(), Ended) == []
    assert job.interrupt() == []  # once is enough
    job.done(0, 2)
    job.tick(INTERRUPT_GRACE)
    assert job.machine.state is State.RUNNING
    job.done(1, 2)
    assert job.ended == Ended(Status.INTERRUPTED, 130, 2, (2, 102), job.ended.bubble, None)
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2]
    assert sent_to(job.effects, 0)[-1] == Finish("interrupted", 130)


def test_an_interrupt_that_is_overdue_ends_the_step() -> None:
    job = Job(2).running()
    job.interrupt()
    job.done(0, 1)
    job.tick(INTERRUPT_GRACE + 0.1)
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.steps == 0


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_before_the_first_step_an_interrupt_ends_at_once(joined: int) -> None:
    job = Job(2)
    if joined:
        job.join(*range(joined))
    job.interrupt()
    assert job.ended.exit_status == 130


def test_an_interrupt_while_saving_lets_the_checkpoint_complete() -> None:
    job = Job(1, steps=1).running()
    job.step(1)
    job.interrupt()
    assert job.saved() == [Commit(1)]
    job.did(job.machine.committed())
    assert job.ended.status is Status.DONE


# What is not acted on.


def test_a_rank_joins_once() -> None:
    job = Job(2)
    job.join()
    for rank in (0, 2, -1):
        dropped, answer = job.says(Hello(rank, "host", 7), peer=b"late")
        assert isinstance(dropped, Dropped)
        assert answer == Send(b"late", Finish(f"rank {rank} is taken or not part of this job", 1))
        assert not job.machine.knows(b"late")
    assert job.machine.peers == [b"w0", b"w1"]
    job.describe()
    assert job.machine.state is State.BUILDING


@pytest.mark.parametrize(
    "message",
    [
        Described(0, LAYERS, ()),
        Ready(0, LAYERS, 1, "cpu", BATCH),
        Saved(0, 1),
        StepDone(0, 2, (), (), (), 0.0, 0.0, 0, BATCH),
        StepDone(0, 0, (), (), (), 0.0, 0.0, 0, BATCH),
    ],
    ids=lambda m: f"{type(m).__name__}-{getattr(m, 'step', '')}",
)
def test_what_comes_at_the_wrong_time_is_dropped(message: FromWorker) -> None:
    job = Job(2).running()
    assert [type(effect) for effect in job.says(message)] == [Dropped]
    assert of(job.done(1, 1), Send) == []
    assert len(of(job.done(0, 1), Send)) == 2


def test_a_worker_speaks_for_its_own_rank_alone() -> None:
    job = Job(2).running()
    job.done(0, 1)
    for peer in (b"w0", b"stranger"):
        done = StepDone(1, 1, (1.0,), (), (), 0.0, 0.0, 0, None)
        assert [type(effect) for effect in job.says(done, peer)] == [Dropped]
        failed = Failed(1, Failure(Cause.USER, "not me"))
        assert [type(effect) for effect in job.says(failed, peer)] == [Dropped]
    assert job.machine.state is State.RUNNING
    failed = Failed(0, Failure(Cause.USER, "it was the other one", rank=1))
    job.says(failed)
    assert job.failure.rank == 0


@given(data=st.data())
def test_no_order_of_events_breaks_the_machine(data: st.DataObject) -> None:
    """Whatever comes, in whatever order: one end at most, told to all who joined, then silence."""
    job = Job(2, worker_timeout=5.0)
    ranks = st.integers(-1, 2)
    batches = st.sampled_from([None, BATCH])
    causes = st.sampled_from(Cause)
    event = st.one_of(
        st.builds(Hello, ranks, st.just("host"), st.just(1)),
        st.builds(Described, ranks, st.just(LAYERS), st.just(())),
        st.builds(lambda rank, batch: Ready(rank, LAYERS, 1, "cpu", batch), ranks, batches),
        st.builds(
            lambda rank, step, batch: StepDone(rank, step, (1.0,), (), (1.0,), 0.1, 0.1, 1, batch),
            ranks,
            st.integers(0, 3),
            batches,
        ),
        st.builds(Saved, ranks, st.just(3)),
        st.builds(lambda rank, cause: Failed(rank, Failure(cause, "m")), ranks, causes),
        st.sampled_from(["interrupt", "exit", "tick", "commit"]),
    )
    start = data.draw(st.sampled_from([Job.join, Job.running, lambda job: None]))
    start(job)
    for chosen in data.draw(st.lists(event, max_size=25)):
        over = job.machine.state is State.ENDED
        match chosen:
            case "interrupt":
                effects = job.interrupt()
            case "exit":
                effects = job.exited(data.draw(st.integers(0, 1)), 1)
            case "tick":
                effects = job.tick(data.draw(st.sampled_from([0.2, 3.0, 10.0])))
            case "commit":
                committing = job.effects and isinstance(job.effects[-1], Commit) and not over
                effects = job.did(job.machine.committed()) if committing else []
            case _:
                effects = job.says(chosen)
        assert not (over and effects)
    ends = of(job.effects, Ended)
    assert len(ends) == (job.machine.state is State.ENDED)
    finished = [s.peer for s in of(job.effects, Send) if isinstance(s.message, Finish)]
    for peer in job.machine.peers:
        assert finished.count(peer) >= len(ends)
