"""The files of a run that its coordinator writes, and what follows if it cannot."""

from __future__ import annotations

import dataclasses
import errno
import logging
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeworker.coordinator.effects import Commit
from pipeworker.coordinator.events import CheckpointEnded, EffectFailed, Event
from pipeworker.coordinator.io.parent import ParentProcess
from pipeworker.coordinator.io.result_thread import ResultThread
from pipeworker.errors import RecordError, UnreadableFile
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.layer_names import LayerNames
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.host.descriptors import DescriptorReserve
from pipeworker.job.options import Options
from pipeworker.record.checkpoint.manifest import Manifest
from pipeworker.record.files.atomic_file import open_file, replace_json, write_json
from pipeworker.record.files.located import located
from pipeworker.record.metrics.formats import ExtraFormats
from pipeworker.record.metrics.rows import Rows
from pipeworker.record.run_record import write_summary
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Verdict, Warned

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

log = logging.getLogger("pipeworker.coordinator")


@dataclass
class RunFiles:
    """The files of a run, written by its coordinator, which warns its parent of errors.

    If rows or the plan cannot be written, the job ends: `handle` is called with the event. A full
    disk does not end it: there may be room again before a checkpoint is due. Checkpoints are
    completed and removed by the thread of the `disk`, in the order of the calls. `restored` returns
    the step of the checkpoint that workers are about to read; -1 if there is none.
    """

    run_dir: RunDir
    options: Options
    descriptors: DescriptorReserve
    parent: ParentProcess
    disk: ResultThread
    handle: Callable[[Event], None]
    restored: Callable[[], int]
    _warned: set[Path] = field(default_factory=set)  # files of which it is known: the disk is full
    _completing: set[int] = field(default_factory=set)  # steps of checkpoints
    _extras: ExtraFormats | None = None
    _rows: dict[Path, Rows] = field(init=False)

    def __post_init__(self) -> None:
        self._rows = {self.run_dir.metrics: Rows(self.run_dir.metrics)}

    def open_extras(self) -> None:
        """Open the tables and event files that are written beside the rows, if requested."""
        options, where = self.options, self.run_dir

        def begin() -> None:
            events = where.events if options.tensorboard else None
            self._extras = ExtraFormats(
                where.metrics, where.evaluation, csv=options.csv, events=events
            )

        if options.csv or options.tensorboard:
            self._write_extras(begin)

    def write_now(self, content: dict[str, Any]) -> None:
        """Write what the workers do at present; nothing depends on it."""
        with suppress(OSError):
            replace_json(self.run_dir.now, {"time": time.time(), **content})

    def close(self) -> None:
        """Close the files of rows, and what is written beside them.

        The verdict has been sent, and a directory that cannot be searched does not change it.
        """
        with suppress(OSError):
            self.run_dir.now.unlink()
        rings: list[Path] = []
        with suppress(OSError):
            self.descriptors.run(lambda: rings.extend(self.run_dir.worker_rings()))
        for ring in rings:
            self.descriptors.run(partial(_record_unfinished, ring))
        for file in self._rows.values():
            with suppress(OSError):
                file.close()
        if self._extras:
            self._write_extras(self._extras.close)

    def write_plan(self, plan: dict[str, Any]) -> None:
        """Write ``plan.json``; on a full disk an earlier one stays."""
        path = self.run_dir.plan
        consequence = "it is unchanged" if path.exists() else ""
        write = partial(write_json, path, plan)
        self._write(path, partial(self.descriptors.run, write), consequence)

    def add_step(self, result: StepResult) -> None:
        """Append a row of metrics."""
        row = msgspec.to_builtins(result)
        for name in ("loss_scale", "tokens"):
            if row[name] is None:
                del row[name]
        self._append(self.run_dir.metrics, row)

    def withdraw_step(self, step: int) -> None:
        """Remove the row of the last step."""
        path = self.run_dir.metrics
        self._write(path, partial(self._rows[path].withdraw, step))
        if self._extras:
            self._write_extras(partial(self._extras.withdraw, path, step))

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Append a row of an evaluation pass."""
        self._append(self.run_dir.evaluation, {"step": evaluation.step, **evaluation.row()})

    def commit(self, commit: Commit, stages: int) -> None:
        """Complete a checkpoint after the rows of its steps are on disk, then remove old ones.

        Those of later steps, which a loop of the user's own has left by loading an earlier one, are
        renamed: a run continues from the checkpoint of its highest step.

        `CheckpointEnded` reports its path, or why it cannot be completed.
        """
        checkpoints, all_rows = self.run_dir.checkpoints, [*self._rows.values()]
        state, step, evaluation = commit.state, commit.state.step, commit.state.evaluation
        manifest = Manifest(
            step,
            stages,
            LayerNames(commit.layers),
            commit.files,
            commit.ties,
            dataclasses.asdict(state.scaler) if state.scaler else None,
            {"step": evaluation.step, **evaluation.row()} if evaluation else None,
            state.epoch,
            state.evaluation_due,
        )
        left: list[Path] = []

        def complete() -> CheckpointEnded:
            try:
                for rows in all_rows:
                    rows.sync()
                self.descriptors.run(lambda: checkpoints.commit(manifest))
                left.extend(checkpoints.leave_later(step) if self.options.own_loop else ())
            except (OSError, ValueError) as error:  # a file differs from what its worker reported
                return _not_completed(step, error)
            return CheckpointEnded(step, located(checkpoints.at(step)))

        def ended(event: CheckpointEnded) -> None:
            self._completing.discard(step)
            if left:
                names = " and ".join(path.name for path in left)
                self.warn(
                    f"checkpoints: later ones than that of step {step} are kept as {names}; resume "
                    f"continues after step {step}"
                )
            if event.path:
                self._remove_old_checkpoints(step)  # the end of the job waits for that too
            self.handle(event)

        try:
            for rows in all_rows:
                rows.flush()
        except OSError as error:
            self.handle(_not_completed(step, error))
        else:
            self._completing.add(step)
            self.disk.submit(complete, ended)

    def write_summary(self, verdict: Verdict, stages: int, end: Callable[[Verdict], None]) -> None:
        """Write ``summary.json`` once all checkpoints are completed and removed, then call `end`.

        The verdict that it is called with has failed if the summary or a row cannot be written.
        """
        files = [*self._rows.items()]
        texts = [_error_of(path, rows.flush) for path, rows in files]

        def write() -> tuple[Verdict, str]:
            texts.extend(_error_of(path, rows.sync) for path, rows in files)
            ended = _failed_by(verdict, *texts)
            summarize = partial(write_summary, self.run_dir, ended, stages, self.options.best)
            return ended, _error_of(self.run_dir.summary, partial(self.descriptors.run, summarize))

        def written(result: tuple[Verdict, str]) -> None:
            ended, text = result
            for error in filter(None, [*texts, text]):
                log.error("%s", error)
            if text and ended.status != "done":
                self.parent.send(Warned(text))
            end(_failed_by(ended, text))

        self.disk.submit(write, written)

    def discard(self, step: int) -> None:
        """Remove a checkpoint that will not be complete; its step can be saved again at once."""
        with suppress(OSError):
            path = self.run_dir.checkpoints.set_aside(step)
            self.disk.submit(partial(shutil.rmtree, path, ignore_errors=True), lambda _: None)

    def remove_unfinished(self) -> None:
        """Remove checkpoints that workers of earlier generations have begun."""
        checkpoints = self.run_dir.checkpoints
        with suppress(OSError):
            for step in {*checkpoints.unfinished()} - self._completing:
                self.discard(step)
        self._remove("an unfinished checkpoint", checkpoints.remove_set_aside)

    def _remove_old_checkpoints(self, step: int) -> None:
        """Remove checkpoints beyond those to keep; failing to do so does not end the job.

        Workers may be about to read one, from which they continue after a loss: that which they
        were sent, or, until the job handles the completion of a newer one, that of `step`.
        """
        criterion, prune = Criterion.parse(self.options.best), self.run_dir.checkpoints.prune
        remove = partial(prune, self.options.keep, criterion, step, self.restored())
        self._remove("an old checkpoint", partial(self.descriptors.run, remove))

    def _append(self, path: Path, row: dict[str, Any]) -> None:
        first = path not in self._rows
        if first:
            self._rows[path] = Rows(path, later=True)
        rows = self._rows[path]

        def add() -> None:
            rows.append(row)
            if first:
                self.descriptors.run(rows.open)
            rows.flush()

        self._write(path, add, "its rows wait for room")
        if self._extras:
            self._write_extras(partial(self._extras.add, path, row))

    def _write_extras(self, write: Callable[[], None]) -> None:
        """Write tables and event files; an error ends these, with one warning, and not the job."""
        try:
            self.descriptors.run(write)
        except OSError as error:
            self._extras = None
            which = record_error(error.filename or self.run_dir.path, error)
            self.warn(f"{which}; nothing more is written there, nor in another extra format")

    def _write(self, path: Path, write: Callable[[], None], consequence: str = "") -> None:
        """Write a file; an error ends the job, but a full disk with a consequence only warns."""
        try:
            write()
            self._warned.discard(path)
        except OSError as error:
            text = record_error(path, error)
            if not consequence or error.errno not in _DISK_FULL:
                log.error("%s", text)
                self.handle(EffectFailed(text))
            elif path not in self._warned:
                self._warned.add(path)
                self.warn(f"{text}; {consequence}")

    def _remove(self, what: str, remove: Callable[[], None]) -> None:
        def attempt() -> str:
            try:
                remove()
            except OSError as error:
                return located(f"{what}: cannot be removed: {error}")
            return ""

        self.disk.submit(attempt, lambda text: self.warn(text) if text else None)

    def warn(self, text: str, *, note: bool = False) -> None:
        """Log a warning and send it to the parent."""
        log.warning("%s", text)
        self.parent.send(Warned(text, note))


def _record_unfinished(ring: Path) -> None:
    # It imports numpy, which takes longer than a coordinator's start.
    from pipeworker.trace.recorder import record_unfinished_in

    record_unfinished_in(ring)


def record_error(path: object, error: OSError) -> str:
    """Return why a file cannot be written."""
    return str(RecordError(located(path), error))


def _error_of(path: Path, write: Callable[[], None]) -> str:
    """Call `write` and return why the file cannot be written, or an empty string."""
    try:
        write()
    except UnreadableFile as error:  # what is written there is computed from it
        return located(error)
    except OSError as error:
        return record_error(path, error)
    return ""


def _failed_by(verdict: Verdict, *texts: str) -> Verdict:
    """Return the verdict, or that of a job which has failed by the first error, if it was done."""
    text = next(filter(None, texts), "")
    if not text or verdict.status != "done":
        return verdict
    return dataclasses.replace(verdict, status="failed", exit_status=1, error=text)


def _not_completed(step: int, error: Exception) -> CheckpointEnded:
    text = located(f"cannot complete the checkpoint: {error}")
    return CheckpointEnded(step, error=text)


class LogFile(logging.FileHandler):
    """The coordinator's log. An error in writing it causes one warning and does not end the job."""

    def __init__(self, path: Path, parent: ParentProcess) -> None:
        self._path, self._parent = path, parent
        super().__init__(path, encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._warned = False

    def _open(self) -> Any:
        return open_file(self._path, "a", encoding=self.encoding, errors=self.errors)

    def handleError(self, record: logging.LogRecord) -> None:
        """Warn of the first error of the system; leave other errors to the base class."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._warned:
            self._warned = True
            self._parent.send(Warned(record_error(self._path, error)))
