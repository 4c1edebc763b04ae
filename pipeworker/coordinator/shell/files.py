"""The files of a run, as its coordinator writes them, and what happens when it cannot."""

from __future__ import annotations

import dataclasses
import errno
import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pipeworker.coordinator.effects import Commit
from pipeworker.coordinator.shell.starter import Starter
from pipeworker.errors import RecordError
from pipeworker.job.options import Options
from pipeworker.record.manifest import Manifest
from pipeworker.record.metrics.extras import Extras
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.rundir import RunDir, write_json, write_summary
from pipeworker.wire.lines import Verdict, Warned
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.step import StepResult
from pipeworker.wire.strangers import Descriptors

_FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("pipeworker.coordinator")


class Files:
    """See the module.

    Args:
        broken: is told what of a run's rows or plan cannot be written, which ends the job. A full
            disk does not: there may be room again before a checkpoint is due.
    """

    def __init__(
        self,
        run_dir: RunDir,
        options: Options,
        descriptors: Descriptors,
        starter: Starter,
        broken: Callable[[str], None],
    ) -> None:
        self._run_dir, self._options = run_dir, options
        self._descriptors, self._starter, self._broken = descriptors, starter, broken
        metrics = run_dir.metrics
        self._rows = {metrics: Rows(metrics)}
        self._held: set[Path] = set()  # files of which that was said
        self._extras: Extras | None = None

    def begin(self) -> None:
        """Open what is written beside the rows."""
        self._beside(self._begin_extras)

    def close(self) -> None:
        """All rows are there."""
        for file in self._rows.values():
            file.close()
        if self._extras:
            self._beside(self._extras.close)

    def plan(self, plan: dict[str, Any]) -> None:
        """Write ``plan.json``; on a full disk the one before it stays."""
        path = self._run_dir.plan
        kept = "it is as it was" if path.exists() else ""
        self._write(path, lambda: self._descriptors.spare(lambda: write_json(path, plan)), kept)

    def step(self, result: StepResult) -> None:
        """A row of metrics."""
        row = dataclasses.asdict(result)
        if result.loss_scale is None:
            del row["loss_scale"]
        self._append(self._run_dir.metrics, row)

    def evaluation(self, evaluation: Evaluation) -> None:
        """A row of an evaluation pass."""
        self._append(self._run_dir.evaluation, {"step": evaluation.step, **evaluation.row()})

    def commit(self, commit: Commit, stages: int) -> Path:
        """Complete a checkpoint, behind the rows of its steps; returns where it is.

        Raises:
            OSError: the disk does not take it.
            ValueError: a file of it is not what was said.
        """
        scaler = dataclasses.asdict(commit.scaler) if commit.scaler else None
        evaluation = commit.evaluation
        manifest = Manifest(
            commit.step,
            stages,
            commit.layers,
            commit.files,
            commit.ties,
            scaler,
            {"step": evaluation.step, **evaluation.row()} if evaluation else None,
        )
        for rows in self._rows.values():
            rows.sync()
        self._descriptors.spare(lambda: self._run_dir.commit_checkpoint(manifest))
        return self._run_dir.checkpoint(commit.step)

    def discard(self, step: int) -> None:
        """Away with what there is of an unfinished checkpoint."""
        self._run_dir.discard(step)

    def end(self, verdict: Verdict, stages: int) -> Verdict:
        """Write ``summary.json``; without it, or a row, no job is done, which the verdict says."""
        for path, rows in self._rows.items():
            if (text := _refused(path, rows.sync)) and verdict.status == "done":
                verdict = _failed(verdict, text)
        text = _refused(
            self._run_dir.summary,
            lambda: self._descriptors.spare(lambda: write_summary(self._run_dir, verdict, stages)),
        )
        if text and verdict.status == "done":
            return _failed(verdict, text)
        if text:
            self._starter.tell(Warned(text))
        return verdict

    def let_go(self) -> None:
        """Of old checkpoints; that one stays is no reason to end a job."""
        self._remove("an old checkpoint", lambda: self._run_dir.let_go(self._options.keep))

    def sweep(self) -> None:
        """Away with what those who are gone have begun."""
        self._remove("an unfinished checkpoint", self._run_dir.sweep)

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        """A line more, in a file that is opened once."""

        def begin() -> None:
            self._rows[path] = Rows(path)

        if path not in self._rows:
            self._write(path, lambda: self._descriptors.spare(begin))
        if path in self._rows:
            self._write(path, lambda: self._rows[path].add(row), "its rows wait for room")
        if self._extras:
            self._beside(partial(self._extras.add, path, row))

    def _begin_extras(self) -> None:
        options, where = self._options, self._run_dir
        if options.csv or options.tensorboard:
            events = where.events if options.tensorboard else None
            self._extras = Extras(where.metrics, where.evaluation, csv=options.csv, events=events)

    def _beside(self, write: Callable[[], None]) -> None:
        """That it cannot be written ends these, not the job; it is said once."""
        try:
            self._descriptors.spare(write)
        except OSError as error:
            self._extras = None
            which = RecordError(error.filename or self._run_dir.path, error)
            text = f"{which}: nothing more is written there, nor in another extra format"
            log.warning("%s", text)
            self._starter.tell(Warned(text))

    def _write(self, path: Path, write: Callable[[], None], kept: str = "") -> None:
        """That it cannot be written ends the job, and is said.

        Args:
            kept: what becomes of it on a full disk, which is said once and ends nothing.
        """
        try:
            write()
            self._held.discard(path)
        except OSError as error:
            text = str(RecordError(path, error))
            if not kept or error.errno not in _FULL:
                log.error("%s", text)
                self._broken(text)
            elif path not in self._held:
                self._held.add(path)
                log.warning("%s", text)
                self._starter.tell(Warned(f"{text}: {kept}"))

    def _remove(self, what: str, remove: Callable[[], None]) -> None:
        try:
            remove()
        except OSError as error:
            text = f"cannot remove {what}: {error}"
            log.warning("%s", text)
            self._starter.tell(Warned(text))


def _refused(path: Path, write: Callable[[], None]) -> str:
    """Why a file cannot be written; or nothing."""
    try:
        write()
    except OSError as error:
        text = str(RecordError(path, error))
        log.error("%s", text)
        return text
    return ""


def _failed(verdict: Verdict, text: str) -> Verdict:
    return dataclasses.replace(verdict, status="failed", exit_status=1, error=text)


class LogFile(logging.FileHandler):
    """That it cannot be written is no reason to end a job; it is said once."""

    def __init__(self, path: Path, starter: Starter) -> None:
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._path, self._starter = path, starter
        self._said = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._said:
            self._said = True
            self._starter.tell(Warned(str(RecordError(self._path, error))))
