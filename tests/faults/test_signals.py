"""Tests of a job's signals and terminal: an interrupt, a hang-up, and an output that is closed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from support.processes.terminal import Terminal
from support.real_jobs.jobs import Jobs, Record, processes_of, steps_of, until
from support.real_jobs.live import ENDLESS, SECONDS, Live, left_in
from support.real_jobs.sources import JOB, SLEEPERS
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
