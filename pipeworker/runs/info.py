"""The facts about a run, read from its directory; the job may still be running."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pipeworker.display.text import strict
from pipeworker.errors import UsageError, reading
from pipeworker.job.options import Options
from pipeworker.record import lock
from pipeworker.record.checkpoint.manifest import MANIFEST, Manifest
from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Row
from pipeworker.record.run_record import RunRecord, best_entry, read_summary
from pipeworker.record.rundir import RunDir, disk_bytes

RUNNING, DONE, LOST = "running", "done", "lost"
_GONE = "its processes ended without a summary: they were killed, or their host went down"
_NOT_OPTIONS = (
    *("job_file", "arguments", "own_loop", "evaluate_only", "plan_only", "resume", "resume_step"),
    "facts",
)
_ENDING = ("seconds", "restarts", "causes", "peak_memory_bytes", "bubble", "error")
_SPEED = (
    *("median_step_seconds", "samples_per_second", "tokens_per_second"),
    *("busy_seconds", "data_seconds"),
)
_MOST = 1e300
_RECENT = 100
"""Steps whose median speed is shown."""
_SHOWN = ("stages", "microbatches", "seed")
"""Options that are shown even if they have their defaults."""
_DEFAULTS: dict[str, Any] = {
    f.name: list(f.default) if isinstance(f.default, tuple) else f.default
    for f in dataclasses.fields(Options)
}
"""As JSON has them."""
OPTION_NAMES = [name for name in _DEFAULTS if name not in _NOT_OPTIONS]
"""The names of a run's options, in their order."""


@dataclass(frozen=True, slots=True)
class Run:
    """The facts about a run.

    Attributes:
        path: its directory, as the caller gave it.
        summary: ``summary.json``, or what is known of a run without one.
        recent: the rows of the last hundred steps, the newest first.
        evaluation: the row of the last evaluation pass.
        best: the row of the best evaluation pass, by the option ``--best``.
        checkpoints: the manifests of the complete ones by their paths, the oldest first.
        disk_bytes: the bytes of all files in the directory.
    """

    path: Path
    record: RunRecord
    summary: dict[str, Any]
    recent: tuple[Row, ...]
    evaluation: Row | None
    best: Row | None
    checkpoints: dict[Path, Manifest]
    disk_bytes: int

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run directory, whose files any program may have changed.

        The process that runs the job must not call this, for the reason that
        :func:`pipeworker.record.lock.is_locked` gives.

        Raises:
            UsageError: there is no run, or one of its files cannot be read.
        """
        run_dir = RunDir(path)
        with reading(path):
            record = RunRecord.read(run_dir)
            started, now = time_of(record.last), datetime.now(timezone.utc)
            took = (now - started).total_seconds() if started else -1.0
            runs = lock.is_locked(run_dir.lock)  # first: the job may end while its files are read
            summary = read_summary(run_dir) or {
                "status": RUNNING if runs else LOST,
                "seconds": took if runs and took >= 0 else None,  # a clock may be set back
                "restarts": None,  # the summary is the first file that has them
                "causes": [],
                "peak_memory_bytes": [],
                "bubble": None,
                "error": None if runs else _GONE,
            }
            return cls(
                path,
                record,
                summary,
                recent_rows(run_dir),
                rows.last(run_dir.evaluation),
                record.criterion.best(rows.read(run_dir.evaluation)),
                _checkpoints(run_dir),
                disk_bytes(path),
            )

    @property
    def last(self) -> Row:
        """The row of the last step; empty before the first step is done."""
        return self.recent[0] if self.recent else {}

    @property
    def speeds(self) -> tuple[float | None, float | None]:
        """The medians of samples and of tokens per second in recent steps; None if unknown."""
        return speeds_of(self.recent)

    @property
    def status(self) -> str:
        """``running``, ``done``, ``failed`` or ``interrupted``; ``lost`` if the job was killed."""
        return str(self.summary["status"])

    @property
    def best_weights(self) -> Path | None:
        """The checkpoint with the best evaluation."""
        evaluations = {p: m.evaluation or {} for p, m in self.checkpoints.items()}
        return self.record.criterion.best_of(evaluations)

    @property
    def best_value(self) -> float | None:
        """The figure of the best evaluation pass."""
        return self.record.criterion.value(self.best) if self.best else None

    def option(self, name: str) -> Any:
        """Return an option of the run, by its name in :class:`Options`."""
        value = self.record.options.get(name, _DEFAULTS[name])
        return None if value is dataclasses.MISSING else value

    @property
    def steps(self) -> int:
        """The number of steps that are done, in a script also those of a loaded checkpoint."""
        return max(int(self.last.get("step", 0)), int(self.summary.get("steps", 0)))

    @property
    def asked_steps(self) -> int | None:
        """The number of steps that were asked for; None for as many as the data has."""
        asked: int | None = self.record.options.get("steps")
        return asked

    def changed_options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, and the most important ones."""
        return {
            name: value
            for name, value in self.record.options.items()
            if name not in _NOT_OPTIONS and (name in _SHOWN or value != _DEFAULTS.get(name))
        }

    def to_json(self) -> dict[str, Any]:
        """Return all facts as JSON; a figure that is not finite is null."""
        content = self.record.content
        found = {
            "run": str(self.path),
            "status": self.status,
            **{k: v for k, v in content.items() if k not in ("version", "options", "resumed")},
            "options": self.record.options,
            "changed_options": self.changed_options(),
            "resumed": content["resumed"],
            "steps": self.steps,
            "asked_steps": self.asked_steps,
            "loss": self.last.get("loss"),
            "last": self.last or None,
            "evaluation": self.evaluation,
            "best_evaluation": self.best,
            "best": self.best and best_entry(RunDir(self.path), self.record.criterion, self.best),
            **{name: self.summary[name] for name in _ENDING},
            **{name: self.summary.get(name) for name in _SPEED},
            "stopped_early": self.summary.get("stopped_early"),
            "disk_bytes": self.disk_bytes,
            "checkpoints": [
                {"step": manifest.step, "path": str(path), "evaluation": manifest.evaluation}
                for path, manifest in self.checkpoints.items()
            ],
        }
        return dict(strict(found))


def recent_rows(run_dir: RunDir) -> tuple[Row, ...]:
    """Return the rows of the last hundred steps, the newest first; raises OSError."""
    return tuple(itertools.islice(rows.reversed_rows(run_dir.metrics), _RECENT))


def speeds_of(recent: Sequence[Row]) -> tuple[float | None, float | None]:
    """Return the medians of samples and of tokens per second; None if unknown."""
    samples = [positive(row.get("samples_per_second")) for row in recent]
    seconds = [(positive(row.get("seconds")), row) for row in recent]
    tokens = [positive(row.get("tokens")) / took for took, row in seconds if took]
    return _median(samples), _median(tokens)


def _checkpoints(run_dir: RunDir) -> dict[Path, Manifest]:
    """Return the complete checkpoints; damaged ones are left out."""
    found = {}
    for path in run_dir.checkpoints.paths():
        with suppress(UsageError, OSError):
            found[path] = Manifest.read(path / MANIFEST)
    return found


def positive(value: Any) -> float:
    """Return a positive number as a float; 0 for any other value, which a file may have."""
    return float(value) if isinstance(value, (int, float)) and 0 < value < _MOST else 0.0


def _median(values: Iterable[float]) -> float | None:
    """Return the median of the values that are not 0; None if there are none."""
    known = [value for value in values if value]
    return statistics.median(known) if known else None


def time_of(process: dict[str, Any]) -> datetime | None:
    """Return when a process started, in this host's time zone, if its record is valid."""
    with suppress(KeyError, ValueError, TypeError, OverflowError):
        return datetime.fromisoformat(process["started"]).astimezone()
    return None
