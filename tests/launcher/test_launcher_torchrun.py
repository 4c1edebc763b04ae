"""Tests of a torchrun rank's error file."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from launcher.torchrun import write_error
from support.jobs import until


def test_torchrun_never_reads_half_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torchrun reads the file once it has terminated the rank, which may be in the middle of it."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    message = "stage 1: " + 30_000_000 * "x"
    writer = threading.Thread(target=write_error, args=(message,))
    writer.start()
    until(path.exists)
    size = path.stat().st_size
    writer.join()
    assert size == path.stat().st_size
    assert json.loads(path.read_text())["message"]["message"] == message
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_error_of_a_rank_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    write_error("the first")
    write_error("a later one")
    assert json.loads(path.read_text())["message"]["message"] == "the first"
