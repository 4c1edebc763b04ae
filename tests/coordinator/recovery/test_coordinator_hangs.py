"""Workers that have stopped, or that wait for each other: hangs, and what is none."""

from __future__ import annotations

import dataclasses

import pytest

from pipeworker.coordinator.roster import JOIN_FACTOR
from pipeworker.coordinator.waiting import State
from pipeworker.facts.failure import Cause
from pipeworker.facts.position import Phase, Position
from pipeworker.timings import STALL_FACTOR
from pipeworker.wire.lines import Restart, Warned
from pipeworker.wire.messages.presence import Heartbeat, Hello
from support.pure.coordinator import (
    PATIENCE,
    TIMINGS,
    ScriptedJob,
    of,
    replaceable_job,
)


def test_silence_is_a_hang_that_names_the_stage() -> None:
    job = ScriptedJob(3, worker_timeout=PATIENCE).running()
    stuck = Position(Phase.FORWARD, 1, 0, 2)
    job.receive(Heartbeat(1, stuck))
    for _ in range(2):
        job.now += PATIENCE / 2
        for rank in (0, 2):
            job.receive(Heartbeat(rank, Position()))
        job.tick()
    assert job.state() is State.STEPPING
    job.tick(0.1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.message == "stage 1 (pid 1001 on host) has not answered for 60 s"
    assert (job.failure.position, job.failure.layer_class) == (stuck, "Linear")


@pytest.mark.parametrize("launched", [True, False])
def test_a_worker_that_is_busy_for_too_long_counts_as_hung(launched: bool) -> None:
    """It is alive and does not move; without a launcher it may stand in a debugger."""
    begin = replaceable_job if launched else ScriptedJob
    job = begin(2, worker_timeout=PATIENCE).running()
    at = Position(Phase.FORWARD, 1, 0, 3)
    for part in range(3 * STALL_FACTOR):
        assert job.state() is State.STEPPING
        moved = dataclasses.replace(at, microbatch=1) if part >= STALL_FACTOR else at
        for message in (waiting(0), Heartbeat(1, moved)):
            job.receive(message)
        job.tick(PATIENCE / 2)
    for message in (waiting(0), Heartbeat(1, moved)):
        job.receive(message)
    job.tick(0.1)
    if not launched:
        assert (job.state(), of(job.effects, Warned)) == (State.STEPPING, [])
        return
    (restart,) = of(job.effects, Restart)
    assert restart.cause == (
        "stage 1 (pid 1001 on host) has made no progress for 1800 s "
        "(layer 3 (Tanh), micro-batch 1, step 1)"
    )


def test_a_worker_that_does_not_finish_building_is_noted_and_then_lost() -> None:
    job = replaceable_job(2, worker_timeout=PATIENCE)
    stack = 'Stack (most recent call last):\n  File "job.py", line 3, in model'
    beats = (
        Heartbeat(0, Position(Phase.CONNECTING), waiting=1),
        Heartbeat(1, Position(Phase.BUILDING, layer=3), stack=stack),
    )
    for number in (1, 2):
        assert job.number == number
        job.effects.clear()
        job.described()
        assert job.state() is State.BUILDING
        for _ in range(2 * STALL_FACTOR):
            for beat in beats:
                job.receive(beat)
            job.tick(PATIENCE / 2 + 1)
        notes = [warned.text for warned in of(job.effects, Warned) if warned.note]
        assert [note.partition("s (")[0] for note in notes] == [
            f"stage 1 (pid 1001 on host) has made no progress for {seconds} "
            for seconds in (60, 120, 240, 480, 960)
        ]
        assert notes[0].endswith(
            "(building, layer 3); after 1800 s, 30 times --worker-timeout, it counts as lost\n"
            + stack
        )
    assert job.failure.cause is Cause.HUNG
    assert job.failure.traceback == stack
    assert [warned.text for warned in of(job.effects, Warned) if not warned.note] == [
        "the job is not restarted: it failed again at the same place"
    ]


@pytest.mark.parametrize("phase", [Phase.READING, Phase.COMPILING])
def test_a_note_names_the_log_with_the_stack_of_reading_and_leaves_out_compilation(
    phase: Phase,
) -> None:
    job = replaceable_job(1, worker_timeout=PATIENCE).running()
    for _ in range(3):
        job.receive(Heartbeat(0, Position(phase, 1)))
        job.tick(PATIENCE / 2 + 1)
    text = "\n  logs/worker-0.log has the stack of the process that reads"
    notes = [w.text for w in of(job.effects, Warned) if w.note and "progress" in w.text]
    assert [note.endswith(text) for note in notes] == [True] * (phase is Phase.READING)


def waiting(rank: int, microbatch: int = 0, parts: int = 0) -> Heartbeat:
    return Heartbeat(rank, Position(Phase.WAITING, 1, microbatch), waiting=1 + parts)


def test_workers_that_wait_for_each_other_are_named() -> None:
    job = ScriptedJob(3, worker_timeout=PATIENCE).running()
    job.done(0, 1)  # rank 0 has done its part and waits for the next command
    for microbatch in (0, 1):  # while one worker moves, the others may wait
        for _ in range(3):
            for message in (waiting(0), waiting(1, microbatch), waiting(2)):
                job.receive(message)
            job.tick(PATIENCE / 3)
    assert job.state() is State.STEPPING
    for _ in range(2):
        for message in (waiting(0), waiting(1, 1), waiting(2)):
            job.receive(message)
        job.tick(0.1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.message == (
        "stage 1 and stage 2 have waited 60 s without progress (deadlock?)"
    )
    assert job.failure.position == Position(Phase.WAITING, 1, 1)


def test_workers_that_receive_a_long_transfer_are_no_deadlock() -> None:
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    for parts in range(4):
        for rank in job.ranks:
            job.receive(waiting(rank, parts=parts))
        job.tick(0.9 * PATIENCE)
    assert job.state() is State.STEPPING


def test_workers_of_several_hosts_may_wait_for_tcp_after_an_outage() -> None:
    job = ScriptedJob(2, worker_timeout=PATIENCE)
    for rank in job.ranks:
        job.receive(Hello(rank, f"host-{rank}", 1000 + rank))
    job.describe()
    job.ready()
    limit = TIMINGS.network_patience(PATIENCE)
    assert limit > 2 * PATIENCE  # TCP waits for at most as long again as an outage took
    for _ in range(12):
        assert job.state() is State.STEPPING
        for rank in job.ranks:
            job.receive(waiting(rank))
        job.tick(limit / 10)
    text, remedy = job.failure.message.split("; ")
    assert text == (
        "stage 0 (pid 1000 on host-0) and stage 1 (pid 1001 on host-1) have waited "
        f"{limit:g} s without progress (deadlock?)"
    )
    assert "correct the MTU" in remedy  # heartbeats pass where large packets are dropped


def test_a_silent_worker_is_not_taken_for_one_that_waits() -> None:
    """Its last report, that it waits, is younger than its last move."""
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    job.done(1, 1)
    job.receive(waiting(0))
    job.tick(0.5)
    job.receive(waiting(0))
    for _ in range(3):
        job.tick(PATIENCE / 3)
        job.receive(waiting(1))
    assert job.state() is State.STEPPING  # it has waited long enough, and been silent for less
    job.tick(0.1)
    assert job.failure.message == "stage 0 (pid 1000 on host) has not answered for 60 s"


def test_a_worker_that_has_just_answered_has_ended_the_others_wait() -> None:
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    for _ in range(3):  # stage 0 computes, and stage 1 waits for it
        job.receive(Heartbeat(0, Position(Phase.FORWARD, 1, 0, 0)))
        job.receive(waiting(1))
        job.tick(PATIENCE / 2)
    job.receive(waiting(1))
    job.done(0, 1)  # stage 1 has what it waited for, as its next heartbeat will report
    job.tick(0.25)
    assert job.state() is State.STEPPING


def test_a_computing_worker_has_no_deadlock_timeout() -> None:
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    for _ in range(20):
        job.receive(Heartbeat(0, Position(Phase.FORWARD, 1, 0, 0)))
        job.receive(waiting(1))
        job.tick(PATIENCE / 2)
    assert job.state() is State.STEPPING


def test_missing_ranks_are_named() -> None:
    job = ScriptedJob(4, worker_timeout=PATIENCE)
    job.join(0, 2)
    for _ in range(JOIN_FACTOR * 2):
        job.tick(PATIENCE / 2)
        job.receive(Heartbeat(0, Position()))
        job.receive(Heartbeat(2, Position()))
    assert job.state() is State.JOINING
    job.tick(0.1)
    assert job.failure.message == "rank 1, 3 did not join within 300 s"
