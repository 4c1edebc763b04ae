"""What a run was and did, as its directory tells, whether it still goes on or not."""

from __future__ import annotations

import dataclasses
import math
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.record import lock
from pipeworker.record.manifest import NAME, Manifest
from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Row
from pipeworker.record.run import Record
from pipeworker.record.rundir import RunDir, read_summary

RUNNING, DONE, FAILED, INTERRUPTED = "running", "done", "failed", "interrupted"
_GONE = "its processes are gone without a word: they were killed, or their host went down"
_NOT_OPTIONS = ("job_file", "arguments", "own_loop", "resume", "resume_step")
_SHOWN = ("stages", "microbatches", "seed")
"""Options that are told whatever they are."""
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Options)}


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete checkpoint, with the row of the evaluation after its step if there was one."""

    step: int
    path: Path
    evaluation: Row | None


@dataclass(frozen=True, slots=True)
class Run:
    """A run.

    Attributes:
        path: of its directory, as it was said.
        first: what was recorded at its beginning.
        resumed: each time that it went on.
        options: those in force.
        status: one of the four.
        last: the row of its last step; empty before the first one is done.
        evaluation, best: the row of the last evaluation, and of the one with the least loss.
        seconds: since it was begun, or went on, to its end or until now.
        memory: bytes, the most that each worker had; empty while it runs.
    """

    path: Path
    first: dict[str, Any]
    resumed: tuple[dict[str, Any], ...]
    options: dict[str, Any]
    status: str
    last: Row
    evaluation: Row | None
    best: Row | None
    seconds: float | None
    restarts: int
    causes: tuple[str, ...]
    memory: tuple[int, ...]
    bubble: float | None
    error: str | None
    saved: tuple[Saved, ...]

    @classmethod
    def read(cls, path: Path) -> Run:
        """Look at a run directory, which anybody may have changed.

        The process that runs the job must not: see :func:`pipeworker.record.lock.held`.

        Raises:
            UsageError: it is none, or something in it cannot be read.
        """
        try:
            return cls._read(path)
        except OSError as error:
            raise UsageError(f"cannot read {error.filename or path}: {error.strerror}") from None

    @classmethod
    def _read(cls, path: Path) -> Run:
        run_dir = RunDir(path)
        record = Record.read(run_dir)
        runs = lock.held(run_dir.lock)  # before it is looked at what it left
        summary = read_summary(run_dir)
        if summary:
            status, error = summary["status"], summary["error"]
        else:
            status, error = (RUNNING, None) if runs else (INTERRUPTED, _GONE)
        return cls(
            path,
            record.content,
            tuple(record.content["resumed"]),
            record.options,
            status,
            rows.last(run_dir.metrics) or {},
            rows.last(run_dir.evaluation),
            rows.best(run_dir.evaluation),
            summary.get("seconds", _since(record.last) if runs else None),
            summary.get("restarts", 0),
            tuple(map(str, summary.get("causes", ()))),
            tuple(summary.get("peak_memory_bytes", ())),
            summary.get("bubble"),
            error,
            tuple(_saved(run_dir)),
        )

    @property
    def now(self) -> dict[str, Any]:
        """What was recorded when it was last begun or gone on with."""
        return self.resumed[-1] if self.resumed else self.first

    @property
    def steps(self) -> int:
        """Steps that are done."""
        return int(self.last.get("step", 0))

    @property
    def asked_steps(self) -> int | None:
        """None for as many as the data has."""
        asked = self.options.get("steps")
        return asked if type(asked) is int else None

    @property
    def workers(self) -> int:
        """Processes of the job, a stage of a replica in each."""
        counts = (self.options.get(name, 1) for name in ("stages", "replicas"))
        return math.prod(count for count in counts if type(count) is int)

    def told_options(self) -> dict[str, Any]:
        """The options that are not as they are by default, and the most important ones."""
        return {
            name: value
            for name, value in self.options.items()
            if name not in _NOT_OPTIONS and (name in _SHOWN or value != _plain(_DEFAULTS.get(name)))
        }

    def to_json(self) -> dict[str, Any]:
        """All of it; null where a figure is no number."""
        first = {k: v for k, v in self.first.items() if k not in ("version", "options", "resumed")}
        found = {
            "run": str(self.path),
            "status": self.status,
            **first,
            "options": self.options,
            "changed_options": self.told_options(),
            "resumed": list(self.resumed),
            "steps": self.steps,
            "asked_steps": self.asked_steps,
            "loss": self.last.get("loss"),
            "last": self.last or None,
            "evaluation": self.evaluation,
            "best_evaluation": self.best,
            "seconds": self.seconds,
            "restarts": self.restarts,
            "causes": list(self.causes),
            "peak_memory_bytes": list(self.memory),
            "bubble": self.bubble,
            "error": self.error,
            "checkpoints": [
                {"step": s.step, "path": str(s.path), "evaluation": s.evaluation}
                for s in self.saved
            ],
        }
        return dict(strict(found))


def _saved(run_dir: RunDir) -> list[Saved]:
    """A damaged one is none."""
    found = []
    for path in run_dir.saved():
        with suppress(UsageError, OSError):
            manifest = Manifest.read(path / NAME)
            found.append(Saved(manifest.step, path, manifest.evaluation))
    return found


def time_of(process: dict[str, Any]) -> datetime | None:
    """When a process began, in this host's time zone, if what is recorded of it says so."""
    with suppress(KeyError, ValueError, TypeError, OverflowError):
        return datetime.fromisoformat(process["started"]).astimezone()
    return None


def strict(value: Any) -> Any:
    """As JSON has it everywhere: what is no number is null."""
    if isinstance(value, dict):
        return {name: strict(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """What a terminal can show: files may have a say in it."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _since(process: dict[str, Any]) -> float | None:
    started = time_of(process)
    return (datetime.now(timezone.utc) - started).total_seconds() if started else None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
