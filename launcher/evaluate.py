"""The command ``evaluate``: one evaluation pass of a checkpoint, which leaves its run as it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from launcher import local
from launcher.aside import run_aside, temporary_run
from launcher.command import JSON, RUN
from pipeworker.display.figures import evaluation_line
from pipeworker.display.text import strict
from pipeworker.errors import UnreadableFile, UsageError
from pipeworker.facts.step import Evaluation
from pipeworker.job.interval import END
from pipeworker.job.options import BEST, LOGGERS, Options
from pipeworker.record.checkpoint.folder import held
from pipeworker.record.checkpoint.manifest import MANIFEST, Manifest
from pipeworker.record.metrics import rows
from pipeworker.record.run_record import RunRecord, find_best_checkpoint
from pipeworker.record.rundir import RunDir, find_checkpoint
from pipeworker.runs.job_file import place_copy, recorded_job_file


@click.command()
@RUN
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--checkpoint",
    metavar="NAME",
    help="Its name, as step-00000100, its step, or a path. [default: the newest]",
)
@click.option("--best", is_flag=True, help="The checkpoint with the best evaluation.")
@click.option(
    "--stages",
    type=int,
    metavar="N",
    help="Pipeline stages; the figures are the same. [default: as trained]",
)
@JSON
def evaluate(
    run: Path,
    arguments: tuple[str, ...],
    checkpoint: str | None,
    stages: int | None,
    *,
    best: bool,
    as_json: bool,
) -> None:
    """Evaluate a checkpoint of RUN with the evaluation() and metrics() of its job file.

    The job file, its arguments and the options are those of the run; arguments after -- replace its
    own. Nothing in RUN changes. The job runs on this host.
    """
    record = RunRecord.read(RunDir(run))
    if record.is_of_script:
        raise UsageError(
            f"{run}: a script is the job of this run; in a script, use Pipeline(...).load() and "
            "evaluate()"
        )
    path = _find(run, checkpoint, best=best)
    with held(path), temporary_run() as place:
        manifest = Manifest.read(path / MANIFEST)
        manifest.check_files(path)
        job_file = _job_file(record, place.path.parent / "job")
        local.check_job_file(job_file)
        options = _options(record, job_file, stages, arguments)
        link = place.checkpoints.at(manifest.step)
        link.parent.mkdir(parents=True)
        link.symlink_to(path.resolve())
        options = replace(options, resume=str(link), resume_step=manifest.step)
        run_aside(options, place)
        row = rows.last(place.evaluation) or {}
    click.echo(json.dumps(strict(row)) if as_json else evaluation_line(Evaluation.of(row)))


def _find(run: Path, name: str | None, *, best: bool) -> Path:
    """Return the checkpoint that is asked for."""
    if best and name is not None:
        raise UsageError("--checkpoint and --best: they exclude each other; choose one")
    if best:
        return find_best_checkpoint(run)
    if name is None:
        return find_checkpoint(run)
    run_dir = RunDir(run)
    step = int(name) if name.isascii() and name.isdigit() and len(name) < 19 else -1
    for path in (run_dir.checkpoints.at(step), run_dir.checkpoints.path / name, Path(name)):
        if (path / MANIFEST).is_file():
            return path
    there = ", ".join(path.name for path in run_dir.checkpoints.paths()) or "none is there"
    raise UsageError(f"--checkpoint {name}: not a checkpoint of {run}; use one of: {there}")


def _options(
    record: RunRecord, job_file: Path, stages: int | None, arguments: tuple[str, ...]
) -> Options:
    """Return the options of the run, without those that only training has."""
    changed: dict[str, Any] = {
        "job_file": str(job_file),
        "evaluate_only": True,
        "replicas": 1,
        "shard_optimizer": False,
        "min_stages": None,
        "max_restarts": 0,
        "checkpoint_every": END,
        "best": BEST,
        "patience": None,
        "init_from": None,
        "init_strict": True,
        "csv": False,
        "tensorboard": False,
        **dict.fromkeys(LOGGERS),
        **({"arguments": arguments} if arguments else {}),
    }
    try:
        options = Options.of({**record.options, **changed})
    except UsageError as error:
        raise UnreadableFile(record.run_dir.run, error, "give another run") from None
    return options if stages is None else options.with_stages(stages)


def _job_file(record: RunRecord, folder: Path) -> Path:
    """Return the job file; if it has changed since, its copy, in a new folder like its own."""
    run = record.run_dir.path
    found = recorded_job_file(record, str(run), "restore one of them")
    if not found.missed:
        return found.path
    click.echo(f"note: {found.missed}; the copy in the run is used", err=True)
    return place_copy(found, folder)
