"""Tests of the supervisor by values: events in, effects out, without a process or a clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.supervisor import effects, events
from launcher.supervisor.events import AgentLine, Event
from pipeworker.facts.position import Position
from pipeworker.facts.step import StepResult
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import (
    Bound,
    CannotStart,
    Fork,
    Forked,
    FromCoordinator,
    HostLost,
    Interrupt,
    Joined,
    KeepAlive,
    Planned,
    Restart,
    SaveRequest,
    Snapshot,
    Verdict,
    WorkerExited,
)
from support.pure.supervisor import ENDPOINT, Scripted, forks, of, remote, sent, shown

PLANNED = Planned("gpipe", 4, (1, 1), ((0,), (1,)), 0.0)
VERDICT = Verdict("done", 0, 9, 1.0, (0, 0), 0.0, None)

# The start.


def test_on_this_host_alone_the_coordinator_starts_at_once() -> None:
    job = Scripted()
    assert [type(effect) for effect in job.effects] == [
        effects.StartAgent,
        effects.StartCoordinator,
    ]
    (start,) = of(job.effects, effects.StartCoordinator)
    assert (start.configuration.host, start.configuration.generation) == ("127.0.0.1", 1)
    assert start.configuration.slots == 2


def test_with_other_hosts_the_coordinator_starts_once_all_have_answered() -> None:
    job = Scripted(agents=remote(1, 1))
    first = events.CheckedHello("10.0.0.1", is_local=True)
    assert not of(job.agent(0, first), effects.StartCoordinator)
    assert not of(job.handle(events.Ticked(), 1), effects.StartCoordinator)
    (start,) = of(job.agent(1, first), effects.StartCoordinator)
    assert start.configuration.host == "10.0.0.1"


def test_a_host_that_cannot_take_part_ends_the_job() -> None:
    job = Scripted(agents=remote(1, 1))
    job.agent(0, events.CheckedHello())
    job.agent(1, events.CheckedHello(problem="host b: it has no torch"))
    assert job.supervisor.over
    assert job.supervisor.own_verdict(1.0).error == "host b: it has no torch"


def test_a_job_does_not_begin_with_a_host_less() -> None:
    job = Scripted(agents=remote(1, 1))
    job.agent(0, events.CheckedHello())
    job.lose(1, 255, "ssh: no route")
    assert job.supervisor.over
    assert job.supervisor.own_verdict(1.0).error == "host b cannot be used: ssh: no route"


def test_a_job_does_not_begin_without_a_host_that_is_lost_while_others_answer() -> None:
    job = Scripted(agents=remote(1, 1))
    job.agent(0, events.CheckedHello())
    job.lose(0, 255, "ssh: no route")
    job.agent(1, events.CheckedHello())
    assert job.supervisor.over
    assert job.supervisor.own_verdict(1.0).error == "host a is lost: ssh: no route"


def test_all_hosts_that_cannot_be_used_are_named_at_once() -> None:
    job = Scripted(agents=remote(1, 1, 1))
    assert shown(job.lose(2, 1, "python: No module named torch")) == []
    job.agent(0, events.CheckedHello(problem="host a: it has torch 2.1"))
    job.lose(0, 0, "")  # it has been ended for that
    assert not job.supervisor.over  # the last one has not answered yet
    job.agent(1, events.CheckedHello())
    assert job.supervisor.over
    assert job.supervisor.own_verdict(1.0).error == (
        "2 hosts cannot be used\n  host c cannot be used: python: No module named torch; install "
        "it there, or specify an interpreter that has it\n"
        "  host a: it has torch 2.1"
    )


def test_workers_are_forked_once_this_host_has_reached_the_coordinator() -> None:
    job = Scripted()
    assert job.coordinator(Bound(ENDPOINT)) == [effects.ProbeEndpoint(ENDPOINT)]
    assert forks(job.handle(events.EndpointProbed())) == [(0, 0), (0, 1)]


def test_a_coordinator_that_cannot_be_reached_ends_the_job() -> None:
    job = Scripted()
    job.coordinator(Bound(ENDPOINT))
    job.handle(events.EndpointProbed("the coordinator cannot be reached"))
    assert job.supervisor.over
    assert job.supervisor.own_verdict(1.0).error == "the coordinator cannot be reached"


def test_a_coordinator_that_has_ended_meanwhile_is_not_connected_to() -> None:
    """The launcher was suspended, and reads at once where the coordinator listened and its end."""
    job = Scripted()
    found = job.coordinator(Bound(ENDPOINT), KeepAlive(3.0), VERDICT)
    assert found == []
    assert job.supervisor.verdict == VERDICT
    assert job.supervisor.over


def test_of_many_workers_the_first_is_forked_alone_and_then_a_few_at_a_time() -> None:
    job = Scripted(stages=20)
    assert forks(job.bound()) == [(0, 0)]
    assert forks(job.coordinator(Joined(0))) == [(0, rank) for rank in range(1, 9)]
    assert forks(job.coordinator(Joined(3))) == [(0, 9)]
    assert forks(job.coordinator(Restart(2, "a loss", 20))) == [(0, 0)]


def test_a_fork_names_the_copies_that_its_host_keeps_for_another_one() -> None:
    job = Scripted(stages=3, agents=remote(2, 1)).running()
    lines = [e.line for e in of(job.effects, effects.SendAgent) if isinstance(e.line, Fork)]
    assert [(fork.local_rank, fork.mirrors, fork.mirrored) for fork in lines] == [
        (0, (2,), True),
        (1, (), True),
        (0, (0, 1), True),
    ]


# Losses.


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


def test_a_host_that_refuses_connections_at_once_is_given_up_after_that_time() -> None:
    job = Scripted(stages=2, agents=remote(1, 1), options={"worker_timeout": 5.0}).running()
    job.lose(1)
    found, seconds = job.coordinator(Restart(2, "host b is lost", 2)), 0
    while of(found, effects.StartAgent):
        assert seconds < 7
        report = sent(job.lose(1, 255, "ssh: Connection refused"))
        found, seconds = job.handle(events.Ticked(), 1), seconds + 1
    assert report == [CannotStart(1, 2, "host b is lost: ssh: Connection refused", 1)]


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


# The end.


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


# Laws.

LINES: st.SearchStrategy[AgentLine] = st.one_of(
    st.builds(Forked, st.integers(0, 3), st.just(1), st.integers(1, 99)),
    st.builds(WorkerExited, st.integers(0, 3), st.just(1), st.just(-9), st.just(Position())),
    st.just(Interrupt()),
    st.just(KeepAlive(0)),
)
REPORTS: st.SearchStrategy[FromCoordinator] = st.one_of(
    st.just(Bound(ENDPOINT)),
    st.builds(Joined, st.integers(0, 3)),
    st.builds(Snapshot, st.integers(1, 9), st.integers(0, 1), st.just(4)),
    st.just(VERDICT),
)
EVENTS: st.SearchStrategy[Event | str] = st.one_of(
    st.builds(events.AgentLines, st.integers(0, 1), st.lists(LINES, max_size=2).map(tuple)),
    st.builds(events.CoordinatorLines, st.lists(REPORTS, max_size=2).map(tuple)),
    st.sampled_from(["lose 0", "lose 1", "restart"]),
    st.sampled_from(
        [events.CoordinatorEnded(), Interrupt(), events.TerminalLost(), events.Ticked()]
    ),
    st.sampled_from([events.EndpointProbed(), events.EndpointProbed("no route")]),
)


@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.5, 4.0])), max_size=40))
def test_no_rank_is_forked_twice_in_a_generation_unless_its_host_was_lost(
    happened: list[tuple[Event | str, float]],
) -> None:
    job = Scripted(stages=4, agents=remote(2, 2), options={"worker_timeout": 5.0}).running()
    generation, alive = 1, {0, 1}
    placed: dict[int, int] = {rank: rank // 2 for rank in range(4)}
    for event, seconds in happened:
        if job.supervisor.over:
            break
        if isinstance(event, str):
            if event == "restart":
                generation, placed = generation + 1, {}
                event = events.CoordinatorLines((Restart(generation, "a loss", 4),))
            elif (number := int(event[-1])) in alive:
                event = events.AgentEnded(number, -9)
            else:
                continue
        elif isinstance(event, events.AgentLines) and event.agent not in alive:
            continue
        if isinstance(event, events.AgentEnded):
            alive.discard(event.agent)
            placed = {rank: host for rank, host in placed.items() if host != event.agent}
        for effect in job.handle(event, seconds):
            if isinstance(effect, effects.StartAgent):
                assert effect.agent not in alive
                alive.add(effect.agent)
            if isinstance(effect, effects.SendAgent):
                assert effect.agent in alive
                if isinstance(effect.line, Fork):
                    assert effect.line.generation == generation
                    assert effect.line.rank not in placed
                    placed[effect.line.rank] = effect.agent
            if isinstance(effect, effects.StartCoordinator):
                generation, placed = effect.configuration.generation, {}
    assert all(list(placed.values()).count(host) <= 2 for host in alive)
