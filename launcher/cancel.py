"""``pipeworker cancel``: end a job, wherever it runs."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import click

from launcher.engines import kubernetes, slurm
from pipeworker.errors import RecordError, UsageError
from pipeworker.record import lock
from pipeworker.record.rundir import RunDir, listed

_POD = "KUBERNETES_SERVICE_HOST"
_POLL_SECONDS = 0.1


def cancel(run: str) -> str:
    """End the job of a run, which saves a checkpoint; return how it has ended, for the user.

    A job that runs is asked by a file, because all hosts of a job and its user have the run
    directory in common: wherever its launcher is. Clusters are asked about jobs that they have not
    started, or whose run directory is on a volume.

    Raises:
        UsageError: there is no job.
        PipeworkerError: a cluster does not answer.
    """
    path = Path(run)
    run_dir = RunDir(path.resolve())
    if run_dir.run.exists() and lock.is_locked(run_dir.lock):
        return _cancel_here(path, run_dir)
    if shutil.which("squeue") and (waiting := slurm.find(str(path.absolute()))):
        waiting.cancel()
        return f"job {waiting.job} of Slurm is cancelled"
    if shutil.which("kubectl") and (submitted := kubernetes.find(run)):
        submitted.cancel()
        return (
            f"{submitted.kind} {submitted.name} in namespace {submitted.namespace} is deleted; its "
            f"pods save a checkpoint in {submitted.run_dir}"
        )
    advice = listed(path) or "give the directory of a running job"
    raise UsageError(f"{run}: no job is running there; {advice}")


def _cancel_here(path: Path, run_dir: RunDir) -> str:
    """End the job that runs in a directory, and wait for its end."""
    if _POD in os.environ:
        raise UsageError(
            f"{path}: the cluster would start the pods again; run `pipeworker cancel` where "
            "kubectl is, or delete the job there"
        )
    try:
        run_dir.request_cancel()
        click.echo("the job saves a checkpoint at the end of its step, and ends", err=True)
        while lock.is_locked(run_dir.lock):
            time.sleep(_POLL_SECONDS)
        step = run_dir.last_checkpoint_step()
    except OSError as error:
        raise RecordError(error.filename or path, error) from None
    where = path / run_dir.checkpoint(step).relative_to(run_dir.path) if step >= 0 else None
    return f"{path}: the job has ended" + (f"; its last checkpoint is {where}" if where else "")
