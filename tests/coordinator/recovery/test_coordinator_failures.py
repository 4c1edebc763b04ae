"""Failures: the first cause is kept."""

from __future__ import annotations

import dataclasses

import pytest

from pipeworker.coordinator.effects import JobState, Log, Withdraw
from pipeworker.coordinator.ending import JobEnd, Lost
from pipeworker.coordinator.events import Disconnected
from pipeworker.coordinator.steps.progress import Start
from pipeworker.coordinator.waiting import State
from pipeworker.errors import AGAIN
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.wire.lines import WorkerExited
from pipeworker.wire.messages.checkpoint import Restore, Saved
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Hello
from support.pure.coordinator import (
    NOWHERE,
    PATIENCE,
    TIMINGS,
    ScriptedJob,
    of,
)

OURS = Position(Phase.BACKWARD, 1, 2, 3)


def test_a_failure_ends_the_job_at_once() -> None:
    job = ScriptedJob(3).running()
    failure = Failure(Cause.USER, "layer 3 raised", -1, OURS, "Linear", "Traceback")
    job.receive(Failed(2, failure))
    assert job.failure == dataclasses.replace(failure, rank=2, stage="stage 2")
    assert job.ended.exit_status == 1
    assert job.receive(Failed(1, Failure(Cause.USER, "me too"))) == []


def test_a_secondary_failure_waits_for_its_cause() -> None:
    job = ScriptedJob(3).running()
    job.receive(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.receive(Failed(2, Failure(Cause.PEER, "1>2 closed")))
    job.tick(TIMINGS.grace / 2)
    assert job.state() is State.STEPPING
    job.exited(1, -9, Position(Phase.FORWARD, 1, 0, 1))
    assert job.failure.message == "the worker of stage 1 was killed by SIGKILL"
    assert job.failure.cause is Cause.LOST
    assert job.failure.layer_class == ""  # layer 1 is not on stage 1
    assert (
        len([text for log in of(job.effects, Log) if "secondary failure" in (text := log.text)])
        == 2
    )


def test_a_worker_killed_for_memory_has_a_message_that_says_so() -> None:
    job = ScriptedJob(3).running()
    job.handle(WorkerExited(1, job.number, -9, Position(), lacks_memory=True))
    assert job.failure.message == (
        "the worker of stage 1 was killed by SIGKILL when the kernel killed a process of its host "
        "because memory was short; give the job more, or use more --microbatches or --recompute "
        "always"
    )


def test_secondary_failures_alone_name_the_silent_rank() -> None:
    job = ScriptedJob(3).running()
    job.now += TIMINGS.silence
    for rank in (0, 2):
        job.receive(Failed(rank, Failure(Cause.PEER, "closed")))
    job.tick(TIMINGS.grace - 0.1)
    assert job.state() is State.STEPPING
    job.tick(0.1)
    assert job.failure.rank == 1
    assert job.failure.message == "the worker of stage 1 (pid 1001 on host) is gone"


def test_a_secondary_failure_without_a_cause_is_reported_itself() -> None:
    job = ScriptedJob(2).running()
    job.receive(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += TIMINGS.grace
    job.receive(Heartbeat(1, Position()))
    job.tick()
    assert job.failure.cause is Cause.PEER
    assert job.failure.message == "0>1 closed; no worker reported a cause"


def test_a_signal_to_all_workers_is_an_interrupt() -> None:
    job = ScriptedJob(2).running()
    for rank in (0, 1):
        job.receive(Failed(rank, Failure(Cause.SIGNAL, "SIGTERM")))
    job.tick(TIMINGS.grace)
    assert job.ended.status == "interrupted"
    assert job.ended.exit_status == 130


def test_a_signal_to_one_worker_is_a_loss() -> None:
    job = ScriptedJob(2).running()
    job.receive(Failed(1, Failure(Cause.SIGNAL, "the worker of stage 1 was ended by SIGTERM")))
    job.exited(1, 143)
    assert job.failure.cause is Cause.LOST
    assert "SIGTERM" in job.failure.message


@pytest.mark.parametrize(
    ("code", "how"),
    [(-11, "was killed by SIGSEGV"), (3, "exited with status 3"), (0, "status 0")],
)
def test_an_exit_before_the_end_is_a_failure(code: int, how: str) -> None:
    job = ScriptedJob(2).running()
    job.exited(1, code, Position(Phase.FORWARD, 1, 0, 3))
    assert how in job.failure.message
    assert (job.failure.rank, job.failure.layer_class) == (1, "Tanh")
    assert job.ended.exit_status == 1


def test_a_worker_of_another_host_that_the_coordinator_does_not_reach_is_explained() -> None:
    job = ScriptedJob(2)
    for rank in job.ranks:
        job.receive(Hello(rank, f"host-{rank}", 1000 + rank))
    job.exited(1, AGAIN)
    text, remedy = job.failure.message.split("; ")
    assert text == "stage 1 (pid 1001 on host-1) no longer receives from the coordinator"
    assert "correct the MTU" in remedy


@pytest.mark.parametrize("several", [True, False])
def test_an_error_names_the_host_if_there_are_several(several: bool) -> None:
    job = ScriptedJob(2)
    for rank in job.ranks:
        job.receive(Hello(rank, f"host-{rank if several else 0}", 1000 + rank))
    text = "the job file job.py raised ModuleNotFoundError: No module named 'helper'"
    job.receive(Failed(1, Failure(Cause.USER, text, 1)))
    assert job.failure.stage == ("stage 1 on host-1" if several else "stage 1")


def test_a_usage_error_of_a_worker_gives_exit_status_2() -> None:
    job = ScriptedJob(2)
    job.join()
    job.receive(Failed(1, Failure(Cause.USAGE, "loss is missing")))
    assert job.failure.rank == 1
    assert job.ended.exit_status == 2


def mistake(job: ScriptedJob, cause: Cause, status: int = 1) -> ScriptedJob:
    job.receive(Failed(1, Failure(cause, "what is wrong", status=status)))
    return job


def test_an_exception_of_the_users_code_before_the_first_step_gives_exit_status_2() -> None:
    job = ScriptedJob(2).described()
    assert job.state() is State.BUILDING
    assert mistake(job, Cause.USER).ended.exit_status == 2
    assert mistake(ScriptedJob(2).running(), Cause.USER).ended.exit_status == 1


@pytest.mark.parametrize(("steps", "status"), [(0, 2), (1, 1)])
def test_a_usage_error_after_the_first_step_fails_the_run(steps: int, status: int) -> None:
    job = ScriptedJob(2).running()
    for step in range(1, steps + 1):
        job.step(step)
    assert mistake(job, Cause.USAGE).ended.exit_status == status
    verdict = job.ended
    assert verdict.is_usage_error == (not steps)
    assert ("stage 1" in (verdict.error or "")) == bool(
        steps
    )  # the location is shown once there are steps


def test_a_resumed_run_has_usage_errors_before_its_own_first_step() -> None:
    job = ScriptedJob(2, start=Start((JobState(7), Restore(7, "disk")), recorded=7))
    job.join()
    assert mistake(job, Cause.USAGE).ended.exit_status == 2
    assert job.ended.is_usage_error


@pytest.mark.parametrize("cause", [Cause.USAGE, Cause.USER])
def test_steps_of_an_earlier_coordinator_are_steps_of_the_run(cause: Cause) -> None:
    start = Start(recorded=7, causes=("the coordinator was killed",))
    job = ScriptedJob(2, start=start).described()
    assert mistake(job, cause).ended.exit_status == 1
    resumed = ScriptedJob(2, start=start, resume_step=7).described()
    assert mistake(resumed, cause).ended.exit_status == 2


@pytest.mark.parametrize("status", [0, 1, 3])
def test_a_job_file_that_exits_keeps_its_message_and_status(status: int) -> None:
    job = ScriptedJob(2)
    job.join()
    mistake(job, Cause.EXIT, status)
    assert job.ended.exit_status == status
    verdict = job.ended
    assert (verdict.error, verdict.job_exited, verdict.is_usage_error) == (
        "what is wrong",
        True,
        True,
    )
    (abort,) = job.sent(0, Abort)
    assert abort == Abort("", status)


def test_a_job_file_that_exits_after_a_step_has_failed() -> None:
    job = ScriptedJob(2).running()
    job.step(1)
    mistake(job, Cause.EXIT, 0)
    assert (job.ended.exit_status, job.failure.cause) == (1, Cause.USER)


def test_a_connection_that_stays_closed_is_a_lost_worker() -> None:
    job = ScriptedJob(2).running()
    job.handle(Disconnected(b"w1"))
    job.handle(Disconnected(b"unknown"))
    job.tick(TIMINGS.grace)
    job.handle(Disconnected(b"w1"))  # reported again with each ping
    job.tick(0.1)
    assert job.failure.cause is Cause.LOST
    assert job.failure.message == "the worker of stage 1 (pid 1001 on host) is gone"


def test_a_reopened_connection_is_no_loss() -> None:
    job = ScriptedJob(2).running()
    job.handle(Disconnected(b"w1"))
    job.now += 1.0
    job.receive(Heartbeat(1, NOWHERE))
    job.tick(TIMINGS.grace + 1.0)
    assert job.state() is State.STEPPING


def test_the_abort_reason_has_location_and_step() -> None:
    job = ScriptedJob(2).running()
    job.receive(Failed(1, Failure(Cause.USER, "layer 3 raised", -1, OURS, "Tanh", "Traceback")))
    assert job.failure.stage == "stage 1"
    (abort,) = job.sent(0, Abort)
    assert abort.reason == "layer 3 raised (stage 1, layer 3 (Tanh), micro-batch 2, step 1)"


@pytest.mark.parametrize("state", ["joining", "building", "stepping"])
def test_a_killed_worker_is_named_in_every_state(state: str) -> None:
    job = ScriptedJob(2)
    if state != "joining":
        job.described()
    if state == "stepping":
        job.ready()
    assert job.state().name.lower() == state
    job.exited(1, -9)
    assert job.failure.message == "the worker of stage 1 was killed by SIGKILL"
    assert job.failure.stage == "stage 1"


@pytest.mark.parametrize(
    ("cause", "lost"),
    [(Cause.LOST, True), (Cause.HUNG, True), (Cause.USER, False), (Cause.INTERNAL, False)],
)
def test_losses_are_distinguished_from_errors(cause: Cause, lost: bool) -> None:
    job = ScriptedJob(2).running()
    job.receive(Failed(1, Failure(cause, "no")))
    assert isinstance(job.job.generation.end, Lost if lost else JobEnd)
    assert job.failure.cause is cause
    assert job.ended.exit_status == 1


def test_any_message_shows_that_a_connection_is_open() -> None:
    """Even a message that is dropped."""
    job = ScriptedJob(2, worker_timeout=PATIENCE).running()
    job.handle(Disconnected(b"w1"))
    job.receive(Saved(1, 1))
    job.tick(TIMINGS.grace + 0.1)
    assert job.state() is State.STEPPING


def test_a_rank_that_reported_a_secondary_failure_is_not_the_lost_one() -> None:
    job = ScriptedJob(2).running()
    job.receive(Failed(0, Failure(Cause.PEER, "0>1 closed")))
    job.now += TIMINGS.silence
    job.receive(Failed(1, Failure(Cause.PEER, "1>0 closed")))
    job.tick(TIMINGS.grace)
    assert job.failure.message == "0>1 closed; no worker reported a cause"


@pytest.mark.parametrize(
    ("position", "withdrawn"),
    [
        (Position(Phase.UPDATE, 1, layer=3), True),
        (Position(Phase.WAITING, 1), False),
        (Position(Phase.FORWARD, 2, 0, 3), False),
    ],
)
@pytest.mark.parametrize("lost", [False, True])
def test_a_step_whose_update_failed_is_not_recorded(
    position: Position, withdrawn: bool, lost: bool
) -> None:
    job = ScriptedJob(2).running()
    job.step(1)
    if lost:
        job.exited(1, -9, position)
    else:
        job.receive(Failed(1, Failure(Cause.USER, "the optimizer raised", position=position)))
    assert of(job.effects, Withdraw) == [Withdraw(1)] * withdrawn
    assert job.ended.steps == 1 - withdrawn


def test_a_step_that_is_saved_stays_recorded() -> None:
    """The last known position of a lost worker may be an old one."""
    job = ScriptedJob(2, checkpoint_every="1").running()
    job.step(1)
    for rank in job.ranks:
        job.receive(Saved(rank, 1))
    job.checkpoint_committed(1)
    job.exited(1, -9, Position(Phase.UPDATE, 1))
    assert of(job.effects, Withdraw) == []
    assert job.ended.steps == 1


def test_a_script_saves_its_last_whole_step_before_it_fails() -> None:
    job = ScriptedJob(2).running()
    job.step(1)
    job.receive(Failed(1, Failure(Cause.USER, "no"), stays=True))
    assert job.state() is State.SAVING
    job.saved(1)
    job.checkpoint_committed()
    assert job.failure.message == "no"


def test_a_script_that_fails_in_an_evaluation_does_not_save_half_of_its_step() -> None:
    job = ScriptedJob(2, evaluate_every=1).running()
    job.step(1)
    assert job.state() is State.EVALUATING
    job.receive(Failed(1, Failure(Cause.USER, "no"), stays=True))
    assert job.failure.message == "no"
    assert job.saves_requested(0) == []
