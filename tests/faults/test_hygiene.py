"""Tests of every end of a job: nothing of it remains, and a surviving process reports the cause."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.host.lifetime import is_stopped
from pipeworker.runs.begin import RunRequest
from pipeworker.timings import DEFAULT
from support.processes.forked import Server
from support.real_jobs.jobs import Jobs, cpu_seconds, processes_of, steps_of, until
from support.real_jobs.live import SECONDS, Live
from support.real_jobs.sources import JOB, LOADER, SLEEPERS
from support.real_jobs.torchrun import Torchrun
from support.slow import slow

WRITING = JOB.replace(
    "def model", 'losses, reads = open("losses", "a"), open("reads", "ab")\n\n    def model'
)
WRITING = WRITING.replace("return nn.f", 'losses.write("loss\\n")\n        return nn.f')
WRITING = WRITING.replace("x = torch.randn", 'reads.write(b"read\\n")\n            x = torch.randn')

LOADED = SLEEPERS.partition("    def data")[0] + LOADER[LOADER.index("    class Numbers") :]
LOADED = LOADED.replace("return torch.full", "time.sleep(0.01)\n            return torch.full")
"""The job `SLEEPERS` with a data loader, which has processes of its own."""


@pytest.mark.parametrize(
    ("stage", "number", "how"),
    [
        pytest.param(0, signal.SIGKILL, "was killed by SIGKILL", marks=slow),
        (1, signal.SIGTERM, "was ended by SIGTERM"),
    ],
)
def test_a_killed_worker_fails_the_job(
    start: Callable[..., Live], stage: int, number: signal.Signals, how: str
) -> None:
    """For SIGKILL see also ``test_errors.py``."""
    live = start("--max-restarts", "0")
    os.kill(live.pid(f"stage {stage}"), number)
    status, stderr = live.end()
    assert status == 1
    assert f"the worker of stage {stage} {how}" in stderr
    assert stderr.count("error:") == 1
    assert "closed" not in stderr  # the failure that the neighbours reported
    assert live.summary["status"] == "failed"
    assert f"stage {stage} {how}" in live.summary["error"]
    assert live.summary["steps"] >= 2


@slow  # test_recovery.py loses one that is not replaced
def test_a_killed_coordinator_fails_the_job(start: Callable[..., Live]) -> None:
    live = start("--max-restarts", "0")
    os.kill(live.pid("coordinator"), signal.SIGKILL)
    status, stderr = live.end()
    assert status == 1
    assert "error: the coordinator was killed" in stderr
    assert (live.summary["status"], live.summary["error"]) == (
        "failed",
        "the coordinator was killed",
    )


UNFINISHED = JOB.replace(
    "def data():",
    """def data():
        import os, pathlib
        yield torch.zeros(10, 8), torch.zeros(10, dtype=torch.long)
        pathlib.Path("run-1/checkpoints/.step-00000001.partial").mkdir(parents=True)
        os._exit(1)""",
)
"""The mark of a worker that is killed while it writes a checkpoint."""


def test_no_unfinished_checkpoint_stays(jobs: Jobs) -> None:
    run = jobs.run("--stages", "1", "--max-restarts", "0", source=UNFINISHED)
    assert run.status == 1
    assert list((run.path / "checkpoints").iterdir()) == []


def kill_at_once(live: Live, *processes: str) -> None:
    """Kill processes of a job, none of which reacts to the end of another."""
    pids = [live.pid(process) for process in processes]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


def train_on(live: Live) -> None:
    """Wait for more steps."""
    before = steps_of(live.path)
    until(lambda: steps_of(live.path) > before + 2)


def check_sockets(live: Live) -> None:
    """Check that a data loader's processes have sockets, whose paths may have 107 characters."""
    assert [*(live.folder / "tmp").glob("pymp-*/listener-*")]


def test_no_socket_stays(start: Callable[..., Live]) -> None:
    """A worker is killed, then launcher and agent together; none of their files stays either."""
    live = start(source=LOADED)
    check_sockets(live)
    kill_at_once(live, "stage 0")
    train_on(live)
    check_sockets(live)
    kill_at_once(live, "launcher", "agent")
    live.check_gone()


@slow
@pytest.mark.parametrize("killed", [(), ("stage 0",), ("agent",)], ids=["none", "stage", "agent"])
def test_no_sockets_stay(start: Callable[..., Live], killed: tuple[str, ...]) -> None:
    """The job ends in mid-epoch, by an interrupt."""
    live = start(source=LOADED)
    check_sockets(live)
    kill_at_once(live, *killed)
    train_on(live)
    live.process.send_signal(signal.SIGINT)
    assert live.end()[0] == 130
    live.check_gone()


BARE = """
import sys, types

modules = ("internals", "process", "model.survey_process", "data.reader_process")
for name in ("model", "data", *modules):
    name = f"pipeworker.worker.{name}"
    sys.modules[name] = types.SimpleNamespace(preload=lambda: None)
"""
"""A module in place of torch, whose import takes an agent a second."""
LAUNCHER = """
import sys
from pipeworker.host.line_process import start_agent, start_coordinator
from pipeworker.job.options import Options
from pipeworker.wire.keys import new_token
from pipeworker.wire.lines import Configuration

agent, coordinator = start_agent(), start_coordinator()
options = Options("job.py", 1, 1).to_json()
coordinator.send(Configuration(options, sys.argv[1], new_token(), "127.0.0.1", 1))
for process in (agent, coordinator):
    assert process.receive()[0]
print(agent.pid, coordinator.pid, flush=True)
sys.stdin.read()
"""


def test_stopped_processes_end_with_their_launcher(jobs: Jobs) -> None:
    """The kernel wakes the children of a launcher that ends; each reads that its input ended."""
    jobs.write(BARE, "bare/torch.py")
    (jobs.folder / "run" / "logs").mkdir(parents=True)
    path = os.pathsep.join([str(jobs.folder / "bare"), *sys.path])
    words = ("-c", LAUNCHER, str(jobs.folder / "run"))
    launcher = jobs.python(
        *words, cold=True, stdin=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
        until(partial(is_stopped, pid))
    launcher.kill()
    until(lambda: not processes_of(jobs.folder), SECONDS)


@slow
def test_stopped_processes_of_a_job_end_with_its_launcher(start: Callable[..., Live]) -> None:
    live = start(cold=True)  # the launcher is their parent
    for process in ("coordinator", "agent"):
        os.kill(live.pid(process), signal.SIGSTOP)
    os.kill(live.pid("launcher"), signal.SIGKILL)
    live.check_gone()


def test_a_killed_agent_fails_the_job(start: Callable[..., Live]) -> None:
    live = start("--max-restarts", "0")  # it is restarted otherwise
    os.kill(live.pid("agent"), signal.SIGKILL)
    status, stderr = live.end()
    assert status == 1
    assert "error: the agent of this host was killed" in stderr
    assert live.summary["status"] == "failed"
    assert "agent" in live.summary["error"]


def test_a_job_with_a_killed_launcher_is_lost(start: Callable[..., Live]) -> None:
    live = start()
    os.kill(live.pid("launcher"), signal.SIGKILL)
    status, _ = live.end()
    assert status == -signal.SIGKILL
    assert live.summary["status"] == "lost"
    assert "the process that started the job is gone" in live.summary["error"]


def test_a_run_directory_is_in_use_until_all_processes_that_write_there_are_gone(
    start: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, server: Server | None
) -> None:
    live = start()
    resume = RunRequest(str(live.folder / "job.py"), None, {}, live.path, resume=True)
    coordinator = live.pid("coordinator")
    monkeypatch.setattr("pipeworker.runs.begin.timings", lambda: DEFAULT.scaled(0.01))
    # With the launcher, and without: then only a child of the tests' server stays stopped.
    for _ in range(2 if server else 1):
        for request in (resume, replace(resume, resume=False, stages=2)):
            with pytest.raises(UsageError, match=f"is in use: process {live.process.pid} on "):
                request.prepare()
        os.kill(coordinator, signal.SIGSTOP)
        os.kill(live.pid("launcher"), signal.SIGKILL)
    os.kill(coordinator, signal.SIGCONT)
    monkeypatch.setattr("pipeworker.runs.begin.timings", lambda: DEFAULT.scaled(20))
    prepared = resume.prepare()
    assert not live.path.joinpath("summary.json").exists()
    assert steps_of(live.path) == 0
    prepared.close()
    live.process.communicate(timeout=SECONDS)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=slow), 2])
def test_a_hung_worker_is_detected_and_named(start: Callable[..., Live], stage: int) -> None:
    live = start("--worker-timeout", "3", "--max-restarts", "0")
    pid = live.pid(f"stage {stage}")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: f"{pid} (" in (stat := Path(f"/proc/{pid}/stat").read_text()) and ") T " in stat)
    until((live.path / "summary.json").exists)
    launcher = live.pid("launcher")
    before = cpu_seconds(launcher)
    until(lambda: ") Z " in Path(f"/proc/{launcher}/stat").read_text())
    assert cpu_seconds(launcher) - before < 0.3  # it waits without spinning
    status, stderr = live.end()
    assert status == 1
    assert f"stage {stage} (pid {pid} on {socket.gethostname()}) has not answered" in stderr
    assert "for 3 s" in stderr
    assert live.summary["status"] == "failed"
    assert f"stage {stage}" in live.summary["error"]


STOPPED = {
    "coordinator": "the coordinator (pid {pid}) has not answered for 3 s",
    "agent": "the agent of this host (pid {pid}) has not answered for 3 s",
}


@pytest.mark.parametrize("process", ["coordinator", pytest.param("agent", marks=slow)])
def test_a_stopped_process_is_detected_and_named(start: Callable[..., Live], process: str) -> None:
    live = start("--worker-timeout", "3", "--max-restarts", "0")
    pid = live.pid(process)
    os.kill(pid, signal.SIGSTOP)
    status, stderr = live.end()
    assert status == 1
    error = STOPPED[process].format(pid=pid)
    assert f"error: {error}" in stderr
    assert error in live.summary["error"]


@slow
def test_a_job_trains_on_while_its_launcher_is_stopped(start: Callable[..., Live]) -> None:
    """Ctrl-Z stops the launcher alone, for longer than anything may be silent.

    The processes are the launcher's own children only without the tests' server.
    """
    live = start("--worker-timeout", "3", "--max-restarts", "0", cold=True)
    os.kill(live.pid("launcher"), signal.SIGSTOP)
    log, stopped = live.path / "logs" / "coordinator.log", time.monotonic()
    until(lambda: time.monotonic() - stopped > 7)
    before = steps_of(live.path)
    until(lambda: steps_of(live.path) > before + 2)
    assert "has not answered" not in log.read_text()
    os.kill(live.pid("launcher"), signal.SIGCONT)
    live.process.send_signal(signal.SIGINT)
    status, stderr = live.end()
    assert status == 130, stderr


def test_a_worker_timeout_below_the_heartbeat_interval_loses_no_worker(jobs: Jobs) -> None:
    source = JOB.replace("x = torch.randn(10", "import time; time.sleep(0.4); x = torch.randn(10")
    run = jobs.train("--stages", "2", "--worker-timeout", "0.9", source=source)
    assert run.summary["seconds"] > 1.5


def test_a_job_with_more_stages_than_layers_starts_one_worker(jobs: Jobs) -> None:
    source = JOB.replace("def model", "open('started', 'a').write('.')\n\n    def model", 1)
    run = jobs.run("--stages", "1000", source=source)
    assert run.status == 2
    assert run.stderr.startswith("error: --stages 1000: more than the layers of model(), 5")
    assert len((jobs.folder / "started").read_text()) <= 2  # one worker, and what reads its data


def test_a_launcher_that_is_killed_while_it_starts_many_workers_leaves_nothing(jobs: Jobs) -> None:
    source = JOB.replace("nn.Linear(16, 3)", "*[nn.Identity()] * 64, nn.Linear(16, 3)")
    process, path = jobs.start("--stages", "64", source=source)
    log = path / "logs" / "coordinator.log"
    until(lambda: log.exists() and "rank 1 joined" in log.read_text())
    process.kill()
    until(lambda: not processes_of(jobs.folder), SECONDS)
    assert "all ranks joined" not in log.read_text()
    process.communicate()


@slow
def test_no_process_of_a_job_leaves_a_file_for_python_to_close(jobs: Jobs) -> None:
    env = {**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"}
    run = jobs.train("--stages", "2", "--steps", "1", env=env, cold=True)
    assert "ResourceWarning" not in run.stderr


@pytest.mark.parametrize(
    "ranks", [False, pytest.param(True, marks=slow)], ids=["launch", "torchrun"]
)
def test_what_a_job_has_written_is_in_its_files_at_the_end(
    jobs: Jobs, torchrun: Torchrun, ranks: bool
) -> None:
    words = ("--microbatches", "2", "--recompute", "never")
    if ranks:
        assert torchrun(*words, source=WRITING).end().status == 0
    else:
        jobs.train("--stages", "2", *words, source=WRITING)
    lines = {name: (jobs.folder / name).read_text().count("\n") for name in ("losses", "reads")}
    assert lines == {"losses": 12, "reads": 6}
