"""A temporary run directory, which no process leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.aside import temporary_run
from pipeworker.record.lock import RunLock
from pipeworker.record.rundir import RunDir
from support.pages import ROOT
from support.real_jobs.jobs import processes_of, until

LAUNCHER = """
import sys
from launcher.aside import temporary_run

with temporary_run() as run_dir:
    print(run_dir.path, flush=True)
    sys.stdin.read()
"""


def test_a_temporary_run_is_removed_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with temporary_run() as run_dir:
        assert run_dir.path.is_dir()
        assert (run_dir.path.parent.stat().st_mode & 0o777) == 0o700
        (run_dir.path / "written").touch()
    assert not [*tmp_path.iterdir()]


def test_a_temporary_run_is_removed_once_its_launcher_is_killed_and_its_coordinator_ends(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        run_dir = RunDir(Path(launcher.stdout.readline().strip()))
        with RunLock(run_dir.lock, exclusive=False):  # as the coordinator does
            launcher.kill()
            launcher.wait()
            until(lambda: next(iter(processes_of(tmp_path).values())).startswith("remover\n"))
            assert run_dir.lock.exists()
        until(lambda: not processes_of(tmp_path))
        assert not [*folder.iterdir()]
