"""The agent of a host."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest

from pipeworker.errors import AGAIN
from pipeworker.host import agent, cgroups
from pipeworker.host.agent import unreachable_reason
from pipeworker.record.rundir import file_digest
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import (
    AgentHello,
    Buffer,
    CannotStart,
    Fork,
    FromAgent,
    KeepAlive,
    WorkerExited,
    encode,
)
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB
from support.slow import slow


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


def test_a_worker_without_memory_for_its_ring_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    sent: list[FromAgent] = []
    monkeypatch.setattr(agent, "Ring", refused)
    monkeypatch.setattr(agent, "_send", sent.append)
    monkeypatch.setattr(agent, "keep_sockets_folder", lambda _: None)
    monkeypatch.setattr(agent, "SignalSocket", lambda _: None)
    watcher = SimpleNamespace(folder="")
    agent.Agent(cast(Any, watcher), remote=False).fork(request("tcp://127.0.0.1:1"))
    text = "cannot start the worker of rank 3: Cannot allocate memory"
    assert sent == [CannotStart(3, 1, text)]


def test_what_ends_a_forked_child_before_it_is_a_worker_is_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> NoReturn:
        raise RuntimeError("not even a worker")

    pids: list[int] = []
    monkeypatch.setattr(agent, "_send", lambda _: None)
    monkeypatch.setattr(agent, "SignalSocket", lambda _: None)
    watcher = SimpleNamespace(folder="", close=fail, add=pids.append)
    agent.Agent(cast(Any, watcher), remote=False).fork(request("tcp://127.0.0.1:1"))
    _, status = os.waitpid(pids[0], 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert capfd.readouterr().err.endswith("RuntimeError: not even a worker\n")


def test_a_worker_that_ends_as_the_kernel_kills_for_memory_is_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[FromAgent] = []
    kills = [3]
    monkeypatch.setattr(agent, "_send", sent.append)
    monkeypatch.setattr(agent, "SignalSocket", lambda _: None)
    monkeypatch.setattr(cgroups, "memory_kills", lambda: kills[0])

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL if kills[0] < 6 else signal.SIGTERM)

    watcher = SimpleNamespace(folder="", close=end, add=lambda _: None, remove=lambda _: None)
    own = agent.Agent(cast(Any, watcher), remote=False)
    for count in (3, 4, 4, 6):
        kills[0] = count
        own.fork(request("tcp://127.0.0.1:1"))
        before = len(sent)
        while len(sent) == before or not isinstance(sent[-1], WorkerExited):
            own._reap()
    ended = [(one.code, one.lacks_memory) for one in sent if isinstance(one, WorkerExited)]
    assert ended == [(-9, False), (-9, True), (-9, False), (-15, False)]


HOSTILE = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
os.execv(sys.argv[1], sys.argv[1:])
"""
NONE_BLOCKED = (
    JOB
    + """
    import signal
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""
)


@slow
def test_a_job_runs_below_a_program_that_ignores_its_children_and_blocks_signals(
    jobs: Jobs,
) -> None:
    """The kernel would reap all children itself, and no exit status would be known."""
    start = [sys.executable, "-c", HOSTILE]
    words = ("--stages", "2", "--steps", "2")
    run = jobs.run(*words, source=NONE_BLOCKED, prefix=start, cold=True)
    assert (run.status, len(run.metrics)) == (0, 2), run.stderr


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
    ended = subprocess.run(words, stdin=reads, capture_output=True, text=True, timeout=60)
    os.close(reads)
    assert (ended.stdout, ended.stderr) == ("0 False\n", "")


def test_an_agent_introduces_its_host_on_a_line_of_its_own() -> None:
    """The text that a shell has printed before may lack the end of its line."""
    words = [sys.executable, "-c", ORPHAN, "", "", __file__, __file__, "CALLER"]
    variables = {**os.environ, "CALLER": "10.0.0.1 50000 10.0.0.2 22"}
    ended = subprocess.run(
        words, input="", env=variables, capture_output=True, text=True, timeout=60
    )
    shell, hello, _ = ended.stdout.split("\n", 2)
    received: Buffer[FromAgent] = Buffer(FromAgent)
    (event,) = received.feed(f"{hello}\n".encode())
    assert isinstance(event, AgentHello)
    assert (shell, event.caller, event.job) == ("", "10.0.0.1", file_digest(Path(__file__)))


SILENT = """
from pipeworker.host.agent import Agent
from pipeworker.host.session_watcher import SessionWatcher
Agent(SessionWatcher(""), remote=True).serve()
"""


def test_an_agent_whose_launcher_is_silent_ends() -> None:
    """Its input stays open, as with a cable that is unplugged."""
    reads, writes = os.pipe()
    os.write(writes, encode(KeepAlive(0.2)))
    words, fast = [sys.executable, "-c", SILENT], {**os.environ, "PIPEWORKER_TIMINGS": "0.1"}
    ended = subprocess.run(words, stdin=reads, env=fast, capture_output=True, timeout=60)
    os.close(reads)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.startswith(encode(KeepAlive(0.0)) + encode(KeepAlive(0.2)))


@pytest.mark.parametrize(
    ("torch", "reason"),
    [
        (
            "raise OSError('libcudart.so.13: cannot be opened')",
            "torch cannot be imported: OSError: libcudart.so.13: cannot be opened; "
            f"{sys.executable} -c 'import torch' shows where",
        ),
        (
            """
import sys, types
from pipeworker.errors import UsageError

def preload():
    raise UsageError("TORCHINDUCTOR_CACHE_DIR: there is no home folder")

sys.modules["pipeworker.worker.internals"] = types.SimpleNamespace(preload=preload)
""",
            "TORCHINDUCTOR_CACHE_DIR: there is no home folder",
        ),
    ],
    ids=["torch", "the folder of its kernels"],
)
def test_a_torch_that_cannot_be_imported_is_one_line(
    tmp_path: Path, torch: str, reason: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    words = [sys.executable, "-c", ORPHAN]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    reads, writes = os.pipe()  # the end of this pipe would be that of the launcher
    ended = subprocess.run(words, stdin=reads, env=path, capture_output=True, text=True, timeout=60)
    os.close(reads)
    os.close(writes)
    assert ended.returncode == 1
    assert ended.stderr == f"{socket.gethostname()}: {reason}\n"


PRINTS = """
import ctypes, os
print("a backend")
ctypes.CDLL(None).puts(b"its library")
os.system("echo its child")
raise OSError("none")
"""


def test_text_that_torch_prints_at_its_import_is_no_event(tmp_path: Path) -> None:
    """A backend that torch loads may do so, also in C code, and in a child process."""
    (tmp_path / "torch.py").write_text(PRINTS)
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    path.pop("PYTHONUNBUFFERED", None)  # C code would write at once too
    reads, writes = os.pipe()
    words = [sys.executable, "-c", ORPHAN]
    ended = subprocess.run(words, stdin=reads, env=path, capture_output=True, text=True, timeout=60)
    os.close(reads)
    os.close(writes)
    received: Buffer[FromAgent] = Buffer(FromAgent)
    assert received.feed(ended.stdout.encode())
    assert sorted(ended.stderr.splitlines()[:3]) == ["a backend", "its child", "its library"]


@pytest.mark.parametrize("remote", [True, pytest.param(False, marks=slow)])
def test_a_worker_whose_coordinator_does_not_answer_names_both(jobs: Jobs, remote: bool) -> None:
    """In a later generation no check precedes its start; a job on one host needs no advice."""
    code = SILENT.replace("True", str(remote))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        fast = {**os.environ, "PIPEWORKER_TIMINGS": "0.1"}
        fork = replace(request(endpoint, generation=2), token=new_token())
        received: Buffer[FromAgent] = Buffer(FromAgent)
        started = jobs.python("-c", code, stdin=subprocess.PIPE, env=fast)
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(encode(fork).decode())
        started.stdin.flush()
        events: list[FromAgent] = []
        while not any(isinstance(event, WorkerExited) for event in events):
            line = started.stdout.readline()
            assert line, "the agent has ended"
            events += received.feed(line.encode())
        started.stdin.close()
    (exited,) = (event for event in events if isinstance(event, WorkerExited))
    text = f"{socket.gethostname()} cannot reach the coordinator at {endpoint}: it does not answer"
    found, _, advice = exited.unreachable.partition(";")
    assert (exited.code, found, advice != "") == (AGAIN, text, remote)
