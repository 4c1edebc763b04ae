"""One generation: the messages it accepts and drops, and interrupts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.coordinator.effects import Dropped, Send
from pipeworker.coordinator.generation import Generation
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import StepResult
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import Verdict
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.directions import FromWorker
from pipeworker.wire.messages.plan import Described, Ready
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Hello
from pipeworker.wire.messages.profile import Measured
from pipeworker.wire.messages.step import Call, CallKind, EvaluationDone, StepDone, Upcoming, Update
from support.pure.coordinator import (
    BATCH,
    LAYERS,
    PATIENCE,
    ScriptedJob,
    commit,
    evaluation_of,
    of,
    own_loop_job,
    sent_to,
    updates,
)

# Updates are all or none.


@given(workers=st.integers(1, 5), data=st.data())
def test_no_update_before_every_worker_is_done(workers: int, data: st.DataObject) -> None:
    """In any order of answers, only the last one continues the job."""
    job = ScriptedJob(workers).running()
    for step in (1, 2):
        order = data.draw(st.permutations(range(workers)))
        for rank in order[:-1]:
            assert job.done(rank, step) == []
            assert job.done(rank, step) == []  # a repeated message counts once
        assert updates(job.done(order[-1], step)) == [Update(step)] * workers


def test_no_update_when_a_worker_fails_instead() -> None:
    job = ScriptedJob(3).running()
    job.done(0, 1)
    job.done(2, 1)
    job.receive(Failed(1, Failure(Cause.USER, "no")))
    assert job.done(1, 1) == []
    assert updates(job.effects) == []
    assert job.ended.steps == 0


# Interrupts.


def test_an_interrupt_takes_effect_at_the_end_of_the_step() -> None:
    job = ScriptedJob(2).running()
    job.step(1)
    assert of(job.interrupt(), Verdict) == []
    assert job.interrupt() == []  # a second interrupt is ignored
    job.done(0, 2)
    job.tick(DEFAULT.interrupt)
    assert job.state() is State.STEPPING
    job.done(1, 2)
    assert job.state() is State.SAVING
    assert job.saved() == [commit(2)]
    job.checkpoint_committed()
    seconds, bubble, busy = DEFAULT.interrupt, job.ended.bubble, (0.25, 0.25)
    verdict = Verdict("interrupted", 130, 2, seconds, (2, 102), bubble, None, busy=busy)
    assert replace(job.ended, speed=None) == verdict
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2]
    assert sent_to(job.effects, 0)[-1] == Abort("interrupted", 130)


def test_an_interrupt_waits_while_a_worker_makes_progress() -> None:
    """However long the step takes: `worker_timeout` distinguishes work from a standstill."""
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    job.interrupt()
    job.done(0, 1)
    for microbatch in range(4):
        job.receive(Heartbeat(0, Position(Phase.WAITING, 1), waiting=1))
        job.receive(Heartbeat(1, Position(Phase.FORWARD, 1, microbatch)))
        job.tick(PATIENCE - 1.0)
        assert job.state() is State.STEPPING
    for rank in job.ranks:
        job.receive(Heartbeat(rank, Position(Phase.FORWARD, 1, 3)))
    for _ in range(3):
        job.tick(PATIENCE / 2)
        for rank in job.ranks:
            job.receive(Heartbeat(rank, Position(Phase.FORWARD, 1, 3)))
    assert job.ended.status == "interrupted"
    assert job.ended.steps == 0


def test_an_expired_interrupt_ends_an_own_loop_within_its_step() -> None:
    job = own_loop_job()
    job.called(CallKind.STEP)
    job.interrupt()
    job.done(0, 1)
    job.tick(DEFAULT.interrupt)
    assert job.state() is State.STEPPING
    job.tick(0.1)
    assert job.ended.status == "interrupted"
    assert job.ended.steps == 0


@pytest.mark.parametrize("held", [State.SAVING, State.COMMITTING])
def test_a_checkpoint_may_take_longer_than_an_interrupt(held: State) -> None:
    for job in (own_loop_job(), ScriptedJob(2, worker_timeout=PATIENCE).running()):
        if job.options.own_loop:
            job.called(CallKind.STEP)
        job.interrupt()
        job.step(1)
        if held is State.COMMITTING:
            job.saved()
        for _ in range(4):
            for rank in job.ranks:
                job.receive(Heartbeat(rank, Position(Phase.SAVING, 1)))
            job.tick(PATIENCE / 2)
        assert job.state() is held


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_before_the_first_step_an_interrupt_ends_at_once(joined: int) -> None:
    job = ScriptedJob(2)
    if joined:
        job.join(*range(joined))
    job.interrupt()
    assert job.ended.exit_status == 130


def test_while_the_stages_are_built_an_interrupt_ends_at_once() -> None:
    job = ScriptedJob(2).described()
    assert job.state() is State.BUILDING
    job.interrupt()
    assert job.ended.status == "interrupted"


def test_an_interrupt_while_saving_lets_the_checkpoint_complete() -> None:
    job = ScriptedJob(1, steps=1).running()
    job.step(1)
    job.interrupt()
    assert job.saved() == [commit(1)]
    job.checkpoint_committed()
    assert job.ended.status == "done"


def test_an_interrupt_within_a_step_of_several_mini_batches_waits_for_all_of_them() -> None:
    job = ScriptedJob(2, accumulate=2).running()
    job.interrupt()
    job.step(1)
    assert job.state() is State.STEPPING
    job.step(1)
    job.checkpointed()
    assert job.ended.status == "interrupted"
    assert job.ended.steps == 1


def test_an_interrupt_logs_the_awaited_ranks() -> None:
    job = ScriptedJob(3).running()
    job.done(1, 1)
    (log,) = job.interrupt()
    assert str(log).count("waiting for StepDone of rank 0, 2: an update happens on all stages")


# Dropped messages.


def test_a_rank_joins_once() -> None:
    job = ScriptedJob(2)
    job.join()
    for rank in (0, 2, -1):
        dropped, answer = job.receive(Hello(rank, "host", 7), peer=b"late")
        assert isinstance(dropped, Dropped)
        reason = f"rank {rank} has already joined or is not part of this job"
        assert answer == Send(b"late", Abort(reason, AGAIN), 1)
        assert not job.job.generation.roster.member(b"late")
    assert job.job.peers == [b"w0", b"w1"]
    job.describe()
    assert job.state() is State.BUILDING


@pytest.mark.parametrize("rank", [0, 1])
def test_a_repeated_hello_of_a_member_is_dropped(rank: int) -> None:
    """It does not take another rank's place either."""
    job = ScriptedJob(2)
    job.join(0)
    (dropped,) = job.receive(Hello(rank, "host", 1000), peer=b"w0")
    assert dropped == Dropped(f"Hello of rank {rank}: its sender has joined")
    job.join(1)
    job.describe()
    assert job.state() is State.BUILDING


@pytest.mark.parametrize(
    "message",
    [
        Described(0, LAYERS, ()),
        Ready(0, (), "cpu", BATCH),
        StepDone(0, 2, (), (), (), 0.0, 0.0, 0, BATCH),
        StepDone(0, 0, (), (), (), 0.0, 0.0, 0, BATCH),
    ],
    ids=lambda m: f"{type(m).__name__}-{getattr(m, 'step', '')}",
)
def test_a_message_at_the_wrong_time_is_dropped(message: FromWorker) -> None:
    job = ScriptedJob(2).running()
    assert [type(effect) for effect in job.receive(message)] == [Dropped]
    assert of(job.done(1, 1), Send) == []
    assert len(of(job.done(0, 1), Send)) == 2


def test_a_message_for_another_rank_is_dropped() -> None:
    job = ScriptedJob(2).running()
    job.done(0, 1)
    done = StepDone(1, 1, (1.0,), (), (), 0.0, 0.0, 0, None)
    dropped = Dropped("StepDone as rank 1, which is not its sender's rank")
    assert job.receive(done, b"unknown") == [dropped]
    assert job.state() is State.STEPPING
    failed = Failed(0, Failure(Cause.USER, "it was the other one", rank=1))
    job.receive(failed)
    assert job.failure.rank == 0


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_message_of_another_step_is_dropped(step: int) -> None:
    job = ScriptedJob(1, evaluate_every=1, steps=1).running()
    job.step(1)
    (dropped,) = job.evaluated(step)
    assert dropped == Dropped(f"EvaluationDone of step {step} in step 1")
    job.evaluated(1)
    (dropped,) = job.saved(step)
    assert dropped == Dropped(f"Saved of step {step}, which is not being written")
    assert job.saved() == [commit(1, evaluation=evaluation_of(1))]
    assert [type(effect) for effect in job.checkpoint_committed(step)] == [Dropped]
    assert job.checkpoint_committed()[-1] == job.ended


# The table.

TABLE = Generation.LEGAL
ALWAYS = set(Generation.ALWAYS) | {Hello}
MESSAGES: dict[type, FromWorker] = {
    Described: Described(0, LAYERS, ()),
    Measured: Measured(0),
    Ready: Ready(0, (), "cpu", BATCH),
    Upcoming: Upcoming(0, 2),
    StepDone: StepDone(0, 1, (1.0,), (), (1.0,), 0.0, 0.1, 0, BATCH),
    EvaluationDone: EvaluationDone(0, 1, 0, None),
    Call: Call(0, CallKind.STEP, BATCH),
}


def in_state(state: State) -> ScriptedJob:
    """Return a job of two workers in a state."""
    if state is State.CALLING:
        return own_loop_job()
    more: dict[str, Any] = {}
    if state in (State.MEASURING, State.PLANNING):
        more = {"balance": None, "makes_plans": False}
    if state is State.PLANNING:
        more["start"] = Start(facts=NetworkFacts((LayerFacts("Linear"),) * len(LAYERS)))
    job = ScriptedJob(2, evaluate_every=1, steps=1, **more)
    job.join()
    if state is State.JOINING:
        return job
    job.describe()
    if state in (State.MEASURING, State.PLANNING):
        return job
    if state is State.BUILDING:
        return job
    job.ready()
    if state is State.STEPPING:
        return job
    job.step(1)
    if state is State.EVALUATING:
        return job
    job.evaluated(1)
    if state is State.SAVING:
        return job
    job.saved()
    if state is State.COMMITTING:
        return job
    job.checkpoint_committed()
    return job


@pytest.mark.parametrize("state", State, ids=lambda s: s.name)
def test_every_state_can_be_reached_and_has_a_reason(state: State) -> None:
    assert in_state(state).state() is state
    what, why = state.awaited_message, state.reason
    assert why
    legal = {kind.__name__ for kind in TABLE[state]} or {"Saved"} & {what}
    assert what in legal if what else not legal


def test_the_table_has_exactly_the_messages_of_workers() -> None:
    legal = {kind for kinds in TABLE.values() for kind in kinds}
    assert set(TABLE) == set(State)
    assert legal | ALWAYS == set(get_args(FromWorker))
    assert not legal & ALWAYS
    assert set(MESSAGES) == legal


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        (state, kind)
        for state in State
        for kind in MESSAGES
        if state is not State.OVER and kind not in TABLE[state]
    ],
    ids=lambda value: value.name if isinstance(value, State) else value.__name__,
)
def test_a_message_not_in_the_table_is_dropped_with_the_reason(state: State, kind: type) -> None:
    job = in_state(state)
    (dropped,) = job.receive(MESSAGES[kind])
    assert isinstance(dropped, Dropped)
    what, why = state.awaited_message, state.reason
    waiting = f"waiting for {what} of rank 0, 1: {why}" if what else why
    assert dropped.text == f"{kind.__name__} while {waiting}"
    assert job.state() is state


def test_awaited_ranks_are_named() -> None:
    job = ScriptedJob(3).running()
    assert job.job.generation.waiting.startswith("waiting for StepDone of rank 0, 1, 2:")
    job.done(1, 1)
    assert job.job.generation.waiting.startswith("waiting for StepDone of rank 0, 2:")
    job.receive(Failed(0, Failure(Cause.USER, "no")))
    assert any(", while waiting for StepDone of rank 0, 2:" in str(e) for e in job.effects)


def test_the_end_of_an_unknown_checkpoint_changes_nothing() -> None:
    for state in State:
        if state in (State.COMMITTING, State.OVER):
            continue
        job = in_state(state)
        (dropped,) = job.checkpoint_committed(7)
        assert isinstance(dropped, Dropped)
        assert dropped.text == f"the checkpoint of step 7 while {job.job.generation.waiting}"
        assert job.state() is state
        assert job.job.progress.saved == -1


def test_an_unexpected_part_of_a_checkpoint_is_dropped_in_every_state() -> None:
    for state in State:
        if state is State.OVER:
            continue
        job = in_state(state)
        (dropped,) = job.receive(Saved(0, 7))
        assert dropped == Dropped("Saved of step 7, which is not being written")
        assert job.state() is state
