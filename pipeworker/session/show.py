"""What the user sees of a running job: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import sys
from typing import TextIO

from pipeworker.errors import RecordError
from pipeworker.job.options import Options
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
from pipeworker.wire.messages import Evaluation, StepResult

_GONE = (errno.EPIPE, errno.EIO)  # a reader, a terminal


class Show:
    """Plain lines on standard output, one a step.

    That a file cannot take them is no reason to end a job; it is said once. A reader or a terminal
    that is gone raises OSError.
    """

    def __init__(
        self,
        options: Options,
        run_dir: str,
        out: TextIO | None = None,
        error: TextIO | None = None,
    ) -> None:
        self._options = options
        self._run_dir = run_dir
        self._out = out or sys.stdout
        self._error = error or sys.stderr
        self._theory = 0.0
        self._refused = False

    def hear(self, event: FromCoordinator) -> None:
        """Show one thing the coordinator says."""
        match event:
            case Planned():
                self.planned(event)
            case StepResult():
                self.step(event)
            case Evaluation():
                self.evaluation(event)
            case Warned():
                self.warning(event.text)
            case Verdict():
                self.ended(event)
            case Bound() | Joined() | Again() | Snapshot() | Beat():
                return
            case _:
                never(event)

    def planned(self, plan: Planned) -> None:
        self._theory = plan.bubble
        balance = ",".join(map(str, plan.balance))
        done = self._options.resume_step
        where = f"run directory {self._run_dir}{f', from step {done}' if done else ''}"
        copies = f"{plan.replicas} replicas of " if plan.replicas > 1 else ""
        self.line(
            f"{copies}{len(plan.balance)} stages ({balance} layers), {plan.microbatches} "
            f"micro-batches, {plan.schedule}; {where}"
        )

    def step(self, row: StepResult) -> None:
        self.line(f"step {row.step}  {_figures(row)}")

    def evaluation(self, evaluation: Evaluation) -> None:
        figures = "  ".join(f"{name} {value:.4f}" for name, value in evaluation.row().items())
        self.line(f"evaluation after step {evaluation.step}  {figures}")

    def warning(self, text: str) -> None:
        self.line(f"warning: {text}", error=True)

    def ended(self, verdict: Verdict) -> None:
        """The final summary, and the error if there is one."""
        self.close()
        if verdict.steps:
            what = "worker" if self._options.replicas > 1 else "stage"
            memory = ", ".join(f"{peak / 2**20:.0f}" for peak in verdict.peak_memory)
            self.line(
                f"{verdict.status}: {verdict.steps} steps in {verdict.seconds:.1f} s\n"
                f"bubble: {verdict.bubble:.1%} measured, {self._theory:.1%} by the schedule\n"
                f"peak memory by {what}: {memory} MiB\n"
                f"run directory: {self._run_dir}"
            )
        if verdict.error:
            self.line(f"error: {verdict.error}", error=True)
        elif verdict.status == "interrupted":
            self.line("interrupted", error=True)

    def line(self, text: str, *, error: bool = False) -> None:
        try:
            print(text, file=self._error if error else self._out, flush=True)
        except OSError as failed:
            if failed.errno in _GONE:
                raise
            if not error and not self._refused:
                self._refused = True
                self.warning(str(RecordError("standard output", failed)))

    def close(self) -> None:
        """Leave the terminal as it was."""


class TerminalShow(Show):
    """A progress bar with the last step's figures."""

    def __init__(self, options: Options, run_dir: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        super().__init__(options, run_dir)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            Elapsed(),
            console=Console(),
        )
        self._task = self._progress.add_task(
            "", total=options.steps, completed=options.resume_step, figures="starting"
        )
        self._progress.start()

    def planned(self, plan: Planned) -> None:
        super().planned(plan)
        self._progress.update(self._task, total=plan.steps or None)

    def step(self, row: StepResult) -> None:
        self._progress.update(self._task, completed=row.step, figures=_figures(row))

    def line(self, text: str, *, error: bool = False) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def show_for(options: Options, run_dir: str) -> Show:
    """A progress bar when standard output is a terminal."""
    kind = TerminalShow if sys.stdout.isatty() else Show
    return kind(options, run_dir)


def _figures(row: StepResult) -> str:
    return f"loss {row.loss:.4f}  {row.samples_per_second:.1f} samples/s  bubble {row.bubble:.1%}"
