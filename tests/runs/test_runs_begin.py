"""A run whose start fails leaves nothing of its own behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pipeworker.errors import RecordError
from pipeworker.record.metrics.rows import Rows
from pipeworker.runs.begin import RunRequest
from pipeworker.wire.lines import Verdict

MISTAKE = Verdict("failed", 2, 0, 0.0, (), 0.0, "no", job_exited=True)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_mistake_removes_a_new_run_unless_it_has_steps(tmp_path: Path, steps: int) -> None:
    run = RunRequest(str(tmp_path / "job.py"), 1, {}, tmp_path / "new" / "run").prepare()
    rows = Rows(run.run_dir.metrics)
    for step in range(steps):
        rows.add({"step": step + 1})
    rows.close()
    run.close(MISTAKE)
    assert run.run_dir.metrics.exists() == bool(steps)
    assert (tmp_path / "new").exists() == bool(steps)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_mistake_restores_the_options_of_a_resumed_run(tmp_path: Path, steps: int) -> None:
    """Once steps were done with the new options, these stay."""
    job, run_dir = str(tmp_path / "job.py"), tmp_path / "run"
    RunRequest(job, 1, {}, run_dir).prepare().close()
    wrong = RunRequest(job, None, {"backend": "nccl"}, run_dir, resume=True).prepare()
    assert wrong.options.backend == "nccl"
    rows = Rows(wrong.run_dir.metrics)
    for step in range(steps):
        rows.add({"step": step + 1})
    rows.close()
    wrong.close(MISTAKE)
    again = RunRequest(job, None, {}, run_dir, resume=True).prepare()
    assert again.options.backend == ("nccl" if steps else "auto")
    record = again.run_dir.run.read_bytes()
    wrong.close(MISTAKE)
    assert again.run_dir.run.read_bytes() == record  # another process owns it now
    again.close()


def test_a_run_that_cannot_be_recorded_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file = tmp_path / "job.py"
    job_file.touch()

    def full(_: int) -> None:
        if any(tmp_path.rglob(".run.json.partial")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        RunRequest(str(job_file), 1, {}, tmp_path / "new" / "run").prepare()
    assert [*tmp_path.iterdir()] == [job_file]
