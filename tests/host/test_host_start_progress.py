"""Reports of how an agent progresses in its start."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeworker.host.start_progress import reported_progress
from pipeworker.timings import VARIABLE
from support.real_jobs.jobs import until

HANGS = """
import fcntl, os, sys
from pipeworker.host.start_progress import reported_progress

with reported_progress(lambda seconds: os.write(1, b"%f\\n" % seconds)):
    fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
"""
"""A start that waits for a lock of the system's, without releasing the interpreter's."""


def test_a_process_that_computes_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "0.05")
    reports = tmp_path / "reports"

    def report(seconds: float) -> None:
        with reports.open("a") as file:
            file.write(f"{seconds}\n")

    def values() -> list[float]:
        sum(range(100_000))
        return [float(text) for text in reports.read_text().split()] if reports.exists() else []

    with reported_progress(report):
        until(lambda: len({*values()}) >= 3)
    assert values() == sorted(values())
    count = len(values())
    time.sleep(0.2)
    assert len(values()) == count


def test_the_first_report_comes_before_the_start_can_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process first imports what may hang too, and reports after an interval."""
    monkeypatch.setenv(VARIABLE, "100")
    reports: list[float] = []
    with reported_progress(reports.append):
        assert len(reports) == 1
    assert reports[0] > 0


def test_the_stack_of_a_process_that_stands_still_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "0.05")
    lock = tmp_path / "lock"
    lock.touch()
    with lock.open() as held, (tmp_path / "errors").open("w") as errors:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [sys.executable, "-c", HANGS, str(lock)], stdout=subprocess.PIPE, stderr=errors
        )
        try:
            until(
                lambda: 'File "<string>", line 6 in <module>' in (tmp_path / "errors").read_text()
            )
        finally:
            process.kill()
            assert process.stdout is not None
            lines = process.stdout.read().split()  # until the reporting process has ended too
            process.wait()
    assert len({*lines[1:]}) == 1  # the first is measured more finely
