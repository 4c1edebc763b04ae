"""What is left of a run that ends before it has begun."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeworker.errors import RecordError
from pipeworker.record.metrics.rows import Rows
from pipeworker.session.begin import Asked
from pipeworker.wire.lines import Verdict

MISTAKE = Verdict("failed", 2, 0, 0.0, (), 0.0, "no", own=True)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_mistake_takes_away_no_steps_from_before_a_coordinator_died(
    tmp_path: Path, steps: int
) -> None:
    begun = Asked(str(tmp_path / "job.py"), 1, {}, tmp_path / "new" / "run").begin()
    rows = Rows(begun.run_dir.metrics)
    for step in range(steps):
        rows.add({"step": step + 1})
    rows.close()
    begun.close(MISTAKE)
    assert begun.run_dir.metrics.exists() == bool(steps)
    assert (tmp_path / "new").exists() == bool(steps)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_mistake_in_going_on_is_not_gone_on_with(tmp_path: Path, steps: int) -> None:
    """Unless it was another's, behind steps that were done with these options."""
    job, run_dir = str(tmp_path / "job.py"), tmp_path / "run"
    Asked(job, 1, {}, run_dir).begin().close()
    wrong = Asked(job, None, {"backend": "nccl"}, run_dir, resume=True).begin()
    assert wrong.options.backend == "nccl"
    rows = Rows(wrong.run_dir.metrics)
    for step in range(steps):
        rows.add({"step": step + 1})
    rows.close()
    wrong.close(MISTAKE)
    again = Asked(job, None, {}, run_dir, resume=True).begin()
    assert again.options.backend == ("nccl" if steps else "auto")
    record = again.run_dir.run.read_bytes()
    wrong.close(MISTAKE)
    assert again.run_dir.run.read_bytes() == record  # which is another's by now
    again.close()


def test_a_run_that_cannot_be_recorded_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file = tmp_path / "job.py"
    job_file.touch()

    def full(_: int) -> None:
        if any(tmp_path.rglob(".run.json.partial")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        Asked(str(job_file), 1, {}, tmp_path / "new" / "run").begin()
    assert [*tmp_path.iterdir()] == [job_file]
