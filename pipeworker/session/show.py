"""What the user sees of a running job: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from pipeworker.job.options import Options


class Show:
    """Plain lines on standard output, one a step."""

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

    def hear(self, kind: str, value: Any) -> None:
        """Show one thing the coordinator says."""
        shown: Callable[[Any], None] | None = getattr(self, kind, None)
        if shown is not None:
            shown(value)

    def planned(self, plan: dict[str, Any]) -> None:
        self._theory = plan["bubble"]
        balance = ",".join(map(str, plan["balance"]))
        self.line(
            f"{len(plan['stages'])} stages ({balance} layers), "
            f"{plan['microbatches']} micro-batches, {plan['schedule']}; run directory "
            f"{self._run_dir}"
        )

    def step(self, row: dict[str, Any]) -> None:
        self.line(f"step {row['step']}  {_figures(row)}")

    def evaluation(self, row: dict[str, Any]) -> None:
        figures = "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k != "step")
        self.line(f"evaluation after step {row['step']}  {figures}")

    def warning(self, text: str) -> None:
        self.line(f"warning: {text}", error=True)

    def ended(self, verdict: dict[str, Any]) -> None:
        """The final summary, and the error if there is one."""
        self.close()
        if verdict["steps"]:
            memory = ", ".join(f"{peak / 2**20:.0f}" for peak in verdict["peak_memory_bytes"])
            self.line(
                f"{verdict['status']}: {verdict['steps']} steps in {verdict['seconds']:.1f} s\n"
                f"bubble: {verdict['bubble']:.1%} measured, {self._theory:.1%} by the schedule\n"
                f"peak memory by stage: {memory} MiB\n"
                f"run directory: {self._run_dir}"
            )
        if verdict["error"]:
            self.line(f"error: {verdict['error']}", error=True)
        elif verdict["status"] == "interrupted":
            self.line("interrupted", error=True)

    def line(self, text: str, *, error: bool = False) -> None:
        print(text, file=self._error if error else self._out, flush=True)

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
        self._task = self._progress.add_task("", total=options.steps, figures="starting")
        self._progress.start()

    def step(self, row: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=row["step"], figures=_figures(row))

    def line(self, text: str, *, error: bool = False) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def show_for(options: Options, run_dir: str) -> Show:
    """A progress bar when standard output is a terminal."""
    kind = TerminalShow if sys.stdout.isatty() else Show
    return kind(options, run_dir)


def _figures(row: dict[str, Any]) -> str:
    return (
        f"loss {row['loss']:.4f}  {row['samples_per_second']:.1f} samples/s  "
        f"bubble {row['bubble']:.1%}"
    )
