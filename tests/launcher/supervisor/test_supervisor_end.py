"""Interrupts, verdicts and the end of a job, by the values of the supervisor."""

from __future__ import annotations

import pytest

from launcher.supervisor import effects, events
from pipeworker.facts.position import Position
from pipeworker.facts.step import StepResult
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import (
    Interrupt,
    KeepAlive,
    Planned,
    Restart,
    Verdict,
    WorkerExited,
)
from support.pure.supervisor import Scripted, remote, sent, shown

PLANNED = Planned("gpipe", 4, (1, 1), ((0,), (1,)), 0.0)
VERDICT = Verdict("done", 0, 9, 1.0, (0, 0), 0.0, None)


def test_the_first_interrupt_stops_after_the_step_and_the_second_at_once() -> None:
    job = Scripted().running()
    job.coordinator(PLANNED)
    found = job.handle(Interrupt())
    assert sent(found) == [Interrupt()]
    assert shown(found)[0].startswith("stopping after this step, with a checkpoint")
    assert not job.supervisor.over
    job.coordinator(StepResult(7, 0.5, 4, 0.1, 40.0, 1.0, 0.1, 0.0, 0))
    assert job.handle(Interrupt(), seconds=0.2) == []
    assert not job.supervisor.over  # the same interrupt, which the launcher has received twice
    assert job.handle(Interrupt(), seconds=0.1) == []
    assert job.supervisor.over
    verdict = job.supervisor.own_verdict(1.0)
    assert (verdict.status, verdict.exit_status, verdict.steps) == ("interrupted", 130, 7)
    assert verdict.error is None


def test_an_interrupt_before_the_first_step_promises_no_checkpoint() -> None:
    job = Scripted()
    job.bound()
    found = job.handle(Interrupt())
    assert sent(found) == [Interrupt()]
    early = "stopping before the first step, so without a checkpoint; interrupt again"
    assert shown(found)[0].startswith(early)
    found = job.coordinator(PLANNED)  # the coordinator had begun the step before
    assert shown(found)[-1].startswith("stopping after this step, with a checkpoint")
    assert shown(job.coordinator(PLANNED)) == []


def test_an_interrupt_while_workers_start_again_promises_the_last_snapshot() -> None:
    job = Scripted().running()
    job.coordinator(PLANNED, StepResult(7, 0.5, 4, 0.1, 40.0, 1.0, 0.1, 0.0, 0))
    job.coordinator(Restart(2, "a loss", 2))
    assert shown(job.handle(Interrupt()))[0].startswith("stopping after this step, with a")


@pytest.mark.parametrize("kind", ["plan_only", "evaluate_only"])
def test_an_interrupt_of_a_job_that_does_not_train_promises_no_checkpoint(kind: str) -> None:
    job = Scripted(options={kind: True})
    job.bound()
    assert shown(job.handle(Interrupt())) == ["stopping; interrupt again to stop at once"]


def test_a_job_that_stops_before_an_evaluation_begins_no_step() -> None:
    job = Scripted(options={"evaluate_only": True})
    job.bound()
    job.handle(Interrupt())
    assert shown(job.coordinator(PLANNED)) == []


def test_an_interrupt_before_the_job_has_begun_ends_it_at_once() -> None:
    job = Scripted(agents=remote(1, 1))
    job.handle(Interrupt())
    assert job.supervisor.over
    assert job.supervisor.own_verdict(1.0).status == "interrupted"


def test_an_interrupted_job_that_cannot_go_on_shows_why() -> None:
    job = Scripted().running()
    job.handle(Interrupt())
    job.supervisor.fail("cannot start the coordinator: Too many open files")
    verdict = job.supervisor.own_verdict(1.0)
    assert (verdict.status, verdict.exit_status) == ("interrupted", 130)
    assert verdict.error == "cannot start the coordinator: Too many open files"


def test_an_interrupt_of_several_hosts_and_of_the_user_is_one() -> None:
    job = Scripted(agents=remote(1, 1)).running()
    assert shown(job.agent(1, Interrupt()))[0].startswith("host b was asked to end: stopping")
    for found in (job.agent(0, Interrupt()), job.handle(Interrupt())):
        assert found == []
    assert not job.supervisor.over


def test_a_job_that_a_host_has_stopped_is_interrupted_without_a_verdict_too() -> None:
    job = Scripted(options={"max_restarts": 0}).running()
    job.agent(0, Interrupt())
    job.handle(events.CoordinatorEnded())
    assert job.supervisor.own_verdict(1.0).status == "interrupted"


def test_a_job_that_stops_is_stopped_by_the_next_coordinator_too() -> None:
    job = Scripted().running()
    job.handle(Interrupt())
    assert sent(job.handle(events.CoordinatorEnded())) == [Interrupt()]


def test_a_lost_terminal_stops_the_job_once() -> None:
    job = Scripted().running()
    assert sent(job.handle(events.TerminalLost())) == [Interrupt()]
    assert job.handle(events.TerminalLost()) == []
    assert not job.supervisor.over


def test_the_workers_have_time_to_exit_after_the_verdict() -> None:
    job = Scripted().running()
    job.coordinator(VERDICT)
    assert not job.supervisor.over
    assert job.supervisor.wakes_at <= job.now + DEFAULT.exit
    job.handle(events.Ticked(), DEFAULT.exit / 2)
    assert not job.supervisor.over
    for rank in (0, 1):
        job.agent(0, WorkerExited(rank, 1, 0, Position()))
    assert job.supervisor.over


def test_workers_that_do_not_exit_after_the_verdict_are_not_waited_for() -> None:
    job = Scripted().running()
    job.coordinator(VERDICT)
    job.handle(events.Ticked(), DEFAULT.exit)
    assert job.supervisor.over


def test_an_agent_that_imports_torch_is_killed_at_the_end() -> None:
    job = Scripted(agents=remote(1, 1))
    job.agent(0, events.CheckedHello(), KeepAlive(0))
    job.agent(0, KeepAlive(0))
    assert job.supervisor.shutdown() == [effects.KillAgent(1)]


def test_a_job_whose_agent_never_forks_has_not_begun() -> None:
    """As where torch cannot be imported: its run directory is not kept."""
    job = Scripted()
    job.bound()
    assert job.supervisor.has_begun
    job.lose(0, 1)
    assert not job.supervisor.has_begun
    job = Scripted().running()
    job.lose(0)
    assert job.supervisor.has_begun
