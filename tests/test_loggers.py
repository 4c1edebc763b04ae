"""The job files of the page on hooks that log to other packages, where these are installed."""

from __future__ import annotations

import importlib.util

import pytest

from support.jobs import Jobs
from support.pages import DOCS, Write, actions

PAGE = DOCS / "howto" / "hooks.md"


def logged(jobs: Jobs, package: str, *words: str) -> None:
    """Run the page's job file for a package, without its hooks' warnings."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install '.[loggers]'")
    for act in actions(PAGE.read_text()):
        if isinstance(act, Write):
            jobs.write(act.text, act.name)
    launch = (
        "launch",
        "--stages",
        "2",
        "--steps",
        "4",
        "--evaluate-every",
        "2",
        "--run-dir",
        "run",
    )
    done = jobs.pipeworker(*launch, f"with_{package}.py", *words)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr, (jobs.folder / "run/logs/hooks.log").read_text()


def test_wandb_offline(jobs: Jobs) -> None:
    logged(jobs, "wandb", "--", "first")
    (file,) = jobs.folder.glob("wandb/offline-run-*-first/run-first.wandb")
    assert b"evaluation/loss" in file.read_bytes()


def test_mlflow_in_a_folder(jobs: Jobs) -> None:
    logged(jobs, "mlflow")
    (run,) = [path.parent for path in jobs.folder.glob("mlruns/*/*/metrics")]
    rows = (run / "metrics" / "loss").read_text().splitlines()
    assert [row.split()[2] for row in rows] == ["1", "2", "3", "4"]
    rows = (run / "metrics" / "evaluation_loss").read_text().splitlines()
    assert [row.split()[2] for row in rows] == ["2", "4"]
    assert (run / "artifacts" / "step-00000004" / "manifest.json").exists()
    assert "status: 3" in (run / "meta.yaml").read_text()  # finished
