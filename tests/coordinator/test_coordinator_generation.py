"""One incarnation of the workers: what it takes part in, what it drops, how it is interrupted."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.coordinator.effects import Dropped, Ended, Send, Status
from pipeworker.coordinator.generation import Generation
from pipeworker.coordinator.states import _WHY, State, Waiting
from pipeworker.errors import AGAIN
from pipeworker.timings import DEFAULT
from pipeworker.wire.messages.calls import Call, CallKind
from pipeworker.wire.messages.checkpoint import Saved
from pipeworker.wire.messages.directions import FromWorker
from pipeworker.wire.messages.evaluation import EvaluationDone
from pipeworker.wire.messages.failure import Abort, Cause, Failed, Failure
from pipeworker.wire.messages.plan import Described, Ready
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Heartbeat, Hello
from pipeworker.wire.messages.step import StepDone, StepResult, Upcoming, Update
from support.coordinator import (
    BATCH,
    LAYERS,
    PATIENCE,
    Scripted,
    commit,
    of,
    own,
    passed,
    sent_to,
    updates,
)

# All or none.


@given(workers=st.integers(1, 5), data=st.data())
def test_no_update_before_every_worker_is_done(workers: int, data: st.DataObject) -> None:
    """All-or-none: in whatever order workers answer, the last answer alone moves the job on."""
    job = Scripted(workers).running()
    for step in (1, 2):
        order = data.draw(st.permutations(range(workers)))
        for rank in order[:-1]:
            assert job.done(rank, step) == []
            assert job.done(rank, step) == []  # said twice, counted once
        assert updates(job.done(order[-1], step)) == [Update(step)] * workers


def test_no_update_when_a_worker_fails_instead() -> None:
    job = Scripted(3).running()
    job.done(0, 1)
    job.done(2, 1)
    job.says(Failed(1, Failure(Cause.USER, "no")))
    assert job.done(1, 1) == []
    assert updates(job.effects) == []
    assert job.ended.steps == 0


# Interrupts.


def test_an_interrupt_takes_effect_at_the_end_of_the_step() -> None:
    job = Scripted(2).running()
    job.step(1)
    assert of(job.interrupt(), Ended) == []
    assert job.interrupt() == []  # once is enough
    job.done(0, 2)
    job.tick(DEFAULT.interrupt)
    assert job.state() is State.STEPPING
    job.done(1, 2)
    assert job.state() is State.SAVING
    assert job.saved() == [commit(2)]
    job.committed()
    bubble, busy = job.ended.bubble, (0.25, 0.25)
    assert job.ended == Ended(Status.INTERRUPTED, 130, 2, (2, 102), bubble, None, busy=busy)
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2]
    assert sent_to(job.effects, 0)[-1] == Abort("interrupted", 130)


def test_an_interrupt_waits_for_as_long_as_somebody_moves() -> None:
    """However long the step is: `worker_timeout` is what tells work from a standstill."""
    job = Scripted(2, worker_timeout=PATIENCE).running()
    job.interrupt()
    job.done(0, 1)
    for microbatch in range(4):
        job.says(Heartbeat(0, Position(Phase.WAITING, 1), waits=True))
        job.says(Heartbeat(1, Position(Phase.FORWARD, 1, microbatch)))
        job.tick(PATIENCE - 1.0)
        assert job.state() is State.STEPPING
    for rank in job.ranks:
        job.says(Heartbeat(rank, Position(Phase.FORWARD, 1, 3)))
    for _ in range(3):
        job.tick(PATIENCE / 2)
        for rank in job.ranks:
            job.says(Heartbeat(rank, Position(Phase.FORWARD, 1, 3)))
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.steps == 0


def test_an_interrupt_that_is_overdue_ends_a_loop_of_the_users_own_within_its_step() -> None:
    job = own()
    job.called(CallKind.STEP)
    job.interrupt()
    job.done(0, 1)
    job.tick(DEFAULT.interrupt)
    assert job.state() is State.STEPPING
    job.tick(0.1)
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.steps == 0


@pytest.mark.parametrize("held", [State.SAVING, State.COMMITTING])
def test_a_checkpoint_may_take_longer_than_an_interrupt(held: State) -> None:
    for job in (own(), Scripted(2, worker_timeout=PATIENCE).running()):
        if job.options.own_loop:
            job.called(CallKind.STEP)
        job.interrupt()
        job.step(1)
        if held is State.COMMITTING:
            job.saved()
        for _ in range(4):
            for rank in job.ranks:
                job.says(Heartbeat(rank, Position(Phase.SAVING, 1)))
            job.tick(PATIENCE / 2)
        assert job.state() is held


@pytest.mark.parametrize("joined", [0, 1, 2])
def test_before_the_first_step_an_interrupt_ends_at_once(joined: int) -> None:
    job = Scripted(2)
    if joined:
        job.join(*range(joined))
    job.interrupt()
    assert job.ended.exit_status == 130


def test_while_the_stages_are_built_an_interrupt_ends_at_once() -> None:
    job = Scripted(2)
    job.join()
    job.describe()
    assert job.state() is State.BUILDING
    job.interrupt()
    assert job.ended.status is Status.INTERRUPTED


def test_an_interrupt_while_saving_lets_the_checkpoint_complete() -> None:
    job = Scripted(1, steps=1).running()
    job.step(1)
    job.interrupt()
    assert job.saved() == [commit(1)]
    job.committed()
    assert job.ended.status is Status.DONE


def test_an_interrupt_within_a_step_of_several_mini_batches_waits_for_all_of_them() -> None:
    job = Scripted(2, accumulate=2).running()
    job.interrupt()
    job.step(1)
    assert job.state() is State.STEPPING
    job.step(1)
    job.saved()
    job.committed()
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.steps == 1


def test_an_interrupt_says_what_is_waited_for() -> None:
    job = Scripted(3).running()
    job.done(1, 1)
    (log,) = job.interrupt()
    assert str(log).count("waiting for StepDone of rank 0, 2: an update happens on all stages")


# What is not acted on.


def test_a_rank_joins_once() -> None:
    job = Scripted(2)
    job.join()
    for rank in (0, 2, -1):
        dropped, answer = job.says(Hello(rank, "host", 7), peer=b"late")
        assert isinstance(dropped, Dropped)
        reason = f"rank {rank} is taken or not part of this job"
        assert answer == Send(b"late", Abort(reason, AGAIN), 1)
        assert not job.job.generation.roster.knows(b"late")
    assert job.job.peers == [b"w0", b"w1"]
    job.describe()
    assert job.state() is State.BUILDING


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_says_hello_again_is_not_told_to_leave(rank: int) -> None:
    """Nor does it take another rank's place."""
    job = Scripted(2)
    job.join(0)
    (dropped,) = job.says(Hello(rank, "host", 1000), peer=b"w0")
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
def test_what_comes_at_the_wrong_time_is_dropped(message: FromWorker) -> None:
    job = Scripted(2).running()
    assert [type(effect) for effect in job.says(message)] == [Dropped]
    assert of(job.done(1, 1), Send) == []
    assert len(of(job.done(0, 1), Send)) == 2


def test_a_worker_speaks_for_its_own_rank_alone() -> None:
    job = Scripted(2).running()
    job.done(0, 1)
    done = StepDone(1, 1, (1.0,), (), (), 0.0, 0.0, 0, None)
    dropped = Dropped("StepDone as rank 1, which its sender is not")
    assert job.says(done, b"stranger") == [dropped]
    assert job.state() is State.STEPPING
    failed = Failed(0, Failure(Cause.USER, "it was the other one", rank=1))
    job.says(failed)
    assert job.failure.rank == 0


@pytest.mark.parametrize("step", [0, 2, 4])
def test_what_is_said_of_another_step_is_dropped(step: int) -> None:
    job = Scripted(1, evaluate_every=1, steps=1).running()
    job.step(1)
    (dropped,) = job.evaluated(step)
    assert dropped == Dropped(f"EvaluationDone of step {step} in step 1")
    job.evaluated(1)
    (dropped,) = job.saved(step)
    assert dropped == Dropped(f"Saved of step {step}, which is not being written")
    assert job.saved() == [commit(1, evaluation=passed(1))]
    assert [type(effect) for effect in job.committed(step)] == [Dropped]
    assert job.committed()[-1] == job.ended


# The table.

TABLE = Generation._LEGAL
ALWAYS = set(Generation._ALWAYS) | {Hello}
MESSAGES: dict[type, FromWorker] = {
    Described: Described(0, LAYERS, ()),
    Ready: Ready(0, (), "cpu", BATCH),
    Upcoming: Upcoming(0, 2),
    StepDone: StepDone(0, 1, (1.0,), (), (1.0,), 0.0, 0.1, 0, BATCH),
    EvaluationDone: EvaluationDone(0, 1, 0, None),
    Call: Call(0, CallKind.STEP, BATCH),
}


def in_state(state: State) -> Scripted:
    """A job of two workers that is there."""
    if state is State.CALLING:
        return own()
    job = Scripted(2, evaluate_every=1, steps=1)
    job.join()
    if state is State.JOINING:
        return job
    job.describe()
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
    job.committed()
    return job


@pytest.mark.parametrize("state", State, ids=lambda s: s.value)
def test_every_state_can_be_reached_and_has_a_reason(state: State) -> None:
    assert in_state(state).state() is state
    what, why = _WHY[state]
    assert why
    legal = {kind.__name__ for kind in TABLE[state]} or {"Saved"} & {what}
    assert what in legal if what else not legal


def test_the_table_has_what_workers_say_and_nothing_else() -> None:
    legal = {kind for kinds in TABLE.values() for kind in kinds}
    assert set(TABLE) == set(_WHY) == set(State)
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
    ids=lambda value: value.value if isinstance(value, State) else value.__name__,
)
def test_what_is_not_in_the_table_is_dropped_with_the_reason(state: State, kind: type) -> None:
    job = in_state(state)
    (dropped,) = job.says(MESSAGES[kind])
    assert isinstance(dropped, Dropped)
    what, why = _WHY[state]
    waiting = f"waiting for {what} of rank 0, 1: {why}" if what else why
    assert dropped.text == f"{kind.__name__} while {waiting}"
    assert job.state() is state


def test_who_is_waited_for_is_named() -> None:
    job = Scripted(3).running()
    assert str(job.job.generation.waiting).startswith("waiting for StepDone of rank 0, 1, 2:")
    job.done(1, 1)
    assert job.job.generation.waiting == Waiting(State.STEPPING, (0, 2))
    job.says(Failed(0, Failure(Cause.USER, "no")))
    assert any("it was waiting for StepDone of rank 0, 2:" in str(e) for e in job.effects)


def test_a_checkpoint_nobody_asked_for_changes_nothing() -> None:
    for state in State:
        if state in (State.COMMITTING, State.OVER):
            continue
        job = in_state(state)
        (dropped,) = job.committed(7)
        assert isinstance(dropped, Dropped)
        assert dropped.text.startswith("the checkpoint of step 7 while waiting for ")
        assert job.state() is state
        assert job.job.progress.saved == -1


def test_a_part_nobody_asked_for_is_dropped_whenever_it_comes() -> None:
    for state in State:
        if state is State.OVER:
            continue
        job = in_state(state)
        (dropped,) = job.says(Saved(0, 7))
        assert dropped == Dropped("Saved of step 7, which is not being written")
        assert job.state() is state
