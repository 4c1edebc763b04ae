"""A job as events, a line of JSON each, for programs (``--json``)."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from typing_extensions import assert_never

from pipeworker.display.lines import LineDisplay
from pipeworker.display.output import Printed
from pipeworker.display.text import strict
from pipeworker.errors import RecordError
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.record.files.located import located
from pipeworker.wire import lines


class EventDisplay(LineDisplay):
    """One JSON object a line on standard output; a figure that is not finite is null.

    If the reader of standard output is gone, the job ends as with a terminal that is lost. If a
    file refuses events, as on a full disk, they are lost: standard error reports it once.
    """

    _saved: int | None = None
    """The step of the newest checkpoint that was shown; None before the first look."""

    def show(self, event: lines.FromCoordinator) -> None:
        match event:
            case lines.Planned():
                self._checkpoints(self._options.resume_step)
                self._plan = event
                self._emit(
                    "plan",
                    run_dir=str(self._run_dir.path),
                    stages=len(event.balance),
                    replicas=event.replicas,
                    balance=event.balance,
                    microbatches=event.microbatches,
                    schedule=event.schedule,
                    device=event.device,
                    steps=event.steps or None,
                    first_step=self._options.resume_step + 1,
                    step_seconds=event.step_seconds or None,
                    why=event.why,
                    log_every=self._style.log_every,
                )
            case StepResult():
                self._last = event
                self._emit("step", **dataclasses.asdict(event))
            case Evaluation():
                self._emit("evaluation", step=event.step, **event.row())
            case lines.Warned():
                self.warn(event.text, "note" if event.note else "warning")
            case lines.Verdict():
                self._end(event)
            case lines.Restart():
                if event.recovers:
                    self._emit("restart", cause=event.cause, stages=event.stages)
            case (
                lines.Bound()
                | lines.Joined()
                | lines.Snapshot()
                | lines.Activity()
                | lines.KeepAlive()
            ):
                return
            case _:
                assert_never(event)

    def begin(self) -> None:
        """Do nothing: there is no event before the plan."""

    def show_output(self, printed: Iterable[Printed]) -> None:
        for one in printed:
            if one.whole:
                self._emit("output", worker=one.mark, text=one.text)

    def warn(self, text: str, kind: str = "warning") -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._emit(kind, text=text)

    def tick(self) -> None:
        """Show checkpoints that have become complete since the last tick, after their steps."""
        if self._last is not None:
            self._checkpoints(self._last.step)

    def _checkpoints(self, newest: int) -> None:
        """Show new checkpoints up to the step `newest`, none of an earlier start of the run."""
        with suppress(OSError):  # moved, or removed
            steps = self._run_dir.checkpoints.steps()
            if self._saved is None:
                self._saved = max(steps, default=-1)
            for step in steps:
                if self._saved < step <= newest:
                    self._saved = step
                    path = located(self._run_dir.checkpoints.at(step))
                    self._emit("checkpoint", step=step, path=path)

    def _end(self, verdict: lines.Verdict) -> None:
        self._checkpoints(verdict.steps)
        summary = self._summary(verdict)
        step, checkpoint = summary.checkpoint or (None, None)
        self._emit(
            "end",
            status=verdict.status,
            exit_status=verdict.exit_status,
            steps=verdict.steps,
            seconds=verdict.seconds,
            loss=summary.loss,
            checkpoint=checkpoint,
            checkpoint_step=step,
            resume=(summary.resume or None) if checkpoint else None,
            error=verdict.error,
            run_dir=str(self._run_dir.path),
            **(verdict.speed.fields() if verdict.speed else {}),
        )

    def _emit(self, event: str, **fields: Any) -> None:
        self.write(json.dumps({"event": event, **strict(fields)}))

    def _attempt(self, write: Callable[[], None], *, error: bool = False) -> None:
        try:
            write()
        except OSError as failed:
            if failed.errno in (errno.EPIPE, errno.EIO):
                self.lost = self.lost or failed
            elif not error and not self._refused:
                self._refused = True
                refused = f"warning: {RecordError('standard output', failed)}"
                self.write(f"{refused}; the job continues, its events are lost", error=True)
