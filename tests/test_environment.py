"""The versions of a process, and the git commit of a job file's folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

from pipeworker.environment import git, torch_version


def test_the_version_of_torch_is_its_own() -> None:
    assert torch_version() == str(torch.__version__)


def test_the_version_of_torch_names_the_build_where_the_metadata_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in (
        ("torch/__init__.py", "raise AssertionError('torch is imported')"),
        ("torch/version.py", "__version__ = '2.13.0+cu130'"),
        ("torch-2.13.0.dist-info/METADATA", "Name: torch\nVersion: 2.13.0\n"),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version("torch") == "2.13.0"
    assert torch_version() == "2.13.0+cu130"


def test_the_version_of_a_torch_that_is_not_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_version() is None


def test_another_module_with_the_name_of_torch_has_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").touch()
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.syspath_prepend(tmp_path)
    assert torch_version() is None


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a job file outside of any repository."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    found = tmp_path / "job.py"
    found.write_text("1")
    return found


@pytest.fixture
def commit(job_file: Path) -> str:
    """Commit the job file and a file beside it."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    (job_file.parent / "neighbour.py").touch()
    made(job_file, "init", "--quiet")
    made(job_file, "add", ".")
    identity = ("-c", "user.name=x", "-c", "user.email=x", "-c", "commit.gpgsign=false")
    made(job_file, *identity, "commit", "--quiet", "--message", "x")
    return made(job_file, "rev-parse", "HEAD")


def made(job_file: Path, *words: str) -> str:
    line = ["git", "-C", str(job_file.parent), *words]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_and_whether_files_differ_from_it(job_file: Path, commit: str) -> None:
    assert git(job_file) == {"commit": commit, "dirty": False}
    (job_file.parent / "runs").mkdir()
    (job_file.parent / "runs" / "run.json").touch()  # what git does not know is not the job's
    assert git(job_file) == {"commit": commit, "dirty": False}
    other = job_file.with_name("other.py")
    other.touch()
    assert git(other) == {"commit": commit, "dirty": True}  # but for the job file itself
    (job_file.parent / "neighbour.py").write_text("changed")
    assert git(job_file) == {"commit": commit, "dirty": True}


def test_a_repository_named_by_the_environment_is_ignored(
    job_file: Path, commit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))
    assert git(job_file) == {"commit": commit, "dirty": False}


def test_no_repository_no_commit_no_folder(job_file: Path) -> None:
    assert git(job_file) == {}
    assert git(job_file / "none" / "job.py") == {}
    if shutil.which("git") is not None:
        made(job_file, "init", "--quiet")
        assert git(job_file) == {}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, {}),
        ("exit 1", {}),
        ("exec sleep 60", {}),
        ('case "$*" in *rev-parse*) echo c0ffee;; *) exec sleep 60;; esac', None),
        ('case "$*" in *rev-parse*) echo c0ffee;; *) exit 1;; esac', None),
    ],
)
def test_a_missing_or_slow_git_neither_fails_nor_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, expected: object
) -> None:
    if script is not None:
        (tmp_path / "git").write_text(f"#!/bin/sh\nPATH=/bin:/usr/bin\n{script}\n")
        (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    started = time.monotonic()
    found = git(tmp_path / "job.py", seconds=0.2)
    assert found == ({"commit": "c0ffee", "dirty": None} if expected is None else expected)
    assert time.monotonic() - started < 30
