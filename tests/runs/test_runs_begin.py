"""A run whose start fails leaves nothing of its own behind."""

from __future__ import annotations

import errno
import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeworker.errors import RecordError, UsageError
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.run_record import write_summary
from pipeworker.runs.begin import RunRequest
from pipeworker.wire.lines import Verdict
from support.checkpoints import complete

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


def test_a_mistake_leaves_a_resumed_run_as_it_was(tmp_path: Path) -> None:
    """A finished run stays done if it cannot be resumed with another job file."""
    job, run_dir = tmp_path / "job.py", tmp_path / "run"
    job.write_text("job = 1")
    first = RunRequest(str(job), 1, {}, run_dir).prepare()
    complete(first.run_dir, 4)
    with closing(Rows(first.run_dir.metrics)) as rows:
        rows.add({"step": 4})
    write_summary(first.run_dir, replace(MISTAKE, status="done", exit_status=0, steps=4), 1)
    first.run_dir.plan.write_text("plan")
    first.close()

    def content() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    before = content()
    job.write_text("job = 2")
    wrong = RunRequest(str(job), None, {}, run_dir, resume=True).prepare()
    assert (run_dir / "job-1.py").exists()
    wrong.run_dir.plan.write_text("another plan")
    mistake = replace(MISTAKE, steps=4, job_exited=False)
    write_summary(wrong.run_dir, mistake, 1)
    wrong.close(mistake)
    assert content() == before


def test_a_run_that_cannot_be_recorded_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_file = tmp_path / "job.py"
    job_file.touch()

    def full(_: int) -> None:
        if any(tmp_path.rglob(".*.partial")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match="No space left"):
        RunRequest(str(job_file), 1, {}, tmp_path / "new" / "run").prepare()
    assert [*tmp_path.iterdir()] == [job_file]


def test_a_directory_that_a_later_job_cannot_have_is_found_now(tmp_path: Path) -> None:
    """As when a job is submitted that begins when the cluster has room."""
    job, run_dir = str(tmp_path / "job.py"), tmp_path / "run"
    new = RunRequest(job, 2, {}, run_dir)
    new.check_directory()
    assert not run_dir.exists()
    replace(new, auto_resume=True).check_directory()
    replace(new, run_dir=None).check_directory()
    run_dir.mkdir()
    for request in (new, replace(new, auto_resume=True)):
        with pytest.raises(UsageError, match="exists already; choose another --run-dir"):
            request.check_directory()
    with pytest.raises(UsageError, match="not the directory of a run"):
        replace(new, resume=True).check_directory()
    run_dir.rmdir()
    new.prepare().close()
    replace(new, auto_resume=True).check_directory()
    other = replace(new, options={"seed": 7}, auto_resume=True)
    with pytest.raises(UsageError, match="--seed"):
        other.check_directory()
