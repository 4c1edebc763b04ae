"""Tests of the supervisor's timeouts: agents and coordinators that are silent."""

from __future__ import annotations

from launcher.supervisor import effects, events
from pipeworker.timings import DEFAULT
from pipeworker.wire.lines import (
    CannotStart,
    HostLost,
    KeepAlive,
    Planned,
    Restart,
    Waiting,
    Warned,
)
from support.pure.supervisor import Scripted, forks, of, remote, sent

PLANNED = Planned("gpipe", 8, (2, 1), ((0,), (1,)), 0.125)


def test_a_silent_agent_is_killed_and_its_end_is_explained() -> None:
    job = Scripted(options={"worker_timeout": 3.0}).running()
    job.coordinator(PLANNED)
    job.coordinator(KeepAlive(0), seconds=4)
    assert of(job.handle(events.Ticked()), effects.KillAgent) == [effects.KillAgent(0)]
    (report,) = sent(job.lose(0))
    assert isinstance(report, HostLost)
    assert report.text == "the agent of this host (pid 10) has not answered for 3 s"


def test_the_connection_to_a_host_may_be_silent_while_its_workers_train() -> None:
    """After an outage, TCP waits as long again; the workers open other connections."""
    job = Scripted(agents=remote(1, 1), options={"worker_timeout": 3.0}).running()
    job.coordinator(PLANNED)
    limit = DEFAULT.network_patience(3.0)
    beats = of(job.handle(events.Ticked()), effects.SendAgent)
    assert {beat.line for beat in beats} == {KeepAlive(limit)}
    job.agent(0, KeepAlive(0), seconds=limit - 1)
    job.coordinator(KeepAlive(0))
    assert not of(job.handle(events.Ticked()), effects.KillAgent)
    job.coordinator(Restart(2, "stage 1 has not answered for 3 s", 2))
    assert of(job.handle(events.Ticked()), effects.KillAgent) == [effects.KillAgent(1)]


def test_an_agent_that_is_slow_at_its_start_outlives_a_restart_of_its_workers() -> None:
    """A busy host takes longer to import torch than the coordinator waits for workers."""
    job = Scripted(options={"worker_timeout": 3.0})
    job.bound()
    found = job.coordinator(Restart(2, "rank 0, 1 did not join within 15 s", 2), seconds=16)
    assert forks(found) == [(0, 0), (0, 1)]
    assert not of(job.handle(events.Ticked()), effects.KillAgent)
    job.coordinator(KeepAlive(0), seconds=13)
    assert not of(job.handle(events.Ticked()), effects.KillAgent)


def test_a_remote_agent_has_the_time_of_a_start_once_it_has_introduced_itself() -> None:
    job = Scripted(agents=remote(1, 1), options={"worker_timeout": 3.0})
    job.agent(0, events.CheckedHello())
    assert not of(job.handle(events.Ticked(), 20), effects.KillAgent)


def test_an_agent_that_is_silent_at_its_start_is_replaced_once() -> None:
    job = Scripted(options={"worker_timeout": 3.0})
    job.bound()
    text = "the agent of this host (pid 10) has not answered for 30 s"
    job.coordinator(KeepAlive(0), seconds=31)
    assert of(job.handle(events.Ticked()), effects.KillAgent) == [effects.KillAgent(0)]
    assert sent(job.lose(0)) == [HostLost((0, 1), text, survives=False)]
    found = job.coordinator(Restart(2, text, 2))
    assert of(found, effects.StartAgent) == [effects.StartAgent(0)]
    assert forks(found) == [(0, 0), (0, 1)]
    job.coordinator(KeepAlive(0), seconds=31)
    assert of(job.handle(events.Ticked()), effects.KillAgent) == [effects.KillAgent(0)]
    assert sent(job.lose(0)) == [CannotStart(0, 2, text, 0)]


def test_a_host_that_its_cluster_has_not_given_yet_is_waited_for() -> None:
    """An autoscaler takes minutes; the coordinator does not wait for the workers meanwhile."""
    job = Scripted(agents=remote(1, 1), options={"worker_timeout": 3.0}).running()
    job.lose(1)
    job.coordinator(Restart(2, "host b is lost", 2))
    no_room, found = Waiting("Ray has no room"), []
    for _ in range(50):
        found += job.agent(1, no_room, seconds=2)
        job.agent(0, KeepAlive(0))
        job.coordinator(KeepAlive(0))
        found += job.handle(events.Ticked())
    assert not of(found, effects.KillAgent)
    assert sent(found) == [no_room] * 50
    assert [effect.line for effect in of(found, effects.Show)] == [
        Warned("host b waits: Ray has no room", note=True)
    ]
    for _ in range(20):  # now it says nothing more
        job.agent(0, KeepAlive(0), seconds=2)
        job.coordinator(KeepAlive(0))
        found = job.handle(events.Ticked())
    assert of(job.effects, effects.KillAgent) == [effects.KillAgent(1)] * 5


def test_an_agent_that_is_killed_at_its_start_is_not_replaced() -> None:
    job = Scripted()
    job.bound()
    text = "the agent of this host was killed by SIGKILL"
    assert sent(job.lose(0)) == [CannotStart(0, 1, text, 0)]
    for _ in range(3):
        assert not of(job.handle(events.Ticked(), seconds=2), effects.StartAgent)


def test_a_remote_agent_that_ends_before_it_has_a_worker_is_replaced_once() -> None:
    """It could be used until then, as it has introduced itself."""
    text = "host b is lost: it exited with status 255"
    job = Scripted(agents=remote(1, 1))
    for number in (0, 1):
        job.agent(number, events.CheckedHello())
    job.agent(0, KeepAlive(0))
    job.bound()
    assert sent(job.lose(1, 255)) == [HostLost((1,), text, survives=True)]
    found = job.coordinator(Restart(2, text, 2))
    assert of(found, effects.StartAgent) == [effects.StartAgent(1)]
    assert sent(job.lose(1, 255)) == [CannotStart(1, 2, text, 1)]


def test_a_silent_coordinator_is_ended() -> None:
    job = Scripted(options={"worker_timeout": 3.0, "max_restarts": 0}).running()
    job.agent(0, KeepAlive(0), seconds=4)
    assert of(job.handle(events.Ticked()), effects.EndCoordinator)
    assert job.supervisor.over
    error = job.supervisor.own_verdict(1.0).error
    assert error == "the coordinator (pid 5) has not answered for 3 s"


def test_a_launcher_that_was_suspended_takes_nobody_for_silent() -> None:
    """It read the clock, was suspended, and read what the others had sent in the meantime."""
    job = Scripted(options={"worker_timeout": 3.0}).running()
    before = job.now
    job.now += 100
    job.agent(0, KeepAlive(0))
    job.coordinator(KeepAlive(0))
    found = job.supervisor.handle(events.Ticked(), before)
    assert not of(found, effects.KillAgent)
    assert not of(found, effects.EndCoordinator)


def test_keep_alives_are_sent_once_a_ping_interval() -> None:
    job = Scripted().running()
    beat = KeepAlive(DEFAULT.patience(job.options.get("worker_timeout", 60.0)))
    beats = [effects.SendAgent(0, beat), effects.SendCoordinator(beat)]
    assert job.handle(events.Ticked(), 0.0) == beats
    assert job.handle(events.Ticked(), DEFAULT.ping / 2) == []
    assert job.supervisor.wakes_at == job.now + DEFAULT.ping / 2
    assert job.handle(events.Ticked(), DEFAULT.ping / 2) == beats
