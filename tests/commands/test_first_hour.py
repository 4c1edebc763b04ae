"""A newcomer's first hour: an argument parser, a debugger, a mistake."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.processes.terminal import Terminal
from support.real_jobs.jobs import Jobs, ended, pids_of, until
from support.real_jobs.sources import JOB
from support.slow import slow

PARSES = JOB.replace(
    "def model",
    """import argparse
    parser = argparse.ArgumentParser(prog="job.py", description="My own job")
    parser.add_argument("--width", type=int)
    if parser.parse_args().width == 0:
        raise SystemExit("a width of 0")

    def model""",
    1,
)


@pytest.mark.parametrize(
    ("words", "status", "stdout", "stderr"),
    [
        (("--help",), 0, "usage: job.py .*\n\nMy own job\n\n(.*\n)+.*--width WIDTH\n", ""),
        (("--wide",), 2, "", "usage: job.py .*\njob.py: error: unrecognized arguments: --wide\n"),
        pytest.param(("--width", "0"), 1, "", "a width of 0\n", marks=slow),
    ],
)
def test_the_message_of_a_job_file_that_exits_is_the_verdict(
    jobs: Jobs, words: tuple[str, ...], status: int, stdout: str, stderr: str
) -> None:
    """It is shown once, not once per worker, after what is shown at once; no files remain."""
    job_file = jobs.write(PARSES)
    done = jobs.pipeworker("launch", "--stages", "2", str(job_file), "--", *words)
    assert done.returncode == status
    assert re.fullmatch(f"starting 2 workers\n{stdout}", done.stdout), done.stdout
    assert re.fullmatch(stderr, done.stderr), done.stderr
    assert [path.name for path in jobs.folder.iterdir() if path.name != "__pycache__"] == ["job.py"]


def test_an_existing_run_directory_stays(jobs: Jobs) -> None:
    words = ("--stages", "1", "--microbatches", "1", "--steps", "1")
    assert jobs.train(*words).summary["status"] == "done"
    before = {path.name for path in (jobs.folder / "run-1").iterdir()}
    job_file = jobs.write(JOB.replace("def optimizer", "def optimizar"))  # of the same size
    again = ("--resume", "--run-dir", "run-1", "--steps", "4", str(job_file))
    done = jobs.pipeworker("launch", *again)
    assert done.returncode == 2
    assert "lacks the name optimizer" in done.stderr
    assert before <= {path.name for path in (jobs.folder / "run-1").iterdir()}


ASKS = JOB.replace(
    "def loss(output, target):", "ASKED = []\n\n    def loss(output, target):\n        asks(output)"
).replace(
    "def model",
    """def asks(output):
        if not ASKED:
            ASKED.append(1)
            breakpoint()

    def model""",
    1,
)


def test_a_debugger_has_the_terminal(jobs: Jobs) -> None:
    words = ("--stages", "1", "--debug", "--steps", "2", "--microbatches", "2")
    with Terminal(jobs, *words, source=ASKS) as terminal:
        until(lambda: "(Pdb)" in terminal.read())
        terminal.type("up\n")
        terminal.type("p 'its shape is', output.shape\n")
        until(lambda: "('its shape is', torch.Size([5, 3]))" in terminal.read())
        terminal.type("c\n")
        assert terminal.wait(60) == 0
        shown = terminal.read()
    assert shown.count("(Pdb)") == 3
    assert "step 2/2  loss" in shown  # lines rather than a bar
    assert "\x1b[?25l" not in shown


def test_a_debugger_in_a_worker_reports_the_option_debug(jobs: Jobs) -> None:
    run = jobs.run("--stages", "1", "--microbatches", "2", source=ASKS)
    assert run.status == 2
    error, place = run.stderr.splitlines()
    assert re.match(
        r"error: job.py, line \d+: a worker has no terminal .* --stages 1 --debug", error
    )
    assert place == "  in loss: stage 0, micro-batch 0, step 1"
    assert not run.path.exists()


BUILDS = JOB.replace(
    "def optimizer(params):",
    """def optimizer(params):
        from pathlib import Path

        Path("builds").touch()
        while not Path("go").exists():
            pass""",
)


def test_a_lost_coordinator_is_reported_in_the_foreground(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only worker is not built yet and waits for the coordinator."""
    monkeypatch.setenv("PIPEWORKER_TIMINGS", "0.2")
    process, path = jobs.start("--stages", "1", "--debug", source=BUILDS)
    until(lambda: (jobs.folder / "builds").exists())
    (pid,) = pids_of(jobs.folder, "coordinator")
    os.kill(pid, signal.SIGKILL)
    (jobs.folder / "go").touch()
    run = ended(process, path, 1)
    assert run.stderr.startswith(f"error: the coordinator (pid {pid}) was killed\n")
    assert run.summary["status"] == "failed"


def test_debug_requires_a_single_worker(jobs: Jobs) -> None:
    done = jobs.pipeworker("launch", "--stages", "2", "--debug", str(jobs.write(JOB)))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --debug: requires one worker on this host")


def test_the_example_trains_and_generates_text(jobs: Jobs) -> None:
    example = str(Path(__file__).parents[2] / "examples" / "bytelm.py")
    small = ("--width", "16", "--heads", "2", "--blocks", "1", "--context", "16", "--batch", "4")
    run = jobs.folder / "run"
    words = ("--stages", "2", "--steps", "1", "--evaluate-every", "1", "--run-dir", str(run))
    trained = jobs.pipeworker("launch", *words, example, "--", *small)
    assert trained.returncode == 0, trained.stderr
    process = jobs.python(example, str(run), "--bytes", "30", *small)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert text.startswith("def ")
    assert len(text) >= len("def ") + 10  # some of the bytes may be no text
