"""What the user sees of a job: plain lines."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TextIO

from pipeworker.errors import RecordError
from pipeworker.job.given import by_origin
from pipeworker.job.options import Options
from pipeworker.plan.shares import sizes
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir
from pipeworker.session.show.ending import Ending, Measured
from pipeworker.session.show.figures import GAP, Figure, Pace, clock, evaluated, figures
from pipeworker.session.show.output import Said, visible
from pipeworker.session.show.view import View, typed
from pipeworker.wire.lines import (
    Again,
    Beat,
    Bound,
    FromCoordinator,
    Joined,
    Planned,
    Snapshot,
    Verdict,
    Warned,
    never,
)
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.step import StepResult

_SECONDS = 1.0
"""Between two lines of steps, and of one that the job draws anew."""


class Show:
    """Plain lines on standard output, at most one a second of steps, and the first and the last.

    That a file or a pipe does not take them is no reason to end a job; it is said once. Where a
    terminal is gone, standard error has what is still to be said.

    Args:
        out, error: where lines, and warnings and errors, go; None for this process's own.
        now: a clock.

    Attributes:
        gone: how it shows that a terminal is gone.
    """

    def __init__(
        self,
        options: Options,
        run_dir: str,
        view: View | None = None,
        out: TextIO | None = None,
        error: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._run_dir = run_dir
        self._view = view or View()
        self._out = out or sys.stdout
        self._error = error or sys.stderr
        self._now = now
        self.gone: OSError | None = None
        self._refused = False
        self._warned: set[str] = set()
        self._plan: Planned | None = None
        self._total = options.steps  # None where nobody knows
        self._pace = Pace(self._total)
        self._first = options.resume_step + 1
        self._held: StepResult | None = None  # it may be the last
        self._last: StepResult | None = None
        self._shown_at = -math.inf
        self._drawn_at: dict[str, float] = {}
        self._seconds, self._steps = 0.0, 0

    def hear(self, event: FromCoordinator) -> None:
        """Show one thing the coordinator says."""
        match event:
            case Planned():
                self.planned(event)
            case StepResult():
                self._seconds, self._steps = self._seconds + event.seconds, self._steps + 1
                self._last = event
                self._pace.seen(event.step, self._now())
                self.step(event)
            case Evaluation():
                if self._view.log_every is None:
                    self._let_out()
                self.say(evaluated(event))
            case Warned():
                self.warning(event.text, "note" if event.note else "warning")
            case Verdict():
                self._let_out()
                self.ended(event)
            case Bound() | Joined() | Again() | Snapshot() | Beat():
                return  # nothing that a user would want to know
            case _:
                never(event)

    def begin(self) -> None:
        """Show that the job is starting."""

    def planned(self, plan: Planned) -> None:
        """What runs, and how, also where that was not said; again when the stages are others."""
        before, self._plan = self._plan, plan
        self._total = plan.steps or None
        self._pace = Pace(self._total)
        if before and before.balance == plan.balance:
            return
        options, done = self._options, self._options.resume_step
        asked = f" (not {options.microbatches}: a mini-batch has no more samples)"
        fewer = asked if plan.microbatches < options.microbatches else ""
        where = f"run directory {self._run_dir}{f', from step {done}' if done else ''}"
        copies = f"{plan.replicas} replicas of " if plan.replicas > 1 else ""
        balance, stages = ",".join(map(str, plan.balance)), len(plan.balance)
        counted = f"{stages} stage{'s' if stages > 1 else ''}"
        self.say(
            f"{copies}{counted} ({balance} layers), {plan.microbatches} "
            f"micro-batches{fewer}, {plan.schedule}; {where}"
        )
        steps = f"{self._total} steps" if self._total else ""
        if passes := options.passes:
            over = "one pass over the data" if passes == 1 else f"{passes} epochs"
            steps = f"{over} ({steps})" if steps else over
        threads = f"{options.threads} thread{'s' if options.threads > 1 else ''} a worker"
        self.say(f"seed {options.seed}, {steps}, {threads}, {plan.device}, {options.precision}")
        for line in by_origin(self._view.origins, dataclasses.asdict(options)):
            self.say(f"from {line}")

    def step(self, row: StepResult) -> None:
        """A line, if it is time for one."""
        every = self._view.log_every
        self._held = row
        due = row.step % every == 0 if every else self._is_time
        if due or row.step in (self._first, self._total):
            self._let_out()

    def _let_out(self) -> None:
        """The line that was held back."""
        if self._held is not None:
            row, self._held = self._held, None
            self._shown_at = self._now()
            self.say(GAP.join(f.text for f in self._figures(row)))

    def _figures(self, row: StepResult) -> list[Figure]:
        left = self._pace.left(self._now())
        time = f"{clock(left)} left" if left else ""
        return figures(row, self._total, time, verbose=self._view.verbose)

    def look(self) -> None:
        """Time has passed: what was held back may be shown now."""
        if self._view.log_every is None and self._is_time:
            self._let_out()

    @property
    def _is_time(self) -> bool:
        return self._now() - self._shown_at >= _SECONDS

    def printed(self, printed: Iterable[Said]) -> None:
        """What the job has printed since: all at once, for each time takes its time."""
        lines = [f"{said.mark} {said.text}" for said in printed if self._shows(said)]
        if lines:
            self.line("\n".join(lines))

    def _shows(self, said: Said) -> bool:
        """All whole lines; those that are drawn anew once a second."""
        if said.whole:
            return True
        if not said.text or self._now() - self._drawn_at.get(said.mark, -math.inf) < _SECONDS:
            return False
        self._drawn_at[said.mark] = self._now()
        return True

    def warning(self, text: str, kind: str = "warning") -> None:
        """Once, however often it is said."""
        if text not in self._warned:
            self._warned.add(text)
            self.line(visible(f"{kind}: {text}"), error=True)

    def ended(self, verdict: Verdict) -> None:
        """The final summary, and the error if there is one."""
        self.close()
        if lines := self._ending(verdict).lines():
            self.say("\n".join(lines))
        if verdict.own:  # in its own words
            self.line(visible(verdict.error or ""), error=bool(verdict.exit_status))
        elif verdict.error:
            self.line(visible(f"error: {verdict.error}"), error=True)
        elif verdict.status == "interrupted":
            self.line("interrupted", error=True)

    def _ending(self, verdict: Verdict) -> Ending:
        found, ways, run_dir = RunDir(Path(self._run_dir)), self._view.ways, typed(self._run_dir)
        further = ("steps", 2 * verdict.steps)
        if self._options.epochs:
            further = ("epochs", 2 * self._options.epochs)
        return Ending(
            verdict,
            self._run_dir,
            self._measured(),
            self._options.replicas,
            self._loss_after(verdict.steps),
            best_of(found),
            newest_of(found),
            ways.export(run_dir),
            ways.resume(run_dir, further if verdict.status == "done" else None),
            self._options.resume_step,
        )

    def _loss_after(self, step: int) -> float | None:
        """Of the last step, which was not heard of if this process or its terminal stood still."""
        if self._last and self._last.step == step:
            return self._last.loss
        return loss_of(RunDir(Path(self._run_dir)), step)

    def _measured(self) -> Measured | None:
        plan, options = self._plan, self._options
        if plan is None:
            return None
        return Measured(
            plan.bubble,
            len(plan.balance) * options.replicas,
            options.threads,
            _cores() if plan.hosts == 1 and plan.device == "cpu" else 0,
            sizes(plan.microbatches, options.replicas)[0],
            self._seconds / max(1, self._steps),
        )

    def say(self, text: str) -> None:
        """A line that is no warning and no error."""
        if not self._view.quiet:
            self.line(text)

    def line(self, text: str, *, error: bool = False) -> None:
        self._write(
            lambda: print(text, file=self._error if error else self._out, flush=True), error=error
        )

    def _write(self, write: Callable[[], None], *, error: bool = False) -> None:
        """Have something written; that it cannot be is no exception."""
        try:
            write()
        except OSError as failed:
            if failed.errno == errno.EIO:
                self.gone = self.gone or failed
                if not error and self._out is not self._error:
                    self._out = self._error
                    self.warning("nobody reads standard output any more")
            elif not error and not self._refused:
                self._refused = True
                unread = "nobody reads standard output any more: the job goes on without it"
                refused = str(RecordError("standard output", failed))
                self.warning(unread if failed.errno == errno.EPIPE else refused)

    def close(self) -> None:
        """Leave the terminal as it was."""


def best_of(run_dir: RunDir) -> tuple[int, float] | None:
    """The step and the loss of the best evaluation on record; None where there is none."""
    try:
        row = rows.best(run_dir.evaluation)
    except OSError:
        return None
    return (row["step"], row["loss"]) if row else None


def loss_of(run_dir: RunDir, step: int) -> float | None:
    """Of a step, if it is the last one on record."""
    try:
        row = rows.last(run_dir.metrics)
    except OSError:
        return None
    loss = row.get("loss") if row and row["step"] == step else None
    return loss if isinstance(loss, float) else None


def newest_of(run_dir: RunDir) -> tuple[int, str] | None:
    """The step of the newest checkpoint, and where it is; None where there is none."""
    try:
        step = run_dir.last_saved()
    except OSError:
        return None
    return (step, str(run_dir.checkpoint(step))) if step >= 0 else None


def _cores() -> int:
    """Those this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 0
