"""The display of a job, its logs and its run directory."""

from __future__ import annotations

import re
import shlex
import statistics
import sys
from pathlib import Path

import pytest

from pipeworker.display.text import number
from support.processes.terminal import Terminal
from support.real_jobs.jobs import Jobs, Record, until
from support.real_jobs.sources import CALM, JOB, gated

GATED = gated(JOB, when="_ == 3")
"""Step 4 cannot be read, and so step 3 cannot end, before the test allows it."""

METRICS = [
    *("step", "loss", "samples", "seconds", "samples_per_second"),
    *("grad_norm", "lr", "bubble", "epoch"),
]
SUMMARY = [
    *("status", "steps", "stages", "restarts", "causes", "seconds", "loss"),
    *("peak_memory_bytes", "bubble"),
    *("median_step_seconds", "samples_per_second", "tokens_per_second"),
    *("busy_seconds", "data_seconds", "stopped_early", "error"),
]
STEP = re.compile(r"step (\d+)  loss (\d\.\d{4})  lr 0\.1  (\d+\.\d) samples/s  bubble (\d+\.\d)%")


def test_a_line_per_step_appears_at_once(jobs: Jobs) -> None:
    words = ("--stages", "2", "--microbatches", "4", "--log-every", "1")
    process, path = jobs.start(*words, source=GATED)
    assert process.stdout is not None
    assert process.stdout.readline() == "starting 2 workers\n"
    assert process.stdout.readline() == (
        f"2 stages (3,2 layers), 4 micro-batches, gpipe; run directory {path}\n"
    )
    assert process.stdout.readline() == (
        "seed 0, one pass over the data, until data() ends, 1 thread per worker, cpu, fp32\n"
    )
    given = {"BALANCE": "balance even", "DEVICE": "device cpu", "RECOMPUTE": "recompute always"}
    for name, value in given.items():
        assert process.stdout.readline() == f"from PIPEWORKER_{name}: --{value}\n"
    early = [STEP.fullmatch(process.stdout.readline().rstrip("\n")) for _ in range(2)]
    assert [found and found[1] for found in early] == ["1", "2"]
    # The job waits in its third step: two steps and the plan are recorded.
    rows = until(lambda: lines if len(lines := Record(path).metrics) == 2 else None)
    assert [list(row) for row in rows] == [METRICS] * 2
    assert (path / "plan.json").exists()
    assert not (path / "summary.json").exists()
    assert process.poll() is None

    (jobs.folder / "go").touch()
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    late = [STEP.fullmatch(text) for text in stdout.splitlines()[:4]]
    assert [found and found[1] for found in late] == ["3", "4", "5", "6"]
    done, loss, speed, busy, bubble, *why, memory = stdout.splitlines()[4:-4]
    weights, export, resume, where = stdout.splitlines()[-4:]
    rows = Record(path).metrics
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, found in zip(rows, [*early, *late], strict=True):
        assert found is not None
        assert found[2] == f"{row['loss']:.4f}"
        assert row["samples"] == 10
        assert 0 <= row["bubble"] <= 1
        assert row["samples_per_second"] == pytest.approx(10 / row["seconds"])
    summary, plan = Record(path).summary, Record(path).plan
    assert re.fullmatch(r"done: 6 steps in \d+\.\d s", done)
    assert loss == f"loss: {rows[-1]['loss']:.4f}"
    measured, theory = f"{summary['bubble']:.1%}", f"{plan['schedule_bubble']:.1%}"
    assert bubble == f"bubble: {measured} measured, {theory} by the schedule"
    seconds = statistics.median(row["seconds"] for row in rows[1:])  # without the first step
    assert summary["median_step_seconds"] == seconds
    total = sum(row["seconds"] for row in rows[1:])
    assert summary["samples_per_second"] == pytest.approx(50 / total)
    assert summary["tokens_per_second"] is None
    assert speed == (
        f"speed: {number(seconds)} s a step (median), {summary['samples_per_second']:.1f} samples/s"
    )
    shown = ", ".join(f"{one:.1f}" for one in summary["busy_seconds"])
    assert busy == f"busy: {shown} s by worker; data(): {summary['data_seconds']:.1f} s"
    assert 0 < summary["data_seconds"] <= summary["busy_seconds"][0]
    assert all(line.startswith("  larger than the schedule's: ") for line in why)
    peaks = ", ".join(f"{peak / 1e6:.0f}" for peak in summary["peak_memory_bytes"])
    assert memory == f"peak memory by worker: {peaks} MB"
    assert where == f"run directory: {path}"
    assert weights == f"weights: {path}/checkpoints/step-00000006"
    # The commands of the summary work.
    assert export.startswith("export: ")
    assert resume.startswith("train further: ")
    for command in (export, resume):
        interpreter, *rest = shlex.split(command.partition(": ")[2])
        assert interpreter in (Path(sys.executable).name, sys.executable)
        assert rest[:2] == ["-m", "pipeworker"]
        ran = jobs.pipeworker(*rest[2:])
        assert ran.returncode == 0, ran.stderr
    assert (jobs.folder / "weights.safetensors").exists()
    assert "done: 12 steps" in ran.stdout


def test_the_run_directory(jobs: Jobs) -> None:
    source = JOB.replace(
        "def model",
        """
    import os, sys

    print("words", sys.argv[1:])

    class Talker(nn.Module):
        def forward(self, x):
            print("printed by a layer")
            os.write(2, b"written by a layer")
            return x

    def model""",
    ).replace("nn.Tanh()", "Talker()")
    words = ("--stages", "2", "--steps", "2", "--", "--depth", "3", "-x")
    run = jobs.train(*words, source=source)
    assert list(run.summary) == SUMMARY
    assert run.summary["status"] == "done"
    assert (run.summary["steps"], run.summary["stages"], run.summary["restarts"]) == (2, 2, 0)
    assert run.summary["error"] is None
    assert all(peak > 2**20 for peak in run.summary["peak_memory_bytes"])
    assert 0 < run.summary["bubble"] < 1
    assert 0 < run.summary["seconds"] < 60
    assert run.summary["loss"] == run.metrics[-1]["loss"]
    assert run.plan["balance"] == [3, 2]
    assert run.plan["schedule"] == "gpipe"
    assert run.plan["microbatches"] == 8  # four per stage
    assert [stage["stage"] for stage in run.plan["stages"]] == [0, 1]
    assert [stage["layers"] for stage in run.plan["stages"]] == [[0, 3], [3, 5]]
    assert [stage["classes"] for stage in run.plan["stages"]] == [
        ["Linear", "ReLU", "Linear"],
        ["Talker", "Linear"],
    ]
    assert [stage["parameters"] for stage in run.plan["stages"]] == [9 * 16 + 17 * 16, 17 * 3]
    # A worker's output is in its log and shown; words after -- reach the job file.
    for stage in (0, 1):
        assert "words ['--depth', '3', '-x']" in run.log(f"worker-{stage}")
    assert "printed by a layer" in run.log("worker-1")
    assert "written by a layer" in run.log("worker-1")
    assert "by a layer" not in run.log("worker-0") + run.stderr
    shown = [line for line in run.stdout.splitlines() if "by a layer" in line]
    assert shown[0] == "[stage 1] printed by a layer"
    assert all(line.startswith("[stage 1] ") for line in shown)
    assert run.stdout.count("words ['--depth', '3', '-x']") == 2
    assert "all ranks joined" in run.log("coordinator")
    names = {path.name for path in run.path.iterdir()}
    assert {"plan.json", "metrics.jsonl", "summary.json", "checkpoints", "logs"} <= names
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00000002"]


TALKS = """
    import sys, time, warnings

    def drawn(percent):
        sys.stderr.write(f"\\rreading {percent}%")
        sys.stderr.flush()
""" + JOB.replace(
    "x = torch.randn(10",
    """drawn(10 * _)
            if _ == 2:
                warnings.warn("of the job")
            if _ == 4:
                time.sleep(1)  # so that there is time to look
            x = torch.randn(10""",
)
"""Prints as tqdm does, and warns, where the data is read."""


def test_a_bar_on_a_terminal(jobs: Jobs) -> None:
    with Terminal(jobs, "--stages", "2", "--steps", "6", source=TALKS) as terminal:
        assert terminal.wait(60) == 0
    bar = r"step 6/6  ━+  loss \d\.\d{4}  lr 0\.1  \d+\.\d samples/s  \d:\d\d"
    end = terminal.shown
    (drawn,) = [line for line in end if line.startswith("step")]
    assert re.fullmatch(bar, drawn.rstrip()), end
    at = end.index(drawn)
    assert re.fullmatch(r"done: 6 steps in \d+\.\d s", end[at + 1])
    assert re.fullmatch(r"bubble: .* measured, .* by the schedule", end[at + 5])
    assert end[-1] == ""
    assert any("UserWarning: of the job" in line for line in end[:at])
    assert len(drawn.rstrip()) <= 78
    # Redrawn lines are above the bar, and removed when the job is over.
    assert re.search(r"\[stage 0\] reading \d0%\s+step \d/6  [━╸╺]+  loss", terminal.text)
    assert terminal.read().count("\x1b[?25l") == terminal.read().count("\x1b[?25h")  # the cursor


EVALUATES = (
    JOB
    + """
    import time
    from pathlib import Path

    class Seven:
        def __len__(self):
            return 7

        def __iter__(self):
            for number in range(7):
                while number == 3 and not Path(__file__).with_name("go").exists():
                    time.sleep(0.02)
                yield torch.randn(10, 8), torch.arange(10) % 3

    evaluation = Seven()
"""
)
"""The fourth mini-batch of its evaluation cannot be read before the test allows it."""


def test_a_bar_shows_the_evaluation_and_the_memory(jobs: Jobs) -> None:
    words = ("--stages", "2", "--steps", "2", "--evaluate-every", "1", "-v")
    with Terminal(jobs, *words, source=EVALUATES, columns=200) as terminal:
        until(lambda: re.search(r"step 1/2  [━╸╺]+  evaluating 3/7  loss", terminal.text))
        until(lambda: re.search(r"memory [1-9]\d+, [1-9]\d+ MB", terminal.text))
        (jobs.folder / "go").touch()
        assert terminal.wait(60) == 0
    (drawn,) = [line for line in terminal.shown if line.startswith("step")]
    assert "evaluating" not in drawn


def test_an_interrupted_job_shows_how_to_resume(jobs: Jobs) -> None:
    """The first Ctrl-C saves a checkpoint, and the summary has the command to resume."""
    words = ("--stages", "1", "--steps", "100000")
    with Terminal(jobs, *words, source=CALM, columns=200) as terminal:
        until(lambda: (terminal.path / "metrics.jsonl").exists() and Record(terminal.path).metrics)
        terminal.type("\x03")
        assert terminal.wait(60) == 130
    end = "\n".join(terminal.shown)
    assert (
        "warning: stopping after this step, with a checkpoint; interrupt again to stop at once"
        in end
    )
    (step,) = re.findall(r"^interrupted: (\d+) steps", end, re.MULTILINE)
    saved = f"run-terminal/checkpoints/step-{int(step):08d}"
    assert re.search(rf"^weights: .*/{saved}$", end, re.MULTILINE)
    assert re.search(r"^export: .* export run-terminal weights.safetensors$", end, re.MULTILINE)
    resume = r"^resume: .* launch --resume --run-dir run-terminal job.py$"
    assert re.search(resume, end, re.MULTILINE)


DIES = """
    import os, signal
    from pathlib import Path
""" + JOB.replace(
    "x = torch.randn(10",
    """if _ == 3 and not Path("died").exists():
                Path("died").touch()
                print("printed before")
                os.write(2, b"and no end")
                os.kill(os.getpid(), signal.SIGKILL)
            if _ == 4:
                print("printed after")
            x = torch.randn(10""",
)


def test_the_last_output_of_a_worker_that_dies(jobs: Jobs) -> None:
    """They are shown once, although the next worker appends to the same log."""
    run = jobs.train("--stages", "1", "--output", "all", source=DIES)
    assert [line for line in run.stdout.splitlines() if line.startswith("[stage")] == [
        "[stage 0] printed before",
        "[stage 0] and no end",
        "[stage 0] printed after",
    ]
    assert run.log("worker-0").startswith("printed before\nand no end")


def test_the_default_run_directory(jobs: Jobs) -> None:
    job_file = jobs.write(JOB, "folder/train.py")
    done = jobs.pipeworker("launch", "--stages", "1", "--steps", "1", str(job_file))
    assert done.returncode == 0, done.stderr
    (made,) = (jobs.folder / "runs").iterdir()
    assert re.fullmatch(r"train-\d{8}-\d{6}", made.name)
    assert f"run directory: {made}" in done.stdout
