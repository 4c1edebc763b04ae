"""A run whose start fails leaves nothing of its own behind."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import cli
from pipeworker.errors import InUse, PipeworkerError, RecordError, UsageError
from pipeworker.facts.criterion import Criterion
from pipeworker.record import run_record
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.run_record import RunRecord, write_summary
from pipeworker.record.rundir import RunDir
from pipeworker.runs.begin import RunRequest
from pipeworker.wire.lines import Verdict
from support.in_process.checkpoints import complete

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


@pytest.mark.parametrize("began", [False, True])
def test_a_job_that_never_began_leaves_no_run(tmp_path: Path, began: bool) -> None:
    run = RunRequest(str(tmp_path / "job.py"), 1, {}, tmp_path / "new" / "run").prepare()
    run.close(replace(MISTAKE, exit_status=1, job_exited=False), began=began)
    assert (tmp_path / "new").exists() == began


@pytest.mark.parametrize(
    ("now", "warns"), [(["launch"], True), (["launch", "--hosts=b:2"], False), ([], True)]
)
def test_a_resume_warns_of_hosts_that_are_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, now: list[str], warns: bool
) -> None:
    job, run_dir = str(tmp_path / "job.py"), tmp_path / "run"
    first = ["pipeworker", "launch", "--hosts", "a:1,b:1", "--sync", "job.py", "--", "--hosts", "x"]
    monkeypatch.setattr("sys.argv", first)
    RunRequest(job, 2, {}, run_dir).prepare().close()
    monkeypatch.setattr("sys.argv", ["pipeworker", *now])
    again = RunRequest(job, None, {}, run_dir, resume=True).prepare()
    again.close()
    text = "was last started with --hosts a:1,b:1 --sync, which is not recorded as an option"
    assert any(text in warning for warning in again.warnings) is warns


def test_a_resume_makes_a_removed_folder_of_logs_again(tmp_path: Path) -> None:
    job, run_dir = str(tmp_path / "job.py"), RunDir(tmp_path / "run")
    RunRequest(job, 1, {}, run_dir.path).prepare().close()
    run_dir.logs.rmdir()
    RunRequest(job, None, {}, run_dir.path, resume=True).prepare().close()
    assert run_dir.logs.is_dir()


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


@pytest.mark.parametrize("done", [True, False])
def test_a_run_that_was_done_keeps_its_figures_unless_it_trains(tmp_path: Path, done: bool) -> None:
    job, run_dir = str(tmp_path / "job.py"), RunDir(tmp_path / "run")
    Path(job).write_text("")
    RunRequest(job, 1, {"steps": 2}, run_dir.path).prepare().close()
    complete(run_dir, 2)
    status = "done" if done else "interrupted"
    write_summary(run_dir, Verdict(status, 0, 2, 7.5, (1000,), 0.25, None), 1)
    before = [path.read_text() for path in (run_dir.summary, run_dir.run)]
    again = RunRequest(job, None, {}, run_dir.path, resume=True).prepare()
    verdict = Verdict("done", 0, 2, 0.5, (0,), 0.0, None)
    write_summary(run_dir, verdict, 1)
    again.close(verdict)
    after = [path.read_text() for path in (run_dir.summary, run_dir.run)]
    assert (after == before) is done


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


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (errno.ENOSPC, RecordError, "cannot be written: No space left on device$"),
        (errno.EROFS, UsageError, "Read-only file system; use a directory that you may write to$"),
    ],
)
def test_a_run_that_cannot_be_recorded_leaves_no_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[PipeworkerError],
    text: str,
) -> None:
    job_file = tmp_path / "job.py"
    job_file.touch()

    def full(_: int) -> None:
        if any(tmp_path.rglob(".*.partial")):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(kind, match=text):
        RunRequest(str(job_file), 1, {}, tmp_path / "new" / "run").prepare()
    assert [*tmp_path.iterdir()] == [job_file]


@pytest.mark.parametrize("auto_resume", [False, True])
def test_a_start_that_is_killed_before_the_record_does_not_prevent_the_next(
    tmp_path: Path, auto_resume: bool
) -> None:
    job_file, run_dir = tmp_path / "job.py", tmp_path / "run"
    job_file.write_text("job = 1")
    request = RunRequest(str(job_file), 1, {}, run_dir, auto_resume=auto_resume)
    child = multiprocessing.get_context("fork").Process(
        target=_killed_at_the_record, args=[request]
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert {path.name[-8:] for path in run_dir.iterdir()} == {".lock", "logs", ".partial"}
    request.prepare().close()
    assert (run_dir / "job.py").read_text() == "job = 1"
    assert RunRecord.read(RunDir(run_dir)).last["job"] == "job.py"


def _killed_at_the_record(request: RunRequest) -> None:
    os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
    request.prepare()


def test_a_resume_copies_the_job_file_of_a_start_that_was_killed_before_it(tmp_path: Path) -> None:
    job_file, run_dir = tmp_path / "job.py", tmp_path / "run"
    job_file.write_text("job = 1")
    request = RunRequest(str(job_file), 1, {}, run_dir, auto_resume=True)
    request.prepare().close()
    (run_dir / "job.py").unlink()
    request.prepare().close()
    last = RunRecord.read(RunDir(run_dir)).last
    assert (run_dir / last["job"]).read_text() == "job = 1"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_run_begins_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    job_file, write = tmp_path / "job.py", run_record.write
    job_file.touch()

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(number)
        write(*arguments)

    monkeypatch.setattr(run_record, "write", interrupted)
    words = ["launch", "--stages", "1", "--run-dir", str(tmp_path / "new" / "run"), str(job_file)]
    before = signal.signal(number, signal.default_int_handler)  # as the entry point does
    try:
        assert CliRunner().invoke(cli.main, words).exit_code == 130
    finally:
        signal.signal(number, before)
    assert [*tmp_path.iterdir()] == [job_file]


@pytest.mark.parametrize("has_record", [False, True])
def test_a_second_job_is_told_of_the_first(
    tmp_path: Path, has_record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = RunRequest(str(tmp_path / "job.py"), 1, {}, tmp_path / "run")
    request.prepare().close()
    if not has_record:
        (tmp_path / "run" / "run.json").unlink()
    monkeypatch.setattr("pipeworker.runs.begin.is_locked", lambda _: True)
    owner = f"process {os.getpid()} on {socket.gethostname()}" if has_record else "another process"
    for call in (request.prepare, request.check_directory):
        with pytest.raises(InUse, match=f"run: is in use: {owner} runs it; wait for its end"):
            call()


def test_a_directory_that_a_later_job_cannot_have_is_found_now(tmp_path: Path) -> None:
    """As when a job is submitted that begins when the cluster has room."""
    job, run_dir = str(tmp_path / "job.py"), tmp_path / "run"
    new = RunRequest(job, 2, {}, run_dir)
    new.check_directory()
    assert not run_dir.exists()
    replace(new, auto_resume=True).check_directory()
    replace(new, run_dir=None).check_directory()
    run_dir.mkdir()
    new.check_directory()
    (run_dir / "notes").touch()
    for request in (new, replace(new, auto_resume=True)):
        with pytest.raises(UsageError, match="exists already and is no run; choose another"):
            request.check_directory()
    with pytest.raises(UsageError, match="not the directory of a run"):
        replace(new, resume=True).check_directory()
    (run_dir / "notes").unlink()
    new.prepare().close()
    replace(new, auto_resume=True).check_directory()
    other = replace(new, options={"seed": 7}, auto_resume=True)
    with pytest.raises(UsageError, match="--seed"):
        other.check_directory()


def test_weights_of_a_run_are_those_of_the_checkpoint_that_it_had_at_the_start(
    tmp_path: Path,
) -> None:
    """A run that is still running writes newer ones, and removes this one no earlier."""
    source, run_dir = RunDir(tmp_path / "source"), tmp_path / "run"
    job, given = str(tmp_path / "job.py"), {"init_from": str(source.path)}
    chosen = str(complete(source, 1))
    run = RunRequest(job, 1, given, run_dir).prepare()
    assert run.options.init_from == chosen
    for step in (2, 3):
        complete(source, step)
    source.checkpoints.prune(1, Criterion.parse("loss"))
    assert source.checkpoints.steps() == [1, 3]
    run.close()
    for again in ({}, given):
        run = RunRequest(job, None, again, run_dir, resume=True).prepare()
        assert run.options.init_from == chosen
        source.checkpoints.prune(1, Criterion.parse("loss"))
        assert source.checkpoints.steps() == [1, 3]  # the run begins with it again
        run.close()
    other = {"init_from": str(complete(source, 4))}
    with pytest.raises(UsageError, match="would continue with other numbers, by --init-from"):
        RunRequest(job, None, other, run_dir, resume=True).prepare()
