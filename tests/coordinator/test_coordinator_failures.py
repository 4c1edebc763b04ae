"""Failures: the first cause is kept."""

from __future__ import annotations

import dataclasses

import pytest
from coordinator_job import (
    NOWHERE,
    PATIENCE,
    Job,
    of,
)

from pipeworker.coordinator.effects import (
    Log,
    Status,
)
from pipeworker.coordinator.machine import State
from pipeworker.coordinator.roster import ECHO_GRACE, JOIN_FACTOR, SILENT_AFTER
from pipeworker.wire.messages import (
    Cause,
    Failed,
    Failure,
    Heartbeat,
    Phase,
    Position,
)

OURS = Position(Phase.BACKWARD, 1, 2, 3)


def test_a_failure_ends_the_job_at_once() -> None:
    job = Job(3).running()
    failure = Failure(Cause.USER, "layer 3 raised", -1, OURS, "Linear", "Traceback")
    job.says(Failed(2, failure))
    assert job.failure == dataclasses.replace(failure, rank=2)
    assert job.ended.exit_status == 1
    assert job.says(Failed(1, Failure(Cause.USER, "me too"))) == []


def test_an_echo_waits_for_its_cause() -> None:
    job = Job(3).running()
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.says(Failed(2, Failure(Cause.PEER, "1>2 closed")))
    job.tick(ECHO_GRACE / 2)
    assert job.machine.state is State.RUNNING
    job.exited(1, -9, Position(Phase.FORWARD, 1, 0, 1))
    assert job.failure.message == "the worker of stage 1 was killed by signal 9"
    assert job.failure.cause is Cause.LOST
    assert job.failure.layer_class == ""  # layer 1 is not one of stage 1
    assert len([text for log in of(job.effects, Log) if "echo" in (text := log.text)]) == 2


def test_echoes_alone_name_who_went_silent() -> None:
    job = Job(3).running()
    job.now += SILENT_AFTER
    for rank in (0, 2):
        job.says(Failed(rank, Failure(Cause.PEER, "closed")))
    job.tick(ECHO_GRACE - 0.1)
    assert job.machine.state is State.RUNNING
    job.tick(0.1)
    assert job.failure.rank == 1
    assert job.failure.message == "the worker of stage 1 (pid 1001 on host) is gone"


def test_an_echo_without_any_cause_is_shown_as_it_is() -> None:
    job = Job(2).running()
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += ECHO_GRACE
    job.says(Heartbeat(1, Position()))
    job.tick()
    assert job.failure.cause is Cause.PEER
    assert job.failure.message == "0>1 closed, and nobody reported why"


def test_a_signal_to_all_is_an_interrupt() -> None:
    job = Job(2).running()
    for rank in (0, 1):
        job.says(Failed(rank, Failure(Cause.SIGNAL, "SIGTERM")))
    job.tick(ECHO_GRACE)
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.exit_status == 130


def test_a_signal_to_one_is_a_loss() -> None:
    job = Job(2).running()
    job.says(Failed(1, Failure(Cause.SIGNAL, "the worker of stage 1 was ended by SIGTERM")))
    job.exited(1, 143)
    assert job.failure.cause is Cause.LOST
    assert "SIGTERM" in job.failure.message


@pytest.mark.parametrize(
    ("code", "how"),
    [(-11, "was killed by signal 11"), (3, "exited with status 3"), (0, "status 0")],
)
def test_an_exit_before_the_end_is_a_failure(code: int, how: str) -> None:
    job = Job(2).running()
    job.exited(1, code, Position(Phase.FORWARD, 1, 0, 3))
    assert how in job.failure.message
    assert (job.failure.rank, job.failure.layer_class) == (1, "Linear")
    assert job.ended.exit_status == 1


def test_silence_is_a_hang_that_names_the_stage() -> None:
    job = Job(3, worker_timeout=PATIENCE).running()
    stuck = Position(Phase.FORWARD, 1, 0, 2)
    job.says(Heartbeat(1, stuck))
    for _ in range(2):
        job.now += PATIENCE / 2
        for rank in (0, 2):
            job.says(Heartbeat(rank, Position()))
        job.tick()
    assert job.machine.state is State.RUNNING
    job.tick(0.1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.message == "stage 1 (pid 1001 on host) has not answered for 60 s"
    assert (job.failure.position, job.failure.layer_class) == (stuck, "Linear")


def test_missing_ranks_are_named() -> None:
    job = Job(4, worker_timeout=PATIENCE)
    job.join(0, 2)
    for _ in range(JOIN_FACTOR * 2):
        job.tick(PATIENCE / 2)
        job.says(Heartbeat(0, Position()))
        job.says(Heartbeat(2, Position()))
    assert job.machine.state is State.GATHERING
    job.tick(0.1)
    assert job.failure.message == "rank 1, 3 did not join within 300 s"


@pytest.mark.parametrize("event", ["abandoned", "lost", "defect"])
def test_what_a_job_cannot_do_without(event: str) -> None:
    job = Job(2).running()
    match event:
        case "abandoned":
            job.did(job.machine.abandoned(-1))
            assert job.failure.message == "the process that started the job is gone"
        case "lost":
            job.did(job.machine.lost("no fork server"))
            assert (job.failure.cause, job.failure.message) == (Cause.LOST, "no fork server")
        case "defect":
            job.did(job.machine.defect("disk full"))
            assert (job.failure.cause, job.failure.message) == (Cause.INTERNAL, "disk full")
    assert job.ended.exit_status == 1


def test_the_starter_that_is_a_worker_is_lost_as_one() -> None:
    job = Job(2).running()
    job.did(job.machine.abandoned(0))
    assert job.failure.message == "the worker of stage 0 (pid 1000 on host) is gone"


def test_a_usage_error_of_a_worker_gives_exit_status_2() -> None:
    job = Job(2)
    job.join()
    job.says(Failed(1, Failure(Cause.USAGE, "loss is missing")))
    assert job.failure.rank == 1
    assert job.ended.exit_status == 2


def test_a_connection_that_stays_closed_is_a_lost_worker() -> None:
    job = Job(2).running()
    job.machine.unreachable(b"w1", job.now)
    job.machine.unreachable(b"stranger", job.now)
    job.tick(ECHO_GRACE)
    job.machine.unreachable(b"w1", job.now)  # said again with each ping
    job.tick(0.1)
    assert job.failure.cause is Cause.LOST
    assert job.failure.message == "the worker of stage 1 (pid 1001 on host) is gone"


def test_a_connection_that_comes_back_is_not() -> None:
    job = Job(2).running()
    job.machine.unreachable(b"w1", job.now)
    job.now += 1.0
    job.says(Heartbeat(1, NOWHERE))
    job.tick(ECHO_GRACE + 1.0)
    assert job.machine.state is State.RUNNING
