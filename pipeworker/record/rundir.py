"""The run directory: where everything a job leaves behind is. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.record.manifest import INDEX, NAME, Manifest, index_of
from pipeworker.record.metrics import rows
from pipeworker.wire.lines import Verdict

JOB = "job.py"
_ASKED = ".checkpoint"
_ROWS = (".jsonl", ".csv")
_LEFT = (".step-*.partial", ".*.gone")
_STATUSES = ("done", "failed", "interrupted")
_SUMMARY: dict[str, type | tuple[type, ...]] = {
    "status": str,
    "steps": int,
    "restarts": int,
    "causes": list,
    "seconds": float,
    "peak_memory_bytes": list,
    "bubble": float,
    "error": (str, type(None)),
}
_STEP = re.compile(r"step-(\d{8,19})", re.ASCII)


def digest(path: Path) -> str:
    """Of what is in a file (SHA-256); empty where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class RunDir:
    """The layout of a run directory."""

    path: Path

    @property
    def run(self) -> Path:
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """See :class:`pipeworker.record.lock.Lock`."""
        return self.path / ".lock"

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
    def events(self) -> Path:
        """Files for TensorBoard."""
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def coordinator_log(self) -> Path:
        return self.path / "logs" / "coordinator.log"

    def host_log(self, name: str) -> Path:
        """Of what carries a host's agent."""
        return self.path / "logs" / f"host-{name.replace('/', '-')}.log"

    def worker_log(self, worker: int, replica: int | None = None) -> Path:
        """Named by its stage, as long as it holds one, and by its replica where there are several.

        Args:
            worker: its number within its replica.
        """
        of = "" if replica is None else f"replica-{replica}-"
        return self.path / "logs" / f"{of}stage-{worker}.log"

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
            _sync(partial)
            whole = self.checkpoint(manifest.step)
            gone = _gone(whole)
            if whole.exists():  # a loop of the user's own may save a step again
                whole.rename(gone)
            partial.rename(whole)
            os.fsync(handle)
        finally:
            os.close(handle)
        shutil.rmtree(gone, ignore_errors=True)

    def discard(self, step: int) -> None:
        """Remove what there is of a checkpoint that will not be complete."""
        shutil.rmtree(self.partial_checkpoint(step), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what processes left behind that ended while they wrote or removed a checkpoint.

        Raises:
            OSError: it cannot be removed.
        """
        for pattern in _LEFT:
            for path in self.checkpoints.glob(pattern):
                shutil.rmtree(path)

    def saved(self) -> list[Path]:
        """What looks like a complete checkpoint, the oldest first.

        Raises:
            OSError: the folder cannot be read.
        """
        entries = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        found = {int(m[1]): path for path in entries if (m := _STEP.fullmatch(path.name))}
        return [path for _, path in sorted(found.items())]

    def last_saved(self) -> int:
        """The step of the newest checkpoint; -1 where there is none.

        Raises:
            OSError: the folder cannot be read.
        """
        saved = self.saved()
        return int(saved[-1].name.removeprefix("step-")) if saved else -1

    def let_go(self, keep: int) -> None:
        """Remove the oldest complete checkpoints but so many, and but the best.

        That is the one with the least loss in an evaluation; of equal ones, the newest.

        Raises:
            OSError: one cannot be removed.
        """
        saved = self.saved()
        if len(saved) <= keep:
            return
        best = min(reversed(saved), key=_loss)
        for path in saved[:-keep]:
            if path != best:
                _remove(path)

    def ask_for_checkpoint(self) -> None:
        """Have the job that runs here save; :meth:`asked_for_checkpoint` is how it knows.

        A file, because the folder is what all hosts of a job and who looks after it have in common.

        Raises:
            OSError: it cannot be written.
        """
        (self.path / _ASKED).touch()

    def remove(self, made: Sequence[Path]) -> None:
        """Leave nothing of a run that never began, but what is not ours.

        Args:
            made: the folders that were made for it, the deepest first; those that are empty go.
        """
        rows = [path.with_suffix(of) for path in (self.metrics, self.evaluation) for of in _ROWS]
        files = [self.run, self.path / JOB, self.plan, *rows, self.summary, self.lock]
        logs = self.coordinator_log().parent
        written = [*logs.glob("*.log"), *self.events.glob("events.*")]
        for path in (*files, self.path / _ASKED, *written):
            with suppress(OSError):
                path.unlink()
        for folder in (logs, self.events, self.checkpoints, *made):
            with suppress(OSError):
                folder.rmdir()

    def asked_for_checkpoint(self) -> bool:
        """Whether somebody has asked since it was last asked here."""
        try:
            (self.path / _ASKED).unlink()
        except OSError:
            return False
        return True


def _loss(checkpoint: Path) -> float:
    """Of the evaluation after its step; infinite where there is none that says something."""
    with suppress(UsageError, OSError):
        loss = (Manifest.read(checkpoint / NAME).evaluation or {}).get("loss", math.inf)
        return loss if math.isfinite(loss) else math.inf
    return math.inf


def find(source: Path) -> Path:
    """The checkpoint itself, or the last complete one of a run directory.

    Raises:
        UsageError: there is none.
        OSError: a directory cannot be read.
    """
    if (source / NAME).is_file():
        return source
    complete = [path for path in RunDir(source).saved() if (path / NAME).is_file()]
    if not complete:
        raise UsageError(
            f"{source} has no complete checkpoint: give the directory of a finished run, or one of "
            "its checkpoints"
        )
    return complete[-1]


def create(asked: str | Path | None, job_file: Path) -> tuple[RunDir, tuple[Path, ...]]:
    """Make the directory of a new run; the default is ``runs/<file stem>-<time>``.

    Returns:
        It, and the folders that were made for it, the deepest first.

    Raises:
        UsageError: it exists already, or cannot be made.
    """
    stem = Path("runs") / f"{job_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(asked) if asked else stem
    attempt = 1
    while True:
        try:
            new = [folder.absolute() for folder in path.parents if not folder.exists()]
            path.mkdir(parents=True, exist_ok=False)
            (path / "logs").mkdir()
            return RunDir(path.resolve()), (path.resolve(), *new)
        except FileExistsError:
            if asked:
                raise UsageError(
                    f"run directory {asked} exists already: choose another --run-dir, or go on "
                    "with it by --resume"
                ) from None
            attempt += 1
            path = stem.with_name(f"{stem.name}-{attempt}")
        except OSError as error:
            raise UsageError(f"cannot make run directory {path}: {error.strerror}") from None


def _gone(checkpoint: Path) -> Path:
    """What it is called while it is removed."""
    return checkpoint.with_name(f".{checkpoint.name}.gone")


def _sync(folder: Path) -> None:
    """The names of its files are on disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(checkpoint: Path) -> None:
    gone = _gone(checkpoint)
    checkpoint.rename(gone)  # at once: what is half removed must not look whole
    shutil.rmtree(gone)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that is there whole or not at all."""
    write_whole(path, (json.dumps(value, indent=2) + "\n").encode())


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_summary(run_dir: RunDir, verdict: Verdict, stages: int) -> None:
    """Write summary.json, the last word on a run.

    Raises:
        OSError: it cannot be written, or the rows cannot be read.
    """
    last, best = rows.last(run_dir.metrics) or {}, rows.best(run_dir.evaluation)
    write_json(
        run_dir.summary,
        {
            "status": verdict.status,
            "steps": verdict.steps,
            "stages": stages,
            "restarts": verdict.restarts,
            "causes": list(verdict.causes),
            "seconds": verdict.seconds,
            "loss": last.get("loss"),
            **({"best_evaluation": best} if best else {}),
            "peak_memory_bytes": list(verdict.peak_memory),
            "bubble": verdict.bubble,
            "error": verdict.error,
        },
    )


def read_summary(run_dir: RunDir) -> dict[str, Any]:
    """What :func:`write_summary` wrote; empty where there is none yet.

    Raises:
        UsageError: it is something else.
        OSError: it cannot be read.
    """
    try:
        found: Any = json.loads(run_dir.summary.read_bytes())
        fits = all(isinstance(found[name], kind) for name, kind in _SUMMARY.items())
        fits = fits and found["status"] in _STATUSES
        peaks = found["peak_memory_bytes"]
        fits = fits and all(type(peak) is int and 0 <= peak < 1 << 63 for peak in peaks)
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, KeyError, TypeError):
        fits = False
    if not fits:
        raise UsageError(f"cannot read {run_dir.summary}: it is not the summary of a run")
    summary: dict[str, Any] = found
    return summary
