"""The command ``launch`` in a folder with a job file; jobs are not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import cli
from pipeworker.job.options import Options

Launch = Callable[..., Options]


def run(*words: str, command: click.Command = cli.main) -> Result:
    return CliRunner().invoke(command, words, prog_name="pipeworker")


def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Return a function that runs `launch`, and returns the options of the job."""
    monkeypatch.chdir(tmp_path)
    Path("jobs").mkdir()
    Path("jobs/job.py").touch()
    started: list[Options] = []
    monkeypatch.setattr("launcher.local.run", lambda it, *_: started.append(it.options))

    def launch(*words: str) -> Options:
        result = run("launch", *words, "jobs/job.py")
        assert result.exit_code == 0, result.output
        return started[-1]

    return launch


def refused(*words: str) -> str:
    result = run("launch", "--stages", "2", *words, "jobs/job.py")
    assert result.exit_code == 2
    assert not Path("runs").exists()
    return result.output.removeprefix("error: ").rstrip()


def project(text: str) -> None:
    Path("pyproject.toml").write_text(f"[tool.other]\nx = 1\n\n[tool.pipeworker]\n{text}\n")
