"""The command line in a folder with a job file, whose jobs are recorded and not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import cli
from pipeworker.display.style import Style
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.runs.begin import PreparedRun

NEW = ("--stages", "2", "job.py")
RESUME = ("--resume", "--run-dir", "run", "job.py")


class Command:
    """The command line in a folder with a job file; jobs are recorded, not run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.job_file = folder / "job.py"
        self.job_file.write_text("job = 1\n")
        self.run = RunDir(folder / "run")
        self.prepared: list[tuple[Options, RunDir, tuple[str, ...]]] = []

    def __call__(self, *words: str, command: click.Command = cli.main) -> Result:
        line = ["launch", *words] if command is cli.main else list(words)
        return CliRunner().invoke(command, line)

    def launch(self, *words: str) -> Options:
        """Launch or resume the run; return its options."""
        before = len(self.prepared)
        result = self("--run-dir", "run", *words)
        assert result.exit_code == 0, result.output
        ((options, run_dir, _),) = self.prepared[before:]
        assert run_dir.path == self.run.path
        return options

    def refused(self, *words: str) -> str:
        """Return the error of a command that begins and changes nothing."""
        before, content = len(self.prepared), self.content()
        result = self(*words)
        assert result.exit_code == 2, result.output
        assert result.output.startswith("error: ")
        assert (len(self.prepared), self.content()) == (before, content)
        return result.output.removeprefix("error: ")

    @property
    def warnings(self) -> list[str]:
        """The warnings of the latest start."""
        return list(self.prepared[-1][2])

    @property
    def record(self) -> dict[str, Any]:
        return dict(json.loads(self.run.run.read_text()))

    def content(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


def command_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    made = Command(tmp_path.resolve())

    def run(prepared: PreparedRun, view: Style, agents: object) -> int:
        made.prepared.append((prepared.options, prepared.run_dir, prepared.warnings))
        prepared.close()
        return 0

    monkeypatch.setattr("launcher.local.run", run)
    return made
