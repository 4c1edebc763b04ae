"""What the user sees of a job: lines or a bar, logs, and the run directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from support.jobs import Jobs, until
from support.sources import JOB
from support.terminal import Terminal

GATED = JOB.replace(
    "x = torch.randn(10",
    """if _ == 3:
                import pathlib, time
                while not pathlib.Path("go").exists():
                    time.sleep(0.02)
            x = torch.randn(10""",
)
"""Step 4 cannot be read, and so step 3 cannot end, before the test allows it."""

METRICS = [
    *("step", "loss", "samples", "seconds", "samples_per_second"),
    *("grad_norm", "lr", "bubble", "epoch"),
]
SUMMARY = [
    *("status", "steps", "stages", "restarts", "causes", "seconds", "loss"),
    *("peak_memory_bytes", "bubble", "error"),
]
STEP = re.compile(r"step (\d+)  loss (\d\.\d{4})  (\d+\.\d) samples/s  bubble (\d+\.\d)%")


def test_a_line_a_step_as_it_happens(jobs: Jobs) -> None:
    process, path = jobs.start("--stages", "3", "--microbatches", "4", source=GATED)
    assert process.stdout is not None
    assert process.stdout.readline() == (
        f"3 stages (2,2,1 layers), 4 micro-batches, gpipe; run directory {path}\n"
    )
    early = [STEP.fullmatch(process.stdout.readline().rstrip("\n")) for _ in range(2)]
    assert [found and found[1] for found in early] == ["1", "2"]
    # The job waits in its third step: the record of two is whole, and so is the plan.
    rows = until(lambda: lines if len(lines := read_rows(path)) == 2 else None)
    assert [list(row) for row in rows] == [METRICS] * 2
    assert (path / "plan.json").exists()
    assert not (path / "summary.json").exists()
    assert process.poll() is None

    (jobs.folder / "go").touch()
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (0, "")
    *steps, done, bubble, memory, where = stdout.splitlines()
    late = [STEP.fullmatch(line) for line in steps]
    assert [found and found[1] for found in late] == ["3", "4", "5", "6"]
    rows = read_rows(path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row, found in zip(rows, [*early, *late], strict=True):
        assert found is not None
        assert found[2] == f"{row['loss']:.4f}"
        assert row["samples"] == 10
        assert 0 <= row["bubble"] <= 1
        assert row["samples_per_second"] == pytest.approx(10 / row["seconds"])
    summary = json.loads((path / "summary.json").read_text())
    plan = json.loads((path / "plan.json").read_text())
    assert re.fullmatch(r"done: 6 steps in \d+\.\d s", done)
    measured, theory = f"{summary['bubble']:.1%}", f"{plan['bubble']:.1%}"
    assert bubble == f"bubble: {measured} measured, {theory} by the schedule"
    peaks = ", ".join(f"{peak / 2**20:.0f}" for peak in summary["peak_memory_bytes"])
    assert memory == f"peak memory by stage: {peaks} MiB"
    assert where == f"run directory: {path}"


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


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
    assert run.plan["microbatches"] == 8  # four a stage
    assert [stage["stage"] for stage in run.plan["stages"]] == [0, 1]
    assert [stage["layers"] for stage in run.plan["stages"]] == [[0, 1, 2], [3, 4]]
    assert [stage["classes"] for stage in run.plan["stages"]] == [
        ["Linear", "ReLU", "Linear"],
        ["Talker", "Linear"],
    ]
    assert [stage["parameters"] for stage in run.plan["stages"]] == [9 * 16 + 17 * 16, 17 * 3]
    # What a worker prints is in its log and nowhere else; words after -- reach the job file.
    for stage in (0, 1):
        assert "words ['--depth', '3', '-x']" in run.log(f"stage-{stage}")
    assert "printed by a layer" in run.log("stage-1")
    assert "written by a layer" in run.log("stage-1")
    assert "by a layer" not in run.log("stage-0") + run.stdout + run.stderr
    assert "all ranks joined" in run.log("coordinator")
    names = {path.name for path in run.path.iterdir()}
    assert {"plan.json", "metrics.jsonl", "summary.json", "checkpoints", "logs"} <= names
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_bar_on_a_terminal(jobs: Jobs) -> None:
    with Terminal(jobs, "--stages", "2", "--steps", "6") as terminal:
        assert terminal.wait(60) == 0
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.read())
    bar = r"step 6/6 ━+ +loss \d\.\d{4} +\d+\.\d samples/s +bubble \d+\.\d% +\d:\d\d:\d\d"
    assert re.search(bar, shown), shown
    assert re.search(r"\ndone: 6 steps in \d+\.\d s\r\nbubble: .* measured, .* by the sch", shown)
    assert re.search(rf"\nrun directory: {terminal.path}\r\n", shown)
    assert not STEP.search(shown)
    assert terminal.read().endswith("\n")
    assert terminal.read().count("\x1b[?25l") == terminal.read().count("\x1b[?25h")  # the cursor


def test_the_default_run_directory(jobs: Jobs) -> None:
    job_file = jobs.write(JOB, "folder/train.py")
    done = jobs.pipeworker("launch", "--stages", "1", "--steps", "1", str(job_file))
    assert done.returncode == 0, done.stderr
    (made,) = (jobs.folder / "runs").iterdir()
    assert re.fullmatch(r"train-\d{8}-\d{6}", made.name)
    assert f"run directory: {made}" in done.stdout
