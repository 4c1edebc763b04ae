"""``pipeworker checkpoint``: have a running job save."""

from __future__ import annotations

import time
from pathlib import Path

from pipeworker.errors import PipeworkerError, RecordError
from pipeworker.record import lock
from pipeworker.record.run_record import read_summary
from pipeworker.record.rundir import Request, running

_POLL_SECONDS = 0.1


def request_checkpoint(path: Path) -> Path:
    """Have a running job save at the end of its step; return the path of the checkpoint.

    A job that has done its last step, and still runs its hooks, has saved already.

    Raises:
        UsageError: no job is running in the directory, or its summary is damaged.
        PipeworkerError: the job ended, or its checkpoint failed.
    """
    run_dir = running(path)
    try:
        before = run_dir.checkpoints.last_step()
        run_dir.request(Request.CHECKPOINT)
        runs = True
        while (found := run_dir.checkpoints.last_step()) == before:
            if not runs:  # it did not save at its end either
                run_dir.withdraw(Request.CHECKPOINT)
                if read_summary(run_dir).get("steps") == found:
                    break  # it had saved its last step before the request
                raise PipeworkerError(f"{path}: the job ended without writing another checkpoint")
            time.sleep(_POLL_SECONDS)
            runs = lock.is_locked(run_dir.lock)
    except OSError as error:
        raise RecordError(error.filename or path, error) from None
    return path / run_dir.checkpoints.at(found).relative_to(run_dir.path)
