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
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.host.lifetime import is_stopped
from pipeworker.runs.begin import RunRequest
from pipeworker.timings import DEFAULT
from support.processes.forked import Server
from support.processes.terminal import Terminal
from support.real_jobs.jobs import Jobs, Record, cpu_seconds, processes_of, steps_of, until
from support.real_jobs.live import SECONDS, Live, left_in
from support.real_jobs.sources import JOB, LOADER, SLEEPERS
from support.real_jobs.torchrun import Torchrun
from support.slow import slow

STUCK = JOB.replace(
    "def model",
    """
    import time
    from pathlib import Path

    class Stuck(nn.Module):
        def forward(self, x):
            Path("stuck").touch()
            while True:
                time.sleep(1000)

    def model""",
).replace("nn.ReLU()", "Stuck()")

STARTING = (
    """
    import time
    from pathlib import Path

    Path("starting").touch()
    while True:
        time.sleep(1000)
"""
    + JOB
)

WRITING = JOB.replace(
    "def model", 'losses, reads = open("losses", "a"), open("reads", "ab")\n\n    def model'
)
WRITING = WRITING.replace("return nn.f", 'losses.write("loss\\n")\n        return nn.f')
WRITING = WRITING.replace("x = torch.randn", 'reads.write(b"read\\n")\n            x = torch.randn')

LOADED = SLEEPERS.partition("    def data")[0] + LOADER[LOADER.index("    class Numbers") :]
LOADED = LOADED.replace("return torch.full", "time.sleep(0.01)\n            return torch.full")
"""The job `SLEEPERS` with a data loader, which has processes of its own."""

ENDLESS = ("--stages", "3", "--microbatches", "4", "--steps", "1000000")


@pytest.fixture
def start(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Live]:
    """Return a function that starts an endless job and waits until it trains."""
    temporary = jobs.folder / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    def start(*words: str, source: str = SLEEPERS, **options: Any) -> Live:
        shared = set(Path("/dev/shm").iterdir())
        process, path = jobs.start(*ENDLESS, *words, source=source, **options)
        live = Live(process, path, jobs.folder, shared)
        if source in (SLEEPERS, LOADED):
            until(lambda: steps_of(path) > 2)
            (child,) = jobs.folder.glob("child-*")
            assert int(child.read_text()) in processes_of(jobs.folder)
        return live

    return start


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


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=slow)])
def test_a_signal_ends_the_job_after_its_step(
    start: Callable[..., Live], number: signal.Signals
) -> None:
    """A terminal sends SIGHUP when it is closed, see below."""
    live = start()
    live.process.send_signal(number)
    status, stderr = live.end()
    assert status == 130
    assert "stopping after this step" in stderr
    assert stderr.endswith("interrupt again to stop at once\n")  # the summary has the status
    assert live.summary["status"] == "interrupted"
    assert live.summary["error"] is None
    # The job was in a step, which is complete and on record.
    assert live.summary["steps"] == steps_of(live.path)


HELD = """
import select

held = open("held")
while not select.select([held], [], [], 0.05)[0]:
    pass
raise SystemExit(7)
"""
"""A module that waits for the end of a file. Python would not handle a signal that arrives just
before a longer call of the system until that call returns."""


IN_IMPORT = [
    pytest.param(command, number, expected, marks=slow if (row - column) % 3 else ())
    for row, command in enumerate(("launch", "evaluate", "plan"))
    for column, (number, expected) in enumerate(
        ((signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGUSR1, 7))
    )
]
"""Each command, and each signal, once by default."""


@pytest.mark.parametrize(("command", "number", "expected"), IN_IMPORT)
def test_a_signal_while_a_command_is_imported_has_its_effect(
    jobs: Jobs, command: str, number: signal.Signals, expected: int
) -> None:
    """A module that waits for the test stands for a package that the command line imports."""
    held = jobs.folder / "held"
    os.mkfifo(held)
    jobs.write(HELD, "late/click.py")
    path = os.pathsep.join([str(jobs.folder / "late"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    heeds = ("env", "--default-signal=HUP")  # also where the tests run under nohup
    line = ("-m", "pipeworker", command)
    process = jobs.python(*line, cold=True, env=environment, prefix=heeds)
    with held.open("w"):  # it has begun to read
        process.send_signal(number)
        if expected == 130:
            process.wait(SECONDS)
    process.communicate(timeout=SECONDS)
    assert process.returncode == expected


LATE_END = """
import os
import signal
import sys

class Late:
    def __del__(self, end=(os.kill, os.getpid(), signal.SIGTERM)):
        end[0](*end[1:])

if "launch" in sys.orig_argv:
    late = Late()
"""
"""A module whose objects Python removes when it no longer handles signals."""


@slow
def test_a_signal_while_the_launcher_exits_leaves_the_status_of_the_job(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs.write(LATE_END, "late/sitecustomize.py")
    monkeypatch.setenv("PYTHONPATH", str(jobs.folder / "late"))
    run = jobs.train("--stages", "1", "--steps", "1", cold=True)
    assert run.summary["status"] == "done"


def test_an_interrupt_of_every_process_of_a_job_gives_a_checkpoint(
    start: Callable[..., Live],
) -> None:
    """A cluster sends such an interrupt before it takes a node."""
    live = start()
    for process in ("agent", "coordinator", "stage 0", "stage 1", "stage 2", "launcher"):
        os.kill(live.pid(process), signal.SIGINT)
    status, stderr = live.end()
    assert (status, stderr.count("stopping after this step")) == (130, 1)
    assert [*(live.path / "checkpoints").glob("step-*")]
    assert live.summary["restarts"] == 0


def test_a_job_under_nohup_outlives_its_terminal(jobs: Jobs) -> None:
    path = jobs.folder / "run"
    words = ["pipeworker", "launch", *ENDLESS, "--run-dir", str(path), str(jobs.write(SLEEPERS))]
    process = jobs.python(
        "-c",
        "import runpy, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
        f"sys.argv = {words}; runpy.run_module('pipeworker', run_name='__main__')",
    )
    until(lambda: steps_of(path) > 2)
    process.send_signal(signal.SIGHUP)
    before = steps_of(path)
    until(lambda: steps_of(path) > before + 2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=SECONDS)
    assert (process.returncode, stderr.count("stopping after this step")) == (130, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize(
    "cold",
    [
        pytest.param(True, marks=slow, id="importing torch"),
        pytest.param(False, id="in the job file"),
    ],
)
def test_a_job_that_ends_while_it_starts_leaves_nothing(
    jobs: Jobs, number: signal.Signals, cold: bool
) -> None:
    process, path = jobs.start(*ENDLESS, source=STARTING, cold=cold)
    log = path / "logs" / "coordinator.log"
    until(lambda: log.exists() and "bound to" in log.read_text())
    if not cold:
        until((jobs.folder / "starting").exists)
    assert not (path / "plan.json").exists()
    process.send_signal(number)
    _, stderr = process.communicate(timeout=SECONDS)
    until(lambda: not processes_of(jobs.folder), SECONDS)
    assert "Traceback" not in stderr
    status = Record(path).summary["status"]
    if number == signal.SIGINT:
        assert (process.returncode, status) == (130, "interrupted")
        assert "before the first step, so without a checkpoint" in stderr
    else:
        assert (process.returncode, status) == (-signal.SIGKILL, "lost")


def test_a_second_interrupt_ends_the_job_at_once(start: Callable[..., Live]) -> None:
    patient = {
        **os.environ,
        "PIPEWORKER_TIMINGS": "interrupt=1e5,verdict=1e6,rendezvous=2e6",
    }
    live = start(source=STUCK, env=patient)  # the step never ends
    until(lambda: (live.folder / "stuck").exists())
    live.process.send_signal(signal.SIGINT)
    assert live.process.stderr is not None
    assert "stopping after this step" in live.process.stderr.readline()
    since = time.monotonic()
    until(lambda: time.monotonic() > since + 0.25)  # one that comes sooner is the same interrupt
    live.process.send_signal(signal.SIGINT)
    assert live.process.wait(SECONDS) == 130
    live.check_gone()
    assert live.summary["status"] == "interrupted"


def test_an_interrupt_from_the_keyboard_while_a_layer_hangs(
    jobs: Jobs, start: Callable[..., Live]
) -> None:
    with Terminal(jobs, *ENDLESS, "--worker-timeout", "3", source=STUCK) as terminal:
        until(lambda: terminal.read() and (jobs.folder / "stuck").exists())
        terminal.type("\x03")
        until(lambda: "interrupted" in terminal.read(), SECONDS)
        assert terminal.wait(SECONDS) == 130
    until(lambda: not processes_of(jobs.folder), SECONDS)
    assert Record(terminal.path).summary["status"] == "interrupted"


def test_a_closed_terminal_interrupts_the_job(jobs: Jobs, start: Callable[..., Live]) -> None:
    with Terminal(jobs, *ENDLESS, source=SLEEPERS) as terminal:
        until(lambda: terminal.read() and steps_of(terminal.path) > 2)
        terminal.hang_up()
        assert terminal.wait(SECONDS) == 130
    until(lambda: not processes_of(jobs.folder), SECONDS)
    summary = Record(terminal.path).summary
    assert summary["status"] == "interrupted"
    assert summary["steps"] == steps_of(terminal.path)
    assert not left_in(jobs.folder / "tmp")


def test_a_closed_output_does_not_end_the_job(jobs: Jobs) -> None:
    """``pipeworker launch ... | head`` closes it."""
    process, path = jobs.start("--stages", "2", "--microbatches", "4", "--log-every", "1")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(SECONDS) == 0
    assert Record(path).summary["steps"] == 6


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
