"""From where a run goes on, and what is put away before it does. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeworker.errors import UsageError
from pipeworker.record.manifest import NAME, Manifest
from pipeworker.record.rundir import RunDir


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole.

    Attributes:
        path: None where there is none yet: the run begins with its first step.
        step: that it holds.
        damaged: newer ones that are not whole, each with what is wrong with it.
    """

    path: Path | None = None
    step: int = 0
    damaged: Mapping[Path, str] = field(default_factory=dict)


def newest(run_dir: RunDir) -> Found:
    """Look at the checkpoints of a run, the newest first, until one is whole.

    Raises:
        UsageError: all are damaged, or they cannot be looked at.
    """
    damaged: dict[Path, str] = {}
    try:
        saved = run_dir.saved()
    except OSError as error:
        raise UsageError(f"cannot read {run_dir.checkpoints}: {error.strerror}") from None
    for path in reversed(saved):
        try:
            return Found(path, _whole(run_dir, path).step, damaged)
        except UsageError as error:
            damaged[path] = str(error)
        except OSError as error:
            damaged[path] = f"cannot read {error.filename or path}: {error.strerror}"
    if damaged:
        shown = "".join(f"\n  {path.name}: {why}" for path, why in damaged.items())
        raise UsageError(f"no checkpoint in {run_dir.checkpoints} is whole:{shown}")
    return Found()


def _whole(run_dir: RunDir, path: Path) -> Manifest:
    """A checkpoint of which every file has been read.

    Raises:
        UsageError, OSError: it is not whole.
    """
    manifest = Manifest.read(path / NAME)
    if path != run_dir.checkpoint(manifest.step):
        raise UsageError(f"cannot read {path}: its manifest is of step {manifest.step}")
    manifest.check_files(path)
    return manifest


def prepare(run_dir: RunDir, found: Found) -> None:
    """Leave of a run what it was when the checkpoint was complete, as far as is written again.

    Damaged checkpoints are set aside, not removed: their names are wanted again.

    Raises:
        OSError: something cannot be changed.
    """
    for path in found.damaged:
        path.rename(_free(path.with_name(f"damaged-{path.name}")))
    run_dir.sweep()
    run_dir.summary.unlink(missing_ok=True)
    for path in (run_dir.metrics, run_dir.evaluation):
        cut(path, found.step)


def _free(path: Path) -> Path:
    """A name like it that nothing has."""
    names = (path.with_name(f"{path.name}{end}") for end in ("", *(f"-{n}" for n in range(2, 999))))
    return next(name for name in names if not name.exists())


def cut(path: Path, step: int) -> None:
    """Leave the rows of the steps up to this one; each is a JSON object with its `step`.

    A line that is no row goes as well: one that a process or a machine ended in the middle of.

    Raises:
        OSError: the file cannot be written.
    """
    if not path.exists():
        return
    temporary = path.with_name(f".{path.name}.partial")
    whole = True
    try:
        with path.open("rb") as rows, temporary.open("wb") as kept:
            for line in rows:
                if _step(line) <= step:
                    kept.write(line)
                else:
                    whole = False
            kept.flush()
            os.fsync(kept.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if whole:
        temporary.unlink()
    else:
        temporary.replace(path)


def epoch(path: Path, step: int) -> int:
    """Of the last mini-batch of a step, from the rows of the steps; 0 where it has none.

    Raises:
        OSError: the file cannot be read.
    """
    if not path.exists():
        return 0
    with path.open("rb") as rows:
        found = [json.loads(line).get("epoch", 0) for line in rows if _step(line) == step]
    return found[-1] if found and type(found[-1]) is int else 0


def _step(line: bytes) -> float:
    """Of a row; what is no row comes after all."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, RecursionError, KeyError, TypeError, IndexError):
        step = None
    return step if type(step) is int else float("inf")
