"""The agent of a host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from pipeworker.host.agent import unreachable_reason
from pipeworker.wire.lines import Fork
from support.real_jobs.jobs import Jobs


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


IGNORES = """
import os, signal
from pipeworker.host.agent import Agent
from pipeworker.host.session_watcher import SessionWatcher
from pipeworker.wire.lines import Fork
from pipeworker.worker import process

process.run = lambda _: 0 if signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL else 1
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
agent = Agent(SessionWatcher(), remote=False)
agent.fork(Fork(3, 1, "tcp://127.0.0.1:1", "token", 0, 0, ()))
(pid,) = agent._workers
print("status", os.waitpid(pid, 0)[1])
"""


def test_a_worker_can_wait_for_its_children_if_the_agent_inherits_that_none_can(
    jobs: Jobs,
) -> None:
    """A program that starts jobs may ignore SIGCHLD: then the kernel reaps all children itself."""
    stdout, stderr = jobs.python("-c", IGNORES).communicate(timeout=60)
    assert "status 0" in stdout, stderr


ORPHAN = """
import sys
from pipeworker.host import agent

print(agent.main(), "torch" in sys.modules)
"""


def test_an_agent_whose_launcher_has_ended_imports_nothing() -> None:
    """The launcher was killed before the agent could ask the system to end with it."""
    reads, writes = os.pipe()
    os.write(writes, b"[]\n")
    os.close(writes)
    words = [sys.executable, "-c", ORPHAN]
    agent = subprocess.run(words, stdin=reads, capture_output=True, text=True, timeout=60)
    os.close(reads)
    assert (agent.stdout, agent.stderr) == ("0 False\n", "")
