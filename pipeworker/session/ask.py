"""What may be asked of a job that runs, from outside."""

from __future__ import annotations

import time
from pathlib import Path

from pipeworker.errors import PipeworkerError, RecordError, UsageError
from pipeworker.record import lock
from pipeworker.record.rundir import RunDir

_POLL_SECONDS = 0.1


def for_checkpoint(path: Path) -> Path:
    """Have a job save at the end of its step, and go on; returns the new checkpoint.

    Raises:
        UsageError: no job runs there.
        PipeworkerError: the job ended, or its checkpoint failed.
    """
    run_dir = RunDir(path.resolve())
    if not lock.held(run_dir.lock):
        raise UsageError(f"no job runs in {path}")
    try:
        before = _newest(run_dir)
        run_dir.ask_for_checkpoint()
        while (found := _newest(run_dir)) == before:
            if not lock.held(run_dir.lock):
                run_dir.asked_for_checkpoint()
                found = _newest(run_dir)  # it may have been its last word
                if found == before:
                    raise PipeworkerError(f"the job in {path} ended without another checkpoint")
                break
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise RecordError(error.filename or path, error) from None
    assert found is not None
    return path / found.relative_to(run_dir.path)


def _newest(run_dir: RunDir) -> Path | None:
    saved = run_dir.saved()
    return saved[-1] if saved else None
