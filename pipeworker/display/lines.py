"""A job as plain lines."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TextIO

from typing_extensions import assert_never

from pipeworker.display.commands import further, relative
from pipeworker.display.figures import GAP, Pace, evaluation_line, figures
from pipeworker.display.output import Printed
from pipeworker.display.style import Style
from pipeworker.display.summary import PlanContext, Summary
from pipeworker.display.text import counts, duration, sanitize
from pipeworker.errors import RecordError, UnreadableFile
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.job.option_parsing import format_by_origin
from pipeworker.job.options import Options
from pipeworker.plan.figures import plural, seconds_text
from pipeworker.plan.partition import sizes
from pipeworker.record.checkpoint.folder import step_of
from pipeworker.record.files.located import located
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir
from pipeworker.wire import lines

LINE_SECONDS = 1.0
"""Between two lines of steps, and between two states of a line that the job redraws."""


class LineDisplay:
    """Plain lines on standard output: the first step, the last one, and at most one a second.

    The job continues if a file or a pipe refuses lines, which is reported once. If a terminal is
    lost, later lines go to standard error, and `lost` is the error by which that was noticed.
    """

    def __init__(
        self,
        options: Options,
        run_dir: RunDir,
        style: Style | None = None,
        out: TextIO | None = None,
        error: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._run_dir = run_dir
        self._style = style or Style()
        self._out = out or sys.stdout
        self._error = error or sys.stderr
        self._now = now
        self.lost: OSError | None = None
        self._refused = False
        self._warned: set[str] = set()
        self._plan: lines.Planned | None = None
        self._total = options.steps  # None while unknown
        self._pace = Pace(self._total)
        self._first = options.resume_step + 1
        self._delayed: StepResult | None = None  # its line is due unless another step follows
        self._last: StepResult | None = None
        self._activity = lines.Activity()
        self._line_at = -math.inf
        self._redrawn_at: dict[str, float] = {}
        self._seconds, self._steps = 0.0, 0

    def show(self, event: lines.FromCoordinator) -> None:
        """Show one event of the coordinator."""
        match event:
            case lines.Planned():
                self._planned(event)
            case StepResult():
                self._seconds, self._steps = self._seconds + event.seconds, self._steps + 1
                self._last = event
                self._pace.add(event.step, self._now())
                self._step(event)
            case lines.Activity():
                self._activity = event
            case Evaluation():
                self._activity = dataclasses.replace(self._activity, evaluated=-1)
                if self._style.log_every is None:
                    self._print_delayed()
                self.print(evaluation_line(event))
            case lines.Warned():
                self.warn(event.text, "note" if event.note else "warning")
            case lines.Verdict():
                self._print_delayed()
                self.end(event)
            case (
                lines.Bound()
                | lines.Joined()
                | lines.Restart()
                | lines.Snapshot()
                | lines.KeepAlive()
            ):
                return  # of no interest to a user
            case _:
                assert_never(event)

    def begin(self) -> None:
        """Show that the job is starting."""
        self.print(f"starting {plural(self._options.workers, 'worker')}")

    def _planned(self, plan: lines.Planned) -> None:
        """Show what will run, with the options that have defaults; again if the stages changed."""
        before, self._plan = self._plan, plan
        self._total = plan.steps or None
        self._pace = Pace(self._total)
        if before and before.balance == plan.balance:
            return
        options, done = self._options, self._options.resume_step
        asked = f" (not {options.microbatches}: a mini-batch has no more samples)"
        fewer = asked if plan.microbatches < options.microbatches else ""
        where = f"run directory {self._run_dir.path}{f', from step {done}' if done else ''}"
        copies = f"{plan.replicas} replicas of " if plan.replicas > 1 else ""
        balance, stages = counts(plan.balance), plural(len(plan.balance), "stage")
        workers = len(plan.held)
        on = "" if workers == len(plan.balance) else f" on {plural(workers, 'worker')}"
        count = plural(plan.microbatches, "micro-batch")
        self.print(
            f"{copies}{stages} ({balance} layers){on}, {count}{fewer}, {plan.schedule}; {where}"
        )
        predicted = f"{seconds_text(plan.step_seconds)} a step" if plan.step_seconds else ""
        if planned := "; ".join(filter(None, (predicted, *plan.why))):
            self.print(f"plan: {planned}")
        steps = plural(self._total, "step") if self._total else ""
        if passes := options.passes:
            over = "one pass over the data" if passes == 1 else f"{passes} epochs"
            steps = f"{over} ({steps})" if steps else f"{over}, until data() ends"
        threads = plural(options.threads, "thread")
        self.print(
            f"seed {options.seed}, {steps}, {threads} per worker, {plan.device}, "
            f"{options.precision}"
        )
        for line in format_by_origin(self._style.origins, dataclasses.asdict(options)):
            self.print(f"from {line}")

    def _step(self, row: StepResult) -> None:
        every = self._style.log_every
        self._delayed = row
        due = row.step % every == 0 if every else self._is_line_due
        if due or row.step in (self._first, self._total):
            self._print_delayed()

    def _print_delayed(self) -> None:
        if self._delayed is not None:
            row, self._delayed = self._delayed, None
            self._line_at = self._now()
            left = self._pace.remaining(self._line_at)
            time = f"{duration(left)} left" if left else ""
            verbose, memory = self._style.verbose, self._activity.memory
            shown = figures(row, self._total, time, verbose=verbose, memory=memory)
            self.print(GAP.join(figure.text for figure in shown))

    def tick(self) -> None:
        """Print a delayed line that has become due."""
        if self._style.log_every is None and self._is_line_due:
            self._print_delayed()

    @property
    def _is_line_due(self) -> bool:
        return self._now() - self._line_at >= LINE_SECONDS

    def show_output(self, printed: Iterable[Printed]) -> None:
        """Show what workers printed, in a single write: each write takes its time."""
        if shown := [f"{one.mark} {one.text}" for one in printed if self._accepts(one)]:
            self.write("\n".join(shown))

    def _accepts(self, printed: Printed) -> bool:
        """Return whether to print it: every whole line, and a redrawn one once a second."""
        if printed.whole:
            return True
        mark, now = printed.mark, self._now()
        if not printed.text or now - self._redrawn_at.get(mark, -math.inf) < LINE_SECONDS:
            return False
        self._redrawn_at[mark] = now
        return True

    def warn(self, text: str, kind: str = "warning") -> None:
        """Show a warning or a note, once; without notes if it is to be quiet."""
        if text not in self._warned and not (kind == "note" and self._style.quiet):
            self._warned.add(text)
            self.write(sanitize(f"{kind}: {text}"), error=True)

    def end(self, verdict: lines.Verdict) -> None:
        """Show the final summary, and the error if there is one."""
        self.close()
        if summary := [*self._summary(verdict).lines()]:
            self.print("\n".join(summary))
        shows_status = summary and not self._style.quiet
        if verdict.job_exited:  # the job file's own message
            self.write(sanitize(verdict.error or ""), error=bool(verdict.exit_status))
        elif verdict.error:
            self.write(sanitize(f"error: {verdict.error}"), error=True)
        elif verdict.status == "interrupted" and not shows_status:
            self.write("interrupted", error=True)

    def _summary(self, verdict: lines.Verdict) -> Summary:
        run_dir, path = self._run_dir, str(self._run_dir.path)
        typed = relative(path)
        commands, done = self._style.commands, verdict.status == "done"
        patience = self._options.patience if verdict.stopped_early else None
        more = further(verdict.steps, self._options.epochs, patience) if done else None
        loss = self._last.loss if self._last and self._last.step == verdict.steps else None
        criterion, best, saved, kept = Criterion.parse(self._options.best), None, -1, None
        profiles, is_there = "", True
        with suppress(OSError, UnreadableFile):
            is_there = run_dir.run.exists()
            profiles = located(run_dir.profiles) if any(run_dir.profiles.glob("worker-*")) else ""
            saved = run_dir.checkpoints.last_step()  # first: rows may be unreadable
            kept = run_dir.checkpoints.best(criterion)
            best = criterion.best(rows.read(run_dir.evaluation))
            row = rows.last(run_dir.metrics) or {}
            if loss is None and row.get("step") == verdict.steps:
                loss = row.get("loss")  # this process may have been stopped when the step was sent
        return Summary(
            verdict,
            path,
            self._plan_context(),
            loss,
            (best["step"], criterion.name, best[criterion.name]) if best else None,
            (saved, located(run_dir.checkpoints.at(saved))) if saved >= 0 else None,
            commands.export(typed),
            (step_of(kept), located(kept)) if kept else None,
            commands.export_best(typed),
            commands.resume(typed, more) if is_there else "",
            self._options.resume_step,
            profiles,
        )

    def _plan_context(self) -> PlanContext | None:
        plan, options = self._plan, self._options
        if plan is None:
            return None
        return PlanContext(
            plan.bubble,
            len(plan.held) * plan.replicas,
            options.threads,
            len(os.sched_getaffinity(0)) if plan.hosts == 1 and plan.device == "cpu" else 0,
            sizes(plan.microbatches, options.replicas)[0] * options.accumulate,
            self._seconds / max(1, self._steps),
            plan.step_seconds,
            plan.busy_seconds,
        )

    def print(self, text: str) -> None:
        """Show lines that are neither a warning nor an error."""
        if not self._style.quiet:
            self.write(text)

    def write(self, text: str, *, error: bool = False) -> None:
        """Write lines to standard output, or to standard error."""
        self._attempt(
            lambda: print(text, file=self._error if error else self._out, flush=True), error=error
        )

    def _attempt(self, write: Callable[[], None], *, error: bool = False) -> None:
        """Write; report a failure, but do not raise it."""
        try:
            write()
        except OSError as failed:
            if failed.errno == errno.EIO:
                self.lost = self.lost or failed
                if not error and self._out is not self._error:
                    self._out = self._error
                    self.warn("standard output: its terminal is gone")
            elif not error and not self._refused:
                self._refused = True
                unread = "standard output: its reader is gone; the job continues without it"
                refused = str(RecordError("standard output", failed))
                self.warn(unread if failed.errno == errno.EPIPE else refused)

    def close(self) -> None:
        """Restore the terminal."""
