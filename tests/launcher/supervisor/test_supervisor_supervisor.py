"""Tests of the supervisor by values: events in, effects out, without a process or a clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.supervisor import effects, events
from launcher.supervisor.events import AgentLine, Event
from pipeworker.facts.position import Position
from pipeworker.wire.lines import (
    Bound,
    Fork,
    Forked,
    FromCoordinator,
    Interrupt,
    Joined,
    KeepAlive,
    Restart,
    Snapshot,
    Verdict,
    WorkerExited,
)
from support.pure.supervisor import ENDPOINT, Scripted, forks, of, remote, shown

VERDICT = Verdict("done", 0, 9, 1.0, (0, 0), 0.0, None)


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
