"""What a job leaves behind in other formats, and what is told of it: while it runs, and later."""

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
from pipeworker.past import page
from pipeworker.past.facts import Run
from pipeworker.session.begin import Asked
from support.jobs import Jobs, until
from support.sources import JOB

SOURCE = (
    JOB
    + """
    def evaluation():
        return list(data())[:2]

    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean()}
"""
)
WORDS = ("--stages", "2", "--microbatches", "4", "--evaluate-every", "2")


def table(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_told_while_it_runs_and_when_it_has_gone_on(jobs: Jobs) -> None:
    process, path = jobs.start(*WORDS, "--csv", "--tensorboard", "--steps", "100000", source=SOURCE)
    until(lambda: (path / "evaluation.csv").exists())
    found = Run.read(path)
    assert (found.status, found.saved) == ("running", ())
    os.kill(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)
    found = Run.read(path)
    assert found.status == "interrupted"
    (saved,) = found.saved
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
    told = CliRunner().invoke(cli.main, ["show", "--json", str(path)])
    shown = json.loads(told.output)
    summary = json.loads((path / "summary.json").read_text())
    assert (shown["status"], shown["steps"]) == ("done", int(steps))
    assert shown["loss"] == summary["loss"] == metrics[-1]["loss"]
    best = min(rows(path / "evaluation.jsonl"), key=lambda row: float(row["loss"]))
    assert shown["best_evaluation"] == summary["best_evaluation"] == best
    assert [again["step"] for again in shown["resumed"]] == [saved.step]


def test_it_goes_on_as_is_shown_and_an_extra_that_cannot_be_written_ends_no_job(jobs: Jobs) -> None:
    run = jobs.train(*WORDS, "--steps", "2", "--csv", source=SOURCE)
    path = run.path / "evaluation.csv"
    path.unlink()
    path.mkdir()
    shown = json.loads(page.show(run.path, as_json=True))
    assert "--steps 4 " in shown["go_on"]
    done = jobs.pipeworker(*shlex.split(shown["go_on"])[1:])
    assert done.returncode == 0
    said = f"warning: cannot write {path}: Is a directory: nothing more is written there"
    assert done.stderr.count(said) == done.stderr.count("warning") == 1
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
    begun = Asked(str(job_file), 1, {}, jobs.folder / "run").begin()
    begun.close()
    recorded = json.loads(begun.run_dir.run.read_text())["git"]
    head = subprocess.run([*line, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert recorded == {"commit": head.stdout.strip(), "dirty": False}


def test_a_package_that_is_missing_is_said_before_anything_is_made(
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
        "error: --tensorboard needs the tensorboard package: pip install pipeworker[tensorboard]\n",
    )
    assert not run.exists()
