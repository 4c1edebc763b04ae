"""Tests of what the supervisor knows of the processes it watches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.spec import Host, RemoteAgent
from launcher.supervisor.agents import AgentState, SilenceTimer, host_problem, listen_address
from launcher.supervisor.events import CheckedHello
from pipeworker.wire.lines import AgentHello, Forked, KeepAlive, Starting

REMOTE = RemoteAgent(Host("b", 1), ("ssh", "b"), "share its folder, or send it with --sync")
HELLO = AgentHello("1", "3.11.7", "2.13.0", "10.0.0.1", "j", "r")


def test_a_message_restarts_the_silence_timeout() -> None:
    timer = SilenceTimer("it", limit=3, since=0, pid=1)
    assert timer.expired(30) == ""
    assert timer.expired(31) == "it (pid 1) has not answered for 30 s"
    timer.receive(KeepAlive(0), 31)
    assert timer.expired(34) == ""
    assert timer.expired(35) == "it (pid 1) has not answered for 3 s"


def test_a_message_before_an_agent_is_ready_does_not_end_its_time_to_start() -> None:
    timer = SilenceTimer("it", limit=3, since=0, pid=1)
    timer.receive(CheckedHello(), 10)
    timer.restart(10)
    assert not timer.has_sent
    assert timer.expired(40) == ""
    assert timer.expired(41) == "it (pid 1) has not answered for 30 s"


def test_a_start_may_take_long_while_it_progresses() -> None:
    """A busy host or a slow disk delays the import of torch; a hung one uses no CPU time."""
    timer = SilenceTimer("it", limit=3, since=0, pid=1)
    for second in range(1, 60):
        timer.receive(Starting(0.1 * second), second)
        assert timer.expired(second + 3) == ""
    timer.receive(Starting(5.9), 63)
    assert not timer.has_sent
    text = "it (pid 1) stands still in its start after 5.9 s of CPU time for 3 s"
    assert timer.expired(63) == text
    timer.restart(63)
    assert timer.expired(93) == ""


def test_a_process_that_is_silent_after_its_start_is_not_reported_as_starting() -> None:
    timer = SilenceTimer("it", limit=3, since=0, pid=1)
    timer.receive(Starting(2.0), 2)
    timer.receive(KeepAlive(0), 5)
    assert timer.expired(9) == "it (pid 1) has not answered for 3 s"


def test_a_start_may_not_compute_for_ever() -> None:
    timer = SilenceTimer("it", limit=3, since=0, pid=1)
    for second in range(1, 40):
        timer.receive(Starting(second), second)
        assert timer.expired(second) == "" or second > 32
    assert timer.expired(39)


def test_a_time_before_the_last_message_is_not_silence() -> None:
    """The launcher read its clock, was suspended, and then read the message."""
    timer = SilenceTimer("it", limit=3, since=0, pid=1)
    timer.receive(None, 112)
    assert timer.expired(12) == ""


@pytest.mark.parametrize(
    ("callers", "address"),
    [
        (["", "127.0.0.1", "::1"], "127.0.0.1"),
        (["", "10.0.0.1", "10.0.0.1"], "10.0.0.1"),
        (["UNKNOWN", "10.0.0.1"], "10.0.0.1"),  # sshd's word for a connection that is not TCP
        (["10.0.0.1", "10.1.0.1"], "0.0.0.0"),
        (["10.0.0.1", "fd00::1"], "::"),
        (["192.0.2.1"], "0.0.0.0"),  # of a router that forwards connections, or of a jump host
        (["2001:db8::1"], "::"),
    ],
)
def test_the_coordinator_listens_where_all_hosts_reach_it(callers: list[str], address: str) -> None:
    ours = ("10.0.0.1", "fd00::1")
    assert listen_address({caller: caller in ours for caller in callers}) == address


@pytest.mark.parametrize(
    ("listens", "connects"),
    [
        ("tcp://10.0.0.1:5", "tcp://10.0.0.1:5"),
        ("tcp://0.0.0.0:5", "tcp://10.0.0.9:5"),
        ("tcp://[::]:5", "tcp://10.0.0.9:5"),
    ],
)
def test_workers_connect_to_the_address_that_their_host_sees(listens: str, connects: str) -> None:
    agent = AgentState.of(REMOTE, 3, now=0)
    agent.hello = CheckedHello("10.0.0.9")
    assert agent.endpoint(listens, ["10.0.0.1", "10.0.0.9"]) == connects


def test_workers_of_the_launchers_own_host_connect_to_an_address_that_others_see() -> None:
    agent = AgentState.of(RemoteAgent(Host("", 1)), 3, now=0)
    assert agent.endpoint("tcp://[::]:5", ["", "fd00::1"]) == "tcp://[fd00::1]:5"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"python": "3.11.2"}, ""),
        ({"python": "3.9"}, "host b: it has python 3.9, this host has 3.11.7; install the same"),
        (
            {"torch": "2.13.1"},
            "host b: it has torch 2.13.1, this host has 2.13.0; install the same",
        ),
        ({"torch": ""}, "host b: it has no torch, this host has 2.13.0; install the same"),
        ({"job": ""}, "host b: it has no /job.py; share its folder, or send it with --sync"),
        ({"job": "x"}, "host b: it has another /job.py; share its folder, or send it with --sync"),
        ({"run": ""}, "host b: it does not see the run directory /run; specify one on a file"),
    ],
)
def test_a_host_that_differs_is_rejected(change: dict[str, str], problem: str) -> None:
    found = host_problem(REMOTE, replace(HELLO, **change), HELLO, "/job.py", "/run")
    assert found.startswith(problem)
    assert bool(found) is bool(problem)


def test_a_host_without_torch_is_rejected_by_one_without_it_too() -> None:
    bare = replace(HELLO, torch="")
    problem = "host b: it has no torch, this host has none; install the same"
    assert host_problem(REMOTE, bare, bare, "/job.py", "/run") == problem


@pytest.mark.parametrize(
    ("remote", "silence", "code", "last_line", "text"),
    [
        (REMOTE, "", -9, "", "host b cannot be used: it was killed by SIGKILL"),
        (REMOTE, "", 3, "", "host b cannot be used: it exited with status 3"),
        (REMOTE, "", 255, "ssh: no route", "host b cannot be used: ssh: no route"),
        (REMOTE, "silent", -9, "ssh: no route", "host b cannot be used: silent"),
        (
            *(REMOTE, "", 1, "cd: /a: No such file or directory"),
            "host b cannot be used: cd: /a: No such file or directory; share its folder, or send "
            "it with --sync",
        ),
        (
            *(REMOTE, "", 127, "env: '/bin/py': No such file or directory"),
            "host b cannot be used: env: '/bin/py': No such file or directory; specify the Python "
            "of that host in --hosts-file",
        ),
        (RemoteAgent(Host("", 1)), "", -9, "", "the agent of this host was killed by SIGKILL"),
        (RemoteAgent(Host("", 1)), "", 1, "", "the agent of this host exited with status 1"),
        (RemoteAgent(Host("", 1)), "silent", -9, "", "silent"),
    ],
)
def test_the_error_of_a_lost_agent_gives_the_reason(
    remote: RemoteAgent, silence: str, code: int, last_line: str, text: str
) -> None:
    agent = AgentState.of(remote, 3, now=0)
    agent.silence = silence
    assert agent.lose(code, last_line, 1.0) == (False, text)


def test_a_host_may_return_for_as_long_as_silence_is_tolerated() -> None:
    agent = AgentState.of(REMOTE, 3, now=0)
    agent.hello = CheckedHello()
    agent.forked(Forked(0, 1, 77))
    assert agent.lose(-9, "", 10.0)[0]
    assert (agent.places, agent.workers) == (0, {})
    agent.restart(11.0)
    assert agent.places == 1
    assert agent.lose(255, "", 12.0) == (False, "host b is lost: it exited with status 255")
    assert agent.may_return(12.5)  # the time counts from when it had workers
    assert not agent.may_return(13.0)


def test_an_agent_that_is_started_again_ends_for_a_reason_of_its_own() -> None:
    agent = AgentState.of(REMOTE, 3, now=0)
    agent.silence = "it has not answered for 3 s"
    agent.lose(-9, "", 4.0)
    agent.restart(5.0)
    assert agent.lose(255, "ssh: no route", 6.0)[1] == "host b cannot be used: ssh: no route"
