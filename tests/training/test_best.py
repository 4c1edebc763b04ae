"""The best weights of a run: kept, named at its end, exported, and found again after a resume."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import cli
from pipeworker.record.checkpoint.checkpoint import Checkpoint
from support.real_jobs.compare import plain_loop
from support.real_jobs.jobs import Jobs
from support.real_jobs.sources import JOB
from support.slow import slow

SOURCE = (
    JOB.replace("lr=0.1", "lr=0.01")
    + """
    def evaluation():
        return list(data())[:2]

    def metrics(output, target):
        return {"accuracy": (output.argmax(1) == target).float().mean()}
"""
)
WORDS = ("--stages", "1", "--microbatches", "2")


def check(run: Path, last: int) -> Path:
    """Check that the checkpoints are those of the last step and of the best; return the latter."""
    rows = map(json.loads, (run / "evaluation.jsonl").read_text().splitlines())
    losses = {row["step"]: row["loss"] for row in rows}
    best = max(losses, key=lambda step: losses[step])
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == [f"step-{step:08d}" for step in sorted({best, last})]
    entry = json.loads((run / "summary.json").read_text())["best"]
    path = f"checkpoints/step-{best:08d}"
    assert entry == {"step": best, "name": "loss", "value": losses[best], "path": path}
    assert best < last
    return run / path


def test_the_best_weights_of_a_run_and_of_its_resume(jobs: Jobs, tmp_path: Path) -> None:
    words = (*WORDS, "--evaluate-every", "1", "--best", "max:loss", "--keep", "1")
    run = jobs.train(*words, "--steps", "4", source=SOURCE)
    best = check(run.path, 4)
    assert f"best weights: {best}, after step {int(best.name[5:])}" in run.stdout
    out = tmp_path / "best.safetensors"
    done = CliRunner().invoke(cli.main, ["export", "--best", str(run.path), str(out)])
    assert done.exit_code == 0, done.output
    weights, expected = load_file(out), Checkpoint(best).weights()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    more = ("launch", "--resume", "--run-dir", str(run.path), "--steps", "6", "job.py")
    assert jobs.pipeworker(*more).returncode == 0
    check(run.path, 6)
    _, plain, _ = plain_loop(jobs.folder / "job.py", microbatches=2, steps=6)
    weights = Checkpoint(run.path / "checkpoints" / "step-00000006").weights()
    assert all(torch.equal(weights[name], plain[name]) for name in weights)


@slow
def test_a_job_that_ends_early_continues_with_more_patience(jobs: Jobs, tmp_path: Path) -> None:
    """Its initial weights are the best, because the loss falls."""
    words = (*WORDS, "--evaluate-first", "--evaluate-every", "2", "--best", "max:loss")
    run = jobs.train(*words, "--steps", "99", "--patience", "2", source=SOURCE)
    text = "2 evaluations without a better loss than that of step 0 (--patience 2)"
    assert f"done: 4 steps in {run.summary['seconds']:.1f} s\nstopped early: {text}" in run.stdout
    assert run.summary["stopped_early"] == text
    assert re.search(r"train further: .* --patience 4 ", run.stdout)
    assert run.summary["best"]["path"] == "checkpoints/step-00000000"
    more = ("launch", "--resume", "--run-dir", str(run.path), "job.py")
    again = jobs.pipeworker(*more)
    assert "--patience 2 is used up, by 2 evaluations without a better one" in again.stderr
    assert "done: 4 steps, 0 of them now" in again.stdout
    assert jobs.pipeworker(*more[:-1], "--patience", "3", "job.py").returncode == 0
    assert [row["step"] for row in run.evaluations] == [0, 2, 4, 6]
    plain = jobs.train(*WORDS, "--steps", "6", source=SOURCE)
    weights = Checkpoint(run.path / "checkpoints" / "step-00000006").weights()
    assert all(torch.equal(weights[name], plain.weights[name]) for name in weights)
    first = Checkpoint(run.path / "checkpoints" / "step-00000000").weights()
    started = jobs.train(*WORDS, "--steps", "1", source=SOURCE.replace("lr=0.01", "lr=0.0"))
    assert all(torch.equal(first[name], started.weights[name]) for name in first)


@slow
def test_several_evaluation_sets(jobs: Jobs) -> None:
    """The first one drives the scheduler, so the weights are those of a job with it alone."""
    scheduled = (
        SOURCE
        + """
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, threshold=10.0, threshold_mode="abs"
        )
"""
    )
    sets = scheduled.replace(
        "return list(data())[:2]", "return {'val': list(data())[:2], 'test': list(data())[3:]}"
    )
    words = ("--microbatches", "4", "--steps", "4", "--evaluate-every", "1")
    alone = jobs.train("--stages", "1", *words, source=scheduled)
    kept = ("--best", "max:test/accuracy")
    runs = [jobs.train("--stages", k, *words, *kept, source=sets) for k in ("1", "3")]
    found = [(run.path / "evaluation.jsonl").read_text() for run in runs]
    assert found[0] == found[1]
    rows = runs[0].evaluations
    for row, expected in zip(rows, alone.evaluations, strict=True):
        assert row["loss"] == row["val/loss"] == expected["loss"] != row["test/loss"]
        assert row["val/accuracy"] == expected["accuracy"]
    weights = alone.weights
    assert all(torch.equal(weights[name], runs[1].weights[name]) for name in weights)
    best = max(rows, key=lambda row: float(row["test/accuracy"]))
    assert runs[1].summary["best"]["name"] == "test/accuracy"
    assert runs[1].summary["best"]["step"] == best["step"]


def test_a_wrong_source_of_the_best_weights_is_named(jobs: Jobs, tmp_path: Path) -> None:
    def refused(source: Path) -> str:
        words = ["export", "--best", str(source), str(tmp_path / "x.pt")]
        return str(CliRunner().invoke(cli.main, words).output)

    assert f"{tmp_path}: not the directory of a run" in refused(tmp_path)
    run = jobs.train(*WORDS, "--steps", "1").path
    assert f"--best: {run} has no checkpoint with an evaluation" in refused(run)
    path = run / "checkpoints" / "step-00000001"
    assert f"--best: {path} is a checkpoint; give the directory of its run" in refused(path)


@slow
def test_a_scheduler_follows_the_figure_of_the_best(jobs: Jobs) -> None:
    """Its figure never grows here, so each evaluation after the first one halves the rate."""
    scheduled = (
        SOURCE.replace("output.argmax(1) == target", "output.argmax(1) == -1")
        + """
    def scheduler(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, "max", factor=0.5, patience=0
        )
"""
    )
    words = (*WORDS, "--steps", "4", "--evaluate-every", "1", "--best", "max:accuracy")
    run = jobs.train(*words, source=scheduled)
    assert [row["accuracy"] for row in run.evaluations] == [0.0] * 4
    assert [row["lr"] for row in run.metrics] == [0.01, 0.01, 0.005, 0.0025]
