"""The request for a checkpoint, for a run directory that another process has locked."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from pipeworker.errors import PipeworkerError
from pipeworker.record.lock import RunLock
from pipeworker.record.run_record import write_summary
from pipeworker.record.rundir import Request, RunDir
from pipeworker.runs.checkpoint_request import request_checkpoint
from pipeworker.wire.lines import Verdict
from support.in_process.checkpoints import complete
from support.real_jobs.jobs import until

DONE = Verdict("done", 0, 4, 2.5, (1,), 0.25, None)


def _run_hooks(path: Path, locked: Event) -> None:
    """Hold the lock until a checkpoint is requested, as a job does that has no more steps."""
    run_dir = RunDir(path)
    with RunLock(run_dir.lock, exclusive=False):
        locked.set()
        until(lambda: run_dir.requested(Request.CHECKPOINT))


@contextmanager
def in_last_hooks(path: Path) -> Iterator[None]:
    context = multiprocessing.get_context("fork")
    locked = context.Event()
    process = context.Process(target=_run_hooks, args=(path, locked))
    process.start()
    try:
        assert locked.wait(60)
        yield
    finally:
        process.kill()
        process.join()


def test_a_job_in_its_last_hooks_has_saved_already(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    saved = complete(run_dir, 4)
    write_summary(run_dir, DONE, 1)
    with in_last_hooks(tmp_path):
        assert request_checkpoint(tmp_path) == saved
    assert not run_dir.requested(Request.CHECKPOINT)


@pytest.mark.parametrize("ended", [True, False])
def test_a_job_that_ends_without_its_last_step_has_not_saved(tmp_path: Path, ended: bool) -> None:
    run_dir = RunDir(tmp_path)
    complete(run_dir, 3)
    if ended:
        write_summary(run_dir, DONE, 1)
    with in_last_hooks(tmp_path), pytest.raises(PipeworkerError, match="without writing another"):
        request_checkpoint(tmp_path)
