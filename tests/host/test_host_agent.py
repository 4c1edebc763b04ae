"""The agent of a host."""

from __future__ import annotations

import atexit
import os
import signal
import socket
from dataclasses import replace

import pytest

from pipeworker.host.agent import Agent, unreachable_reason
from pipeworker.host.session_watcher import SessionWatcher
from pipeworker.wire.lines import Fork
from pipeworker.worker import worker
from pipeworker.worker.settings import Settings


def request(endpoint: str, generation: int = 1, local_rank: int = 0) -> Fork:
    return Fork(3, generation, endpoint, "token", local_rank, 1, ())


def test_the_first_worker_of_a_host_reports_an_unreachable_coordinator() -> None:
    """Later generations wait for it instead, because the network may recover."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert unreachable_reason(request(endpoint)) == ""
    host = socket.gethostname()
    text = f"{host} cannot reach the coordinator at {endpoint}: Connection refused; the hosts"
    assert unreachable_reason(request(endpoint)).startswith(text)
    assert unreachable_reason(request(endpoint, generation=2)) == ""
    assert unreachable_reason(request(endpoint, local_rank=1)) == ""


def test_a_worker_can_wait_for_its_children_if_the_agent_inherits_that_none_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program that starts jobs may ignore SIGCHLD: then the kernel reaps all children itself."""

    def run(_: Settings) -> int:
        return 0 if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL else 1

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: None)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    watcher = SessionWatcher()
    agent = Agent(watcher, remote=False)
    try:
        agent.fork(replace(request("tcp://127.0.0.1:1"), slots=0))
        (pid,) = agent._workers
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        agent._signals.close()
        watcher.close()
        signal.signal(signal.SIGCHLD, before)
