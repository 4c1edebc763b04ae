"""Failures: the first cause is kept."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from pipeworker.coordinator import report
from pipeworker.coordinator.effects import Log, Status, Warn
from pipeworker.coordinator.events import Unreachable
from pipeworker.coordinator.job import Start
from pipeworker.coordinator.roster import JOIN_FACTOR, STALL_FACTOR
from pipeworker.coordinator.states import Lost, State, Verdict
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.wire.lines import Again
from pipeworker.wire.messages.checkpoint import Restore, Save, Saved
from pipeworker.wire.messages.failure import Abort, Cause, Failed, Failure
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Heartbeat, Welcome
from support.coordinator import (
    NOWHERE,
    PATIENCE,
    TIMINGS,
    Scripted,
    of,
    replaced,
    saves,
)

OURS = Position(Phase.BACKWARD, 1, 2, 3)


def test_a_failure_ends_the_job_at_once() -> None:
    job = Scripted(3).running()
    failure = Failure(Cause.USER, "layer 3 raised", -1, OURS, "Linear", "Traceback")
    job.says(Failed(2, failure))
    assert job.failure == dataclasses.replace(failure, rank=2, stage="stage 2")
    assert job.ended.exit_status == 1
    assert job.says(Failed(1, Failure(Cause.USER, "me too"))) == []


def test_an_echo_waits_for_its_cause() -> None:
    job = Scripted(3).running()
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.says(Failed(2, Failure(Cause.PEER, "1>2 closed")))
    job.tick(TIMINGS.echo / 2)
    assert job.state() is State.STEPPING
    job.exited(1, -9, Position(Phase.FORWARD, 1, 0, 1))
    assert job.failure.message == "the worker of stage 1 was killed by signal 9"
    assert job.failure.cause is Cause.LOST
    assert job.failure.layer_class == ""  # layer 1 is not one of stage 1
    assert len([text for log in of(job.effects, Log) if "echo" in (text := log.text)]) == 2


def test_echoes_alone_name_who_went_silent() -> None:
    job = Scripted(3).running()
    job.now += TIMINGS.silent
    for rank in (0, 2):
        job.says(Failed(rank, Failure(Cause.PEER, "closed")))
    job.tick(TIMINGS.echo - 0.1)
    assert job.state() is State.STEPPING
    job.tick(0.1)
    assert job.failure.rank == 1
    assert job.failure.message == "the worker of stage 1 (pid 1001 on host) is gone"


def test_an_echo_without_any_cause_is_shown_as_it_is() -> None:
    job = Scripted(2).running()
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += TIMINGS.echo
    job.says(Heartbeat(1, Position()))
    job.tick()
    assert job.failure.cause is Cause.PEER
    assert job.failure.message == "0>1 closed, and nobody reported why"


def test_a_signal_to_all_is_an_interrupt() -> None:
    job = Scripted(2).running()
    for rank in (0, 1):
        job.says(Failed(rank, Failure(Cause.SIGNAL, "SIGTERM")))
    job.tick(TIMINGS.echo)
    assert job.ended.status is Status.INTERRUPTED
    assert job.ended.exit_status == 130


def test_a_signal_to_one_is_a_loss() -> None:
    job = Scripted(2).running()
    job.says(Failed(1, Failure(Cause.SIGNAL, "the worker of stage 1 was ended by SIGTERM")))
    job.exited(1, 143)
    assert job.failure.cause is Cause.LOST
    assert "SIGTERM" in job.failure.message


@pytest.mark.parametrize(
    ("code", "how"),
    [(-11, "was killed by signal 11"), (3, "exited with status 3"), (0, "status 0")],
)
def test_an_exit_before_the_end_is_a_failure(code: int, how: str) -> None:
    job = Scripted(2).running()
    job.exited(1, code, Position(Phase.FORWARD, 1, 0, 3))
    assert how in job.failure.message
    assert (job.failure.rank, job.failure.layer_class) == (1, "Tanh")
    assert job.ended.exit_status == 1


def test_silence_is_a_hang_that_names_the_stage() -> None:
    job = Scripted(3, worker_timeout=PATIENCE).running()
    stuck = Position(Phase.FORWARD, 1, 0, 2)
    job.says(Heartbeat(1, stuck))
    for _ in range(2):
        job.now += PATIENCE / 2
        for rank in (0, 2):
            job.says(Heartbeat(rank, Position()))
        job.tick()
    assert job.state() is State.STEPPING
    job.tick(0.1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.message == "stage 1 (pid 1001 on host) has not answered for 60 s"
    assert (job.failure.position, job.failure.layer_class) == (stuck, "Linear")


@pytest.mark.parametrize("launched", [True, False])
def test_who_is_busy_for_too_long_is_stuck(launched: bool) -> None:
    """Where nobody can be debugging it: alive, at one place, and all others wait for it."""
    begin = replaced if launched else Scripted
    job = begin(2, worker_timeout=PATIENCE).running()
    at = Position(Phase.FORWARD, 1, 0, 3)
    for part in range(3 * STALL_FACTOR):
        assert job.state() is State.STEPPING
        moved = dataclasses.replace(at, microbatch=1) if part >= STALL_FACTOR else at
        for message in (waiting(0), Heartbeat(1, moved)):
            job.says(message)
        job.tick(PATIENCE / 2)
    for message in (waiting(0), Heartbeat(1, moved)):
        job.says(message)
    job.tick(0.1)
    if not launched:
        assert job.state() is State.STEPPING
        return
    (again,) = of(job.effects, Again)
    assert again.cause == (
        "stage 1 (pid 1001 on host) has not moved for 1800 s "
        "(stage 1, layer 3 (Tanh), micro-batch 1, step 1)"
    )


def waiting(rank: int, microbatch: int = 0) -> Heartbeat:
    return Heartbeat(rank, Position(Phase.WAITING, 1, microbatch), waits=True)


def test_who_wait_for_each_other_are_named() -> None:
    job = Scripted(3, worker_timeout=PATIENCE).running()
    job.done(0, 1)  # it has done its part, and waits to be told what is next
    for microbatch in (0, 1):  # while one moves, the others may wait
        for _ in range(3):
            for message in (waiting(0), waiting(1, microbatch), waiting(2)):
                job.says(message)
            job.tick(PATIENCE / 3)
    assert job.state() is State.STEPPING
    for _ in range(2):
        for message in (waiting(0), waiting(1, 1), waiting(2)):
            job.says(message)
        job.tick(0.1)
    assert job.failure.cause is Cause.HUNG
    assert job.failure.message == (
        "stage 1 and stage 2 wait for what does not come: nothing has moved for 60 s"
    )
    assert job.failure.position == Position(Phase.WAITING, 1, 1)


def test_who_computes_may_take_its_time() -> None:
    job = Scripted(2, worker_timeout=PATIENCE).running()
    for _ in range(20):
        job.says(Heartbeat(0, Position(Phase.FORWARD, 1, 0, 0)))
        job.says(waiting(1))
        job.tick(PATIENCE / 2)
    assert job.state() is State.STEPPING


def test_missing_ranks_are_named() -> None:
    job = Scripted(4, worker_timeout=PATIENCE)
    job.join(0, 2)
    for _ in range(JOIN_FACTOR * 2):
        job.tick(PATIENCE / 2)
        job.says(Heartbeat(0, Position()))
        job.says(Heartbeat(2, Position()))
    assert job.state() is State.JOINING
    job.tick(0.1)
    assert job.failure.message == "rank 1, 3 did not join within 300 s"


def test_a_usage_error_of_a_worker_gives_exit_status_2() -> None:
    job = Scripted(2)
    job.join()
    job.says(Failed(1, Failure(Cause.USAGE, "loss is missing")))
    assert job.failure.rank == 1
    assert job.ended.exit_status == 2


def mistake(job: Scripted, cause: Cause, status: int = 1) -> Scripted:
    job.says(Failed(1, Failure(cause, "what is wrong", status=status)))
    return job


def test_what_the_users_code_raises_before_the_first_step_gives_exit_status_2() -> None:
    job = Scripted(2)
    job.join()
    job.describe()
    assert job.state() is State.BUILDING
    assert mistake(job, Cause.USER).ended.exit_status == 2
    assert mistake(Scripted(2).running(), Cause.USER).ended.exit_status == 1


@pytest.mark.parametrize(("steps", "status"), [(0, 2), (1, 1)])
def test_a_mistake_that_shows_later_has_failed_the_run(steps: int, status: int) -> None:
    job = Scripted(2).running()
    for step in range(1, steps + 1):
        job.step(step)
    assert mistake(job, Cause.USAGE).ended.exit_status == status
    verdict = report.verdict(job.ended, 1.0)
    assert verdict.mistake == (not steps)
    assert ("stage 1" in (verdict.error or "")) == bool(steps)  # where, once there are steps


def test_a_run_that_goes_on_makes_its_mistakes_before_its_own_first_step() -> None:
    job = Scripted(2, start=Start(Mark(7), recorded=7))
    job.join()
    assert mistake(job, Cause.USAGE).ended.exit_status == 2
    assert not report.verdict(job.ended, 1.0).mistake  # there are its records


@pytest.mark.parametrize("status", [0, 1, 3])
def test_a_job_that_ends_itself_has_its_own_words_and_status(status: int) -> None:
    job = Scripted(2)
    job.join()
    mistake(job, Cause.EXIT, status)
    assert job.ended.exit_status == status
    verdict = report.verdict(job.ended, 1.0)
    assert (verdict.error, verdict.own, verdict.mistake) == ("what is wrong", True, True)
    (abort,) = job.sent(0, Abort)
    assert abort == Abort("", status)


def test_a_job_that_ends_itself_later_has_failed() -> None:
    job = Scripted(2).running()
    job.step(1)
    mistake(job, Cause.EXIT, 0)
    assert (job.ended.exit_status, job.failure.cause) == (1, Cause.USER)


def test_a_connection_that_stays_closed_is_a_lost_worker() -> None:
    job = Scripted(2).running()
    job.handle(Unreachable(b"w1"))
    job.handle(Unreachable(b"stranger"))
    job.tick(TIMINGS.echo)
    job.handle(Unreachable(b"w1"))  # said again with each ping
    job.tick(0.1)
    assert job.failure.cause is Cause.LOST
    assert job.failure.message == "the worker of stage 1 (pid 1001 on host) is gone"


def test_a_connection_that_comes_back_is_not() -> None:
    job = Scripted(2).running()
    job.handle(Unreachable(b"w1"))
    job.now += 1.0
    job.says(Heartbeat(1, NOWHERE))
    job.tick(TIMINGS.echo + 1.0)
    assert job.state() is State.STEPPING


def test_the_reason_says_where_and_in_which_step() -> None:
    job = Scripted(2).running()
    job.says(Failed(1, Failure(Cause.USER, "layer 3 raised", -1, OURS, "Tanh", "Traceback")))
    assert job.failure.stage == "stage 1"
    (abort,) = job.sent(0, Abort)
    assert abort.reason == "layer 3 raised (stage 1, layer 3 (Tanh), micro-batch 2, step 1)"


@pytest.mark.parametrize("state", ["joining", "building", "stepping"])
def test_a_worker_that_is_killed_is_named_whenever_it_is(state: str) -> None:
    job = Scripted(2)
    if state != "joining":
        job.join()
        job.describe()
    if state == "stepping":
        job.ready()
    assert job.state().value == state
    job.exited(1, -9)
    assert job.failure.message == "the worker of stage 1 was killed by signal 9"
    assert job.failure.stage == "stage 1"


@pytest.mark.parametrize(
    ("cause", "lost"),
    [(Cause.LOST, True), (Cause.HUNG, True), (Cause.USER, False), (Cause.INTERNAL, False)],
)
def test_what_is_lost_is_told_from_what_is_wrong(cause: Cause, lost: bool) -> None:
    job = Scripted(2).running()
    job.says(Failed(1, Failure(cause, "no")))
    assert isinstance(job.job.generation.end, Lost if lost else Verdict)
    assert job.failure.cause is cause
    assert job.ended.exit_status == 1


def test_a_late_answer_ends_a_suspicion() -> None:
    """Any message shows that the connection is there, even one that is dropped."""
    job = Scripted(2, worker_timeout=PATIENCE).running()
    job.handle(Unreachable(b"w1"))
    job.says(Saved(1, 1))
    job.tick(TIMINGS.echo + 0.1)
    assert job.state() is State.STEPPING


def test_the_rank_that_reported_an_echo_is_not_the_one_that_is_gone() -> None:
    job = Scripted(2).running()
    job.says(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += TIMINGS.silent
    job.says(Failed(1, Failure(Cause.PEER, "1>0 closed")))
    job.tick(TIMINGS.echo)
    assert job.failure.message == "0>1 closed, and nobody reported why"


# What is in memory when the user's code fails.

RAISED = Failed(1, Failure(Cause.USER, "metrics() raised", -1, Position(Phase.EVALUATION, 3)))
SAID = "metrics() raised"


def failed_with_memory(**options: Any) -> Scripted:
    """In the evaluation after step 3, with the state after step 2 in memory."""
    job = replaced(evaluate_every=3, **options).running()
    for step in (1, 2, 3):
        job.step(step)
    assert job.state() is State.EVALUATING
    job.says(RAISED)
    return job


def test_what_is_in_memory_is_saved_before_the_job_ends() -> None:
    """By other workers, which run nothing; the error and the status stay."""
    job = failed_with_memory()
    (again,) = of(job.effects, Again)
    assert again.generation == 2
    assert of(job.effects, Warn) == [Warn("the job has failed; step 2 is saved before it ends")]
    effects = job.again()
    assert [welcome.restore for welcome in job.sent(0, Welcome)] == [
        None,
        Restore(2, slot=1, ranks=2),
    ]
    assert [told.next for told in saves(effects)] == [Save(2, slot=0)] * 2
    job.saved()
    job.committed(2)
    assert (job.ended.status, job.ended.exit_status, job.ended.steps) == (Status.FAILED, 1, 3)
    assert job.failure.message == SAID
    assert job.ended.causes == ()  # nothing was lost


def test_the_job_ends_by_its_first_error_though_it_cannot_be_saved() -> None:
    def lost(job: Scripted) -> None:
        job.exited(0, -9)

    def fails_again(job: Scripted) -> None:
        job.says(Failed(0, Failure(Cause.USER, "model() raised")))

    def disk_is_full(job: Scripted) -> None:
        job.describe()
        job.ready()
        for _ in range(2):
            job.saved()
            job.uncommitted()

    for what in (lost, fails_again, disk_is_full):
        job = failed_with_memory()
        job.join()
        what(job)
        assert job.ended.failure is not None
        assert (job.ended.failure.message, job.ended.exit_status) == (SAID, 1)
        assert len(of(job.effects, Again)) == 1


@pytest.mark.parametrize(
    "options", [{"snapshot_every": 9}, {"restarts": 0}, {"checkpoint_every": "2"}]
)
def test_what_is_not_in_memory_or_is_on_disk_is_not_saved(options: dict[str, Any]) -> None:
    job = replaced(evaluate_every=3, **options).running()
    for step in (1, 2, 3):
        job.step(step)
        for written in set(job.told_to_write(0)) - {job.job.progress.saved}:
            job.saved(written)
            job.committed(written)
    job.says(RAISED)
    assert job.failure.message == SAID


def test_weights_that_give_nan_are_not_saved() -> None:
    job = replaced(stop_on_nan=True).running()
    for step in (1, 2):
        job.step(step)
    for rank in job.ranks:
        job.done(rank, 3, losses=(math.nan, 0.5) if rank == job.last else ())
    assert job.failure.message == "loss is nan at step 3"
