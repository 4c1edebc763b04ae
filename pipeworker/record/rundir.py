"""The run directory: where everything a job leaves behind is. Imports no torch."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.record.manifest import INDEX, NAME, Manifest, index_of
from pipeworker.wire.lines import Verdict


@dataclass(frozen=True, slots=True)
class RunDir:
    """The layout of a run directory."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def coordinator_log(self) -> Path:
        return self.path / "logs" / "coordinator.log"

    def worker_log(self, rank: int) -> Path:
        """Named by its stage, as long as it holds one."""
        return self.path / "logs" / f"stage-{rank}.log"

    def checkpoint(self, step: int) -> Path:
        """A complete checkpoint, if it exists."""
        return self.checkpoints / f"step-{step:08d}"

    def partial_checkpoint(self, step: int) -> Path:
        """Where the stages write before :meth:`commit_checkpoint`."""
        return self.checkpoints / f".step-{step:08d}.partial"

    def commit_checkpoint(self, manifest: Manifest) -> None:
        """Make a checkpoint complete: from now on it is there, whole, or never was."""
        partial = self.partial_checkpoint(manifest.step)
        handle = os.open(self.checkpoints, os.O_RDONLY)  # before anything has changed
        try:
            if index := index_of(partial, manifest.files):
                write_json(partial / INDEX, index)
            write_json(partial / NAME, manifest.to_json())
            partial.rename(self.checkpoint(manifest.step))
            os.fsync(handle)
        finally:
            os.close(handle)

    def let_go(self, keep: int) -> None:
        """Remove the oldest complete checkpoints but so many.

        Raises:
            OSError: one cannot be removed.
        """
        for path in sorted(self.checkpoints.glob("step-*"))[:-keep]:
            gone = path.with_name(f".{path.name}.gone")
            path.rename(gone)  # at once: what is half removed must not look whole
            shutil.rmtree(gone)


def create(asked: str | Path | None, job_file: Path) -> RunDir:
    """Make the directory of a new run; the default is ``runs/<file stem>-<time>``.

    Raises:
        UsageError: it exists already, or cannot be made.
    """
    stem = Path("runs") / f"{job_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(asked) if asked else stem
    attempt = 1
    while True:
        try:
            path.mkdir(parents=True, exist_ok=False)
            (path / "logs").mkdir()
            return RunDir(path.resolve())
        except FileExistsError:
            if asked:
                raise UsageError(
                    f"run directory {asked} exists already: choose another --run-dir, or remove it"
                ) from None
            attempt += 1
            path = stem.with_name(f"{stem.name}-{attempt}")
        except OSError as error:
            raise UsageError(f"cannot make run directory {path}: {error.strerror}") from None


class Rows:
    """A file of JSON objects, one a line, opened once; a row is there whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def add(self, row: dict[str, Any]) -> None:
        """Write a row.

        Raises:
            OSError: the disk is full, or the file is not there any more.
        """
        found = os.fstat(self._file)
        if not found.st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
        data = (json.dumps(row) + "\n").encode()
        if os.write(self._file, data) < len(data):
            os.ftruncate(self._file, found.st_size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        os.close(self._file)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_summary(run_dir: RunDir, verdict: Verdict, stages: int) -> None:
    """Write summary.json, the last word on a run."""
    write_json(
        run_dir.summary,
        {
            "status": verdict.status,
            "steps": verdict.steps,
            "stages": stages,
            "restarts": verdict.restarts,
            "seconds": verdict.seconds,
            "peak_memory_bytes": list(verdict.peak_memory),
            "bubble": verdict.bubble,
            "error": verdict.error,
        },
    )
