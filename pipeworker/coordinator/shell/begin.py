"""Where a job goes on, read from what is there when its coordinator starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipeworker.coordinator.job import Start
from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.job.options import Options
from pipeworker.record.manifest import NAME, Manifest
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Configuration
from pipeworker.wire.messages.checkpoint import Restore


def start(configuration: Configuration, options: Options, run_dir: RunDir) -> Start:
    """Where the job goes on: by what the coordinator before this one left, or by a checkpoint.

    Raises:
        UsageError: that cannot be read.
        OSError: the system does not let it be read.
    """
    start = Start(causes=configuration.causes)
    saved = run_dir.last_saved() if configuration.causes else -1
    begins = options.resume
    if saved > options.resume_step:  # the one that the run began with may be gone by now
        begins = str(run_dir.checkpoint(saved))
    if begins:
        mark, restore, layers = _on_disk(begins, options)
        step = mark.step
        start = dataclasses.replace(
            start,
            mark=mark,
            restore=restore,
            layers=layers,
            recorded=step,
            evaluated=step,
            saved=step,
        )
    if not configuration.causes:
        return start
    recorded = _last_step(run_dir.metrics)
    snapshot = configuration.snapshot
    if snapshot and snapshot.step <= recorded:  # rows may have waited for room on a disk
        scaler = Scaler(snapshot.scale, snapshot.good_steps) if snapshot.scale else None
        memory = Restore(snapshot.step, slot=snapshot.slot, ranks=snapshot.ranks)
        start = dataclasses.replace(start, snapshot=(Mark(snapshot.step, scaler), memory))
    return dataclasses.replace(
        start,
        recorded=recorded,
        evaluated=_last_step(run_dir.evaluation),
        saved=saved,
    )


def _last_step(path: Path) -> int:
    """Of the last whole row of a file; 0 where there is none."""
    return int((rows.last(path) or {}).get("step", 0))


def _on_disk(path: str, options: Options) -> tuple[Mark, Restore, tuple[str, ...]]:
    """A checkpoint to go on from, and the names of its layers."""
    found = Manifest.read(Path(path) / NAME)
    scaler = Scaler(**found.scaler) if found.scaler and options.precision == "fp16" else None
    return Mark(found.step, scaler), Restore(found.step, path), found.layers
