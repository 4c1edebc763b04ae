"""The records of a job, and ``show``, while it is running and later."""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import cli
from pipeworker.runs import show
from pipeworker.runs.begin import RunRequest
from pipeworker.runs.info import Run
from support.real_jobs.jobs import Jobs, until
from support.real_jobs.sources import JOB
from support.slow import slow

SOURCE = (
    JOB
    + """
    def evaluation():
        return list(data())[:2]

    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean()}
"""
)
CALM = SOURCE.replace("x = torch", "__import__('time').sleep(0.01)\n            x = torch")
"""A job that mostly sleeps."""
WORDS = ("--stages", "2", "--microbatches", "4", "--evaluate-every", "2")


def table(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@slow
def test_show_while_a_job_is_running_and_after_a_resume(jobs: Jobs) -> None:
    process, path = jobs.start(*WORDS, "--csv", "--tensorboard", "--steps", "100000", source=CALM)
    until(lambda: (path / "evaluation.csv").exists())
    assert Run.read(path).status == "running"
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)
    found = Run.read(path)
    assert found.status == "interrupted"
    *_, saved = found.checkpoints.values()
    steps = str(saved.step + 3)
    line = ("launch", "--resume", "--run-dir", str(path), "--steps", steps, "job.py")
    done = jobs.pipeworker(*line)
    assert done.returncode == 0, done.stderr
    metrics = rows(path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [*range(1, int(steps) + 1)]
    assert table(path / "metrics.csv") == metrics
    assert table(path / "evaluation.csv") == rows(path / "evaluation.jsonl")
    events = EventAccumulator(str(path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("loss", "lr", "grad_norm"):
        scalars = [(scalar.step, scalar.value) for scalar in events.Scalars(f"train/{name}")]
        assert scalars == [(row["step"], pytest.approx(row[name])) for row in metrics]
    assert len(events.Scalars("evaluation/accuracy")) == len(rows(path / "evaluation.jsonl"))
    result = CliRunner().invoke(cli.main, ["show", "--json", str(path)])
    shown = json.loads(result.output)
    summary = json.loads((path / "summary.json").read_text())
    assert (shown["status"], shown["steps"]) == ("done", int(steps))
    assert shown["loss"] == summary["loss"] == metrics[-1]["loss"]
    best = min(rows(path / "evaluation.jsonl"), key=lambda row: float(row["loss"]))
    assert shown["best_evaluation"] == summary["best_evaluation"] == best
    assert [again["step"] for again in shown["resumed"]] == [saved.step]


def test_the_resume_command_works_and_a_failing_extra_format_ends_no_job(jobs: Jobs) -> None:
    run = jobs.train(*WORDS, "--stages", "1", "--steps", "2", "--csv", source=SOURCE)
    path = run.path / "evaluation.csv"
    path.unlink()
    path.mkdir()
    shown = json.loads(show.show(run.path, as_json=True))
    assert "--steps 4 " in shown["resume"]
    done = jobs.pipeworker(*shlex.split(shown["resume"])[1:])
    assert done.returncode == 0
    expected = f"warning: {path}: cannot be written: Is a directory; nothing more is written there"
    assert done.stderr.count(expected) == done.stderr.count("warning") == 1
    assert len(run.metrics) == 4


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_recorded(jobs: Jobs) -> None:
    job_file = jobs.write(JOB)
    line = [
        "git",
        "-C",
        str(jobs.folder),
        "-c",
        "user.name=x",
        "-c",
        "user.email=x",
        "-c",
        "commit.gpgsign=false",
    ]
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "x"]):
        subprocess.run([*line, *words], check=True)
    prepared = RunRequest(str(job_file), 1, {}, jobs.folder / "run").prepare()
    prepared.close()
    recorded = json.loads(prepared.run_dir.run.read_text())["git"]
    head = subprocess.run([*line, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert recorded == {"commit": head.stdout.strip(), "dirty": False}


def test_a_missing_package_is_reported_before_files_are_created(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file = jobs.write(JOB)
    for name in ("tensorboard", "tensorboard.compat"):
        monkeypatch.setitem(sys.modules, name, None)
    run = jobs.folder / "run"
    words = ["launch", "--stages", "1", "--tensorboard", "--run-dir", str(run), str(job_file)]
    done = CliRunner().invoke(cli.main, words)
    assert (done.exit_code, done.output) == (
        2,
        "error: --tensorboard: its package is missing; pip install tensorboard\n",
    )
    assert not run.exists()
