"""The point at which a run resumes, and the removal of everything after it. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeworker.errors import UnreadableFile, UsageError, reading
from pipeworker.plan.figures import plural
from pipeworker.record.checkpoint.folder import unused
from pipeworker.record.checkpoint.manifest import MANIFEST, Manifest
from pipeworker.record.files.atomic_file import sync_file, temporary_path
from pipeworker.record.files.bounded_file import LACKS_DESCRIPTORS
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The newest intact checkpoint of a run, and newer ones that are damaged, with the reason.

    The `path` is None if no checkpoint is complete yet: the run starts again from its first step.
    """

    path: Path | None = None
    step: int = 0
    damaged: Mapping[Path, str] = field(default_factory=dict)


def find_resume_point(run_dir: RunDir) -> ResumePoint:
    """Check the checkpoints of a run, the newest first, until one is intact.

    Raises:
        UsageError: all are damaged, or they cannot be read.
    """
    damaged: dict[Path, str] = {}
    with reading(run_dir.checkpoints.path):
        run_dir.checkpoints.restore_replaced()
        saved = run_dir.checkpoints.paths()
    for path in reversed(saved):
        try:
            manifest = Manifest.read(path / MANIFEST)
            if path != run_dir.checkpoints.at(manifest.step):
                raise UnreadableFile(path, f"its manifest is of step {manifest.step}")
            manifest.check_files(path)
            return ResumePoint(path, manifest.step, damaged)
        except UsageError as error:
            damaged[path] = str(error)
        except OSError as error:
            if error.errno in LACKS_DESCRIPTORS:
                raise UnreadableFile(path, error) from None
            damaged[path] = str(UnreadableFile(path, error))
    if damaged:
        shown = "".join(f"\n  {path.name}: {why}" for path, why in damaged.items())
        raise UsageError(
            f"{run_dir.checkpoints.path}: every checkpoint is damaged; restore one:{shown}"
        )
    return ResumePoint()


def roll_back(run_dir: RunDir, point: ResumePoint) -> list[str]:
    """Remove the records of later steps, which will be written again; return warnings.

    Damaged checkpoints are renamed, not removed: the run will use their names again.
    """
    for path in point.damaged:
        path.rename(unused(path.with_name(f"damaged-{path.name}")))
    run_dir.checkpoints.remove_leftovers()
    run_dir.remove_partial_files()
    run_dir.summary.unlink(missing_ok=True)
    files = run_dir.metrics, run_dir.evaluation
    damaged = {path: truncate_rows(path, point.step) for path in files}
    return [
        f"{path}: {plural(count, 'damaged line')} removed"
        for path, count in damaged.items()
        if count
    ]


def truncate_rows(path: Path, step: int) -> int:
    """Remove the rows of the steps after `step`, and lines that are not rows.

    Returns:
        The number of lines that were not rows, without the last one: an end cut off.

    Raises:
        OSError: the file cannot be written.
    """
    if not path.exists():
        return 0
    others, line = 0, b""
    with temporary_path(path) as temporary:
        with temporary.open("xb") as kept:
            for line in rows.read_lines(path):
                row = rows.parse(line)
                others += row is None
                if row is not None and row["step"] <= step:
                    kept.write(line)
            sync_file(kept)
        if temporary.stat().st_size < path.stat().st_size:
            temporary.replace(path)
    return others - (bool(line) and rows.parse(line) is None)


def epoch_of(path: Path, step: int) -> int:
    """Return the epoch of a step's last mini-batch from the file of rows; 0 if it is unknown.

    Raises:
        OSError: the file cannot be read.
    """
    epoch = next((row.get("epoch") for row in rows.read(path) if row["step"] == step), 0)
    return epoch if type(epoch) is int else 0
