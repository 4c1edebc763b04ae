"""Losses of hosts, workers and coordinators, by the values of the supervisor."""

from __future__ import annotations

import pytest

from launcher.supervisor import effects, events
from pipeworker.facts.position import Position
from pipeworker.wire.lines import (
    CannotStart,
    HostLost,
    Interrupt,
    KeepAlive,
    Restart,
    SaveRequest,
    Snapshot,
    Verdict,
    WorkerExited,
)
from support.pure.supervisor import Scripted, forks, of, remote, sent, shown

VERDICT = Verdict("done", 0, 9, 1.0, (0, 0), 0.0, None)


def test_a_report_of_an_agent_is_passed_on() -> None:
    job = Scripted().running()
    exited = WorkerExited(1, 1, -9, Position())
    assert sent(job.agent(0, exited, SaveRequest())) == [exited, SaveRequest()]
    assert sent(job.handle(SaveRequest())) == [SaveRequest()]


@pytest.mark.parametrize(("lost", "survives"), [([1], True), ([0], True), ([0, 1], False)])
def test_a_lost_host_is_reported_with_what_survives_it(lost: list[int], survives: bool) -> None:
    job = Scripted(stages=3, agents=remote(2, 1)).running()
    job.coordinator(Snapshot(4, 0, 3))
    for number in lost:
        found = job.lose(number)
    ranks = (0, 1) if lost[-1] == 0 else (2,)
    name = "ab"[lost[-1]]
    text = f"host {name} is lost: it was killed by SIGKILL"
    assert sent(found) == [HostLost(ranks, text, survives)]
    job.handle(events.CoordinatorEnded())
    (start,) = of(job.effects, effects.StartCoordinator)[1:]
    assert start.configuration.snapshot == (Snapshot(4, 0, 3) if survives else None)


def test_a_lost_host_is_shown_when_the_coordinator_starts_the_workers_again() -> None:
    job = Scripted(stages=3, agents=remote(2, 1)).running()
    assert shown(job.lose(1)) == []
    text = "host b is lost: it was killed by SIGKILL"
    found = job.coordinator(Restart(2, f"{text} (stage 2)", 3))
    assert shown(found) == [f"{text}; the job's workers are started again"]
    assert shown(job.coordinator(Restart(3, "a worker is lost", 3))) == []


def test_a_lost_host_that_ends_the_job_is_shown_by_the_verdict_alone() -> None:
    job = Scripted(agents=remote(1, 1)).running()
    assert shown(job.lose(1)) == []
    assert shown(job.coordinator(VERDICT)) == []


@pytest.mark.parametrize("forked", ["none", "one", "all"])
def test_a_lost_host_without_workers_is_shown_and_the_job_continues(forked: str) -> None:
    stages = 40 if forked == "one" else 2  # of many workers, the first is forked alone
    places = (stages // 2, stages // 2, 1)
    job = Scripted(stages=stages, agents=remote(*places))
    for number in range(3):
        job.agent(number, events.CheckedHello())
        job.agent(number, KeepAlive(0))
    if forked == "all":
        job.run_workers(job.bound())
    elif forked == "one":
        assert forks(job.bound()) == [(0, 0)]
    found = job.lose(2, 255, "ssh: no route")
    text = "host c is lost: ssh: no route; the job has no worker there, and continues"
    assert (shown(found), sent(found)) == ([text], [])
    if forked == "none":
        assert forks(job.bound()) == [(0, 0), (1, 1)]
    lost = job.lose(1)
    assert any(isinstance(line, HostLost | CannotStart) for line in sent(lost))
    found = job.coordinator(Restart(2, "host b is lost", stages))
    assert of(found, effects.StartAgent) == [effects.StartAgent(1), effects.StartAgent(2)]


def test_a_host_whose_workers_are_not_forked_again_yet_is_replaced_without_another_restart() -> (
    None
):
    job = Scripted(agents=remote(1, 1, 1)).running()
    job.handle(events.CoordinatorEnded())
    found = job.lose(1, 255, "ssh: no route")
    text = "host b is lost: ssh: no route; the job has no worker there, and continues"
    assert (shown(found), sent(found)) == ([text], [])
    assert forks(job.bound()) == [(0, 0), (2, 1)]


def test_the_loss_of_a_host_with_copies_alone_is_reported() -> None:
    """The job has shrunk since the last snapshot, and another one may not be complete."""
    job = Scripted(stages=2, agents=remote(1, 1), options={"min_stages": 1}).running()
    job.coordinator(Snapshot(4, 0, 2))
    job.run_workers(job.coordinator(Restart(2, "a loss", 1)))
    lost = [line for line in sent(job.lose(1)) if isinstance(line, HostLost)]
    assert [(line.ranks, line.survives) for line in lost] == [((1,), True)]


@pytest.mark.parametrize("sharded", [False, True])
def test_one_of_several_replicas_is_the_whole_state_unless_each_has_a_part(sharded: bool) -> None:
    options = {"replicas": 3, "data_reader": "every", "shard_optimizer": sharded}
    job = Scripted(stages=1, agents=remote(1, 1, 1), options=options).running()
    job.coordinator(Snapshot(4, 0, 3))
    job.lose(0)
    (lost,) = sent(job.lose(1))
    assert isinstance(lost, HostLost)
    assert lost.survives is not sharded


def test_a_lost_host_is_tried_once_in_the_next_generation_even_if_it_was_lost_long_ago() -> None:
    job = Scripted(stages=2, agents=remote(1, 1), options={"worker_timeout": 5.0}).running()
    job.lose(1)
    found = job.coordinator(Restart(2, "host b is lost", 2), seconds=60)
    assert of(found, effects.StartAgent) == [effects.StartAgent(1)]
    assert forks(found) == [(0, 0), (1, 1)]
    (report,) = sent(job.lose(1, 255, "ssh: no route"))
    assert report == CannotStart(1, 2, "host b is lost: ssh: no route", 1)
    assert not of(job.handle(events.Ticked(), 1), effects.StartAgent)
    job.coordinator(Restart(3, report.text, 1))
    found = job.coordinator(Restart(4, "the job tries again", 2))
    assert of(found, effects.StartAgent) == [effects.StartAgent(1)]


def test_a_host_is_lost_with_workers_that_are_still_to_be_forked() -> None:
    """The workers that run were told of the copies that the hosts of these were to keep."""
    job = Scripted(stages=40, agents=remote(20, 20, 20))
    for number in range(3):
        job.agent(number, events.CheckedHello())
    assert forks(job.bound()) == [(0, 0)]
    (lost,) = sent(job.lose(1))
    assert isinstance(lost, HostLost)


def test_a_host_without_workers_yet_is_lost_if_the_others_have_no_room() -> None:
    job = Scripted(stages=2, agents=remote(1, 1))
    for number in range(2):
        job.agent(number, events.CheckedHello())
    (lost,) = sent(job.lose(1))
    assert isinstance(lost, HostLost)


def test_a_host_is_given_up_before_any_worker_is_forked_there() -> None:
    job = Scripted(stages=40, agents=remote(20, 20))
    for number in range(2):
        job.agent(number, events.CheckedHello())
    job.bound()
    job.lose(1)
    found = job.coordinator(Restart(2, "host b is lost", 40))
    assert of(found, effects.StartAgent) == [effects.StartAgent(1)]
    text = "host b is lost: ssh: no route"
    assert sent(job.lose(1, 255, "ssh: no route")) == [CannotStart(0, 2, text, 20)]


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_host_that_comes_back_with_a_problem_is_given_up(seconds: float) -> None:
    """As one that has restarted, and whose shared file system is not mounted yet."""
    job = Scripted(stages=2, agents=remote(1, 1), options={"worker_timeout": 5.0}).running()
    job.lose(1)
    job.coordinator(Restart(2, "host b is lost", 2), seconds=seconds)
    problem = "host b: it does not see the run directory /run; specify one"
    found = job.agent(1, events.CheckedHello(problem=problem))
    assert of(found, effects.KillAgent) == [effects.KillAgent(1)]
    found = job.lose(1)
    if not seconds:  # it may come back with its files
        assert sent(found) == []
        assert of(job.handle(events.Ticked(), 2), effects.StartAgent) == [effects.StartAgent(1)]
        assert not of(job.agent(1, events.CheckedHello()), effects.KillAgent)
    else:
        text = "host b is lost: it does not see the run directory /run; specify one"
        assert sent(found) == [CannotStart(1, 2, text, 1)]


def test_a_host_is_tried_again_for_as_long_as_it_may_come_back() -> None:
    job = Scripted(stages=2, agents=remote(1, 1), options={"worker_timeout": 5.0}).running()
    job.lose(1)
    job.coordinator(Restart(2, "host b is lost", 2))
    assert sent(job.lose(1, 255)) == []  # no worker was lost with it
    assert of(job.handle(events.Ticked(), 2), effects.StartAgent) == [effects.StartAgent(1)]
    (report,) = sent(job.handle(events.AgentEnded(1, 255, ""), 4))
    assert isinstance(report, CannotStart)


def test_a_job_that_stops_does_not_wait_for_a_host_that_may_come_back() -> None:
    job = Scripted(stages=2, agents=remote(1, 1), options={"worker_timeout": 5.0}).running()
    job.lose(1)
    job.coordinator(Restart(2, "host b is lost", 2))
    assert sent(job.lose(1, 255, "ssh: Connection refused")) == []
    job.handle(Interrupt())
    assert of(job.handle(events.Ticked(), 1), effects.StartAgent) == [effects.StartAgent(1)]
    report = sent(job.lose(1, 255, "ssh: Connection refused"))
    assert report == [CannotStart(1, 2, "host b is lost: ssh: Connection refused", 1)]


def test_a_host_that_refuses_connections_at_once_is_given_up_after_that_time() -> None:
    job = Scripted(stages=2, agents=remote(1, 1), options={"worker_timeout": 5.0}).running()
    job.lose(1)
    found, seconds = job.coordinator(Restart(2, "host b is lost", 2)), 0
    while of(found, effects.StartAgent):
        assert seconds < 7
        report = sent(job.lose(1, 255, "ssh: Connection refused"))
        found, seconds = job.handle(events.Ticked(), 1), seconds + 1
    assert report == [CannotStart(1, 2, "host b is lost: ssh: Connection refused", 1)]


@pytest.mark.parametrize("refused", [0, 2])
def test_a_host_that_came_back_keeps_copies_however_often_it_was_tried(refused: int) -> None:
    job = Scripted(agents=remote(1, 1)).running()
    job.coordinator(Snapshot(4, 0, 2))
    job.lose(1)
    found = job.coordinator(Restart(2, "host b is lost", 2))
    for _ in range(refused):
        assert sent(job.lose(1, 255, "ssh: Connection refused")) == []
        found += job.handle(events.Ticked(), 5)
    job.agent(1, events.CheckedHello(), KeepAlive(0))
    job.run_workers(found)
    job.coordinator(Snapshot(8, 1, 2))
    (lost,) = sent(job.lose(0))
    assert isinstance(lost, HostLost)
    assert lost.survives


def test_what_workers_of_this_host_started_is_killed_with_their_agent() -> None:
    job = Scripted().running()
    found = job.lose(0)
    assert of(found, effects.KillGroup) == [effects.KillGroup(1000), effects.KillGroup(1001)]
    text = "the agent of this host was killed by SIGKILL"
    assert sent(found) == [HostLost((0, 1), text, survives=False)]


def test_no_process_of_this_host_is_killed_with_an_agent_of_another_one() -> None:
    """The pids of its workers may belong to any processes of this host."""
    job = Scripted(agents=remote(1, 1)).running()
    assert not of(job.lose(1), effects.KillGroup)


def test_a_worker_that_ends_after_its_successor_began_leaves_that_one_running() -> None:
    """A debugger may hold a killed process."""
    job = Scripted().running()
    job.run_workers(job.coordinator(Restart(2, "a loss", 2)))
    for rank in range(2):
        job.agent(0, WorkerExited(rank, 1, -9, Position()))
    job.coordinator(Verdict("done", 0, 3, 1.0, (), 0.5, None))
    assert not job.supervisor.over
    for rank in range(2):
        job.agent(0, WorkerExited(rank, 2, 0, Position()))
    assert job.supervisor.over


def test_a_restart_with_fewer_stages_forks_as_many() -> None:
    job = Scripted(stages=2).running()
    found = job.coordinator(Restart(2, "a loss", 1))
    assert forks(found) == [(0, 0)]
    assert job.supervisor.stages == 1
    found = job.handle(events.CoordinatorEnded())
    configuration = of(found, effects.StartCoordinator)[0].configuration
    assert configuration.stages == 1
    assert configuration.causes == ("a loss", "the coordinator was killed")
    assert forks(job.bound()) == [(0, 0)]


def test_a_killed_coordinator_is_replaced_and_told_of_the_last_snapshot() -> None:
    job = Scripted().running()
    job.coordinator(Snapshot(4, 0, 2))
    job.now += 7.5
    found = job.handle(events.CoordinatorEnded())
    restart = effects.Show(Restart(2, "the coordinator was killed", 2))
    assert found[:2] == [effects.EndCoordinator(), restart]
    assert [type(effect) for effect in found[2:]] == [effects.StartCoordinator]
    configuration = of(found, effects.StartCoordinator)[0].configuration
    assert (configuration.generation, configuration.snapshot) == (2, Snapshot(4, 0, 2))
    assert configuration.causes == ("the coordinator was killed",)
    assert configuration.elapsed == 7.5
    assert forks(job.bound()) == [(0, 0), (0, 1)]


def test_a_coordinator_that_never_listened_is_not_replaced() -> None:
    job = Scripted()
    assert job.handle(events.CoordinatorEnded()) == []
    assert job.supervisor.over


def test_a_coordinator_that_has_replaced_another_one_is_replaced_before_it_listens() -> None:
    job = Scripted().running()
    job.handle(events.CoordinatorEnded())
    assert of(job.handle(events.CoordinatorEnded()), effects.StartCoordinator)


def test_a_coordinator_is_not_replaced_after_the_verdict() -> None:
    job = Scripted().running()
    job.coordinator(VERDICT)
    assert job.handle(events.CoordinatorEnded()) == []


def test_a_host_is_not_tried_again_after_the_verdict() -> None:
    job = Scripted(agents=remote(1, 1)).running()
    job.coordinator(VERDICT)
    job.lose(1)
    assert not of(job.handle(events.Ticked(), 2), effects.StartAgent)


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_coordinator_is_replaced_as_often_as_the_options_allow(most: int) -> None:
    job = Scripted(options={"max_restarts": most}).running()
    for _ in range(most):
        job.handle(events.CoordinatorEnded())
        assert not job.supervisor.over
        job.bound()
    found = job.handle(events.CoordinatorEnded())
    assert job.supervisor.over
    assert bool(shown(found)) is bool(most)
    verdict = job.supervisor.own_verdict(7.0)
    assert (verdict.status, verdict.exit_status, len(verdict.causes)) == ("failed", 1, most)
    assert (verdict.error, verdict.seconds) == ("the coordinator was killed", 7.0)
    assert verdict.peak_memory == (0, 0)


def test_only_recoveries_are_causes_of_restarts() -> None:
    job = Scripted().running()
    job.coordinator(Restart(2, "a loss", 1))
    job.coordinator(Restart(3, "the job tries again with all 2 workers", 2, recovers=False))
    job.handle(events.CoordinatorEnded())
    started = of(job.effects, effects.StartCoordinator)[-1]
    assert started.configuration.causes == ("a loss", "the coordinator was killed")
