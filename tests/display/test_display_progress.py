"""The progress of a job in a process that does not run it."""

from __future__ import annotations

import time

import pytest

from pipeworker.display.progress import JobProgress
from pipeworker.display.style import Style
from pipeworker.facts.step import StepResult


def row(step: int) -> StepResult:
    return StepResult(step, 1.0, 4, 0.1, 40.0, 1.0, 0.1, 0.25, 0)


def test_a_recovery_begins_at_the_last_step_that_was_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each generation of workers has its plan, which names the first step of the command."""
    progress = JobProgress(Style(), notebook=False)
    progress.plan(9, 3)
    progress.step(row(3))
    progress.plan(9, 3)
    first, _, again = capsys.readouterr().out.splitlines()
    assert (first, again) == ("step 2/9  starting", "step 3/9  starting")


def test_lines_are_a_second_apart_and_the_last_step_has_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = JobProgress(Style(), notebook=False)
    progress.plan(None, 1)
    for step in (1, 2, 3, 4):
        progress.step(row(step))
        now += 0.5
    progress.close()
    progress.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[0] for line in lines] == [
        *("step 0", "step 1", "step 3", "step 4")
    ]
