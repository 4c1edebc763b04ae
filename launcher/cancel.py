"""``pipeworker cancel``: end a job, wherever it runs."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import click

from launcher.engines import kubernetes, slurm
from launcher.engines.engine import SubmittedJob
from pipeworker.environment import POD
from pipeworker.errors import PipeworkerError, RecordError, UsageError
from pipeworker.record import lock
from pipeworker.record.rundir import Request, RunDir, listed

_POLL_SECONDS = 0.1
_FINDERS: dict[str, Callable[[str], SubmittedJob | None]] = {
    "squeue": slurm.find,
    "kubectl": kubernetes.find,
}
"""By a cluster's client program, the function that finds the job of a run."""


def cancel(run: str) -> str:
    """End the job of a run, which saves a checkpoint; return how it has ended, for the user.

    A job that runs is asked by a file, because all hosts of a job and its user have the run
    directory in common: wherever its launcher is. Clusters are asked about jobs that they have not
    started, or whose run directory is on a volume.

    Raises:
        UsageError: there is no job.
        PipeworkerError: a cluster does not end it.
    """
    path = Path(run)
    run_dir = RunDir(Path(os.path.realpath(path)))  # resolve() raises for a link to itself
    if run_dir.run.exists() and lock.is_locked(run_dir.lock):
        return _cancel_here(path, run_dir)
    unasked: list[str] = []
    for program, find in _FINDERS.items():
        try:
            if shutil.which(program) and (job := find(run)):
                return job.cancel()
        except PipeworkerError as error:  # it may be installed here, and not set up
            unasked.append(str(error).rpartition("\n")[2])
    advice = listed(path) or "give the directory of a running job"
    # Their errors say nothing about a job that ran here.
    more = f" ({'; '.join(unasked)})" if unasked and not run_dir.run.exists() else ""
    raise UsageError(f"{run}: no job is running there; {advice}{more}")


def _cancel_here(path: Path, run_dir: RunDir) -> str:
    """End the job that runs in a directory, and wait for its end."""
    if POD in os.environ:
        raise UsageError(
            f"{path}: the cluster would start the pods again; run `pipeworker cancel` where "
            "kubectl is, or delete the job there"
        )
    try:
        run_dir.request(Request.CANCEL)
        click.echo("the job saves a checkpoint at the end of its step, and ends", err=True)
        while lock.is_locked(run_dir.lock):
            time.sleep(_POLL_SECONDS)
        step = run_dir.checkpoints.last_step()
    except OSError as error:
        raise RecordError(error.filename or path, error) from None
    where = path / run_dir.checkpoints.at(step).relative_to(run_dir.path) if step >= 0 else None
    return f"{path}: the job has ended" + (f"; its last checkpoint is {where}" if where else "")
