"""The progress of a job that another process runs: a bar in a notebook or a terminal, or lines."""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from typing import Any

from pipeworker.display.figures import GAP, Figure, Pace, Rank, figures, step_of
from pipeworker.display.style import Style
from pipeworker.display.text import duration
from pipeworker.facts.step import StepResult

_SECONDS = {True: 0.25, False: 1.0}
"""Between two states of a bar, and between two lines."""
_BAR, _NOTEBOOK = 30, 100
"""Columns of the bar itself, and of all that is shown in a notebook."""


class JobProgress:
    """The progress of a job; a quiet `style` shows nothing.

    In the output of a `notebook`'s cell rich renders the bar as HTML, in place of the earlier one.
    """

    def __init__(self, style: Style, *, notebook: bool) -> None:
        self.quiet, self._style, self._notebook = style.quiet, style, notebook
        self._log_every = style.log_every
        self._is_bar = notebook or sys.stdout.isatty()
        self._handle: Any = None
        self._live: Any = None
        self._total: int | None = None
        self._first, self._done = 1, 0
        self._pace = Pace(None)
        self._row: StepResult | None = None
        self._shown_at, self._shown = 0.0, 0

    def plan(self, total: int | None, first: int, log_every: int | None = None) -> None:
        """Begin to show steps from `first`, of `total` if known; continue after a recovery.

        The job's own `log_every` replaces that of the style: a file of defaults may have given it.
        """
        self._log_every = log_every or self._log_every
        self._total, self._first, self._pace = total, first, Pace(total)
        self._done = max(self._done, first - 1)
        self._draw([Figure(step_of(self._done, total), Rank.STEP), Figure("starting", Rank.LOSS)])

    def step(self, row: StepResult) -> None:
        """Show a step, unless another state was shown a moment ago or its line is not due."""
        now, every = time.monotonic(), self._log_every
        self._row, self._done = row, row.step
        self._pace.add(row.step, now)
        due = now - self._shown_at >= _SECONDS[self._is_bar]
        if every:
            logged = row.step % every == 0 or row.step == self._first
            if not self._is_bar:
                due = logged
            elif logged:
                self.line(_text(self._figures(row, now)))
        if due or row.step == self._total:
            self._show_row(now)

    def line(self, text: str, *, error: bool = False) -> None:
        """Print a line above the bar."""
        if not self.quiet or error:
            print(text, file=sys.stderr if error else sys.stdout, flush=True)

    def close(self) -> None:
        """Show the last step and stop."""
        if self._row is not None and self._row.step != self._shown:
            self._show_row(time.monotonic())
        if self._live is not None:
            self._live.stop()

    def _show_row(self, now: float) -> None:
        assert self._row is not None
        self._shown_at, self._shown = now, self._row.step
        self._draw(self._figures(self._row, now))

    def _figures(self, row: StepResult, now: float) -> list[Figure]:
        left = self._pace.remaining(now) if row.step != self._total else None
        time_left = f"{duration(left)} left" if left else ""
        return figures(row, self._total, time_left, verbose=self._style.verbose)

    def _draw(self, found: list[Figure]) -> None:
        if self.quiet:
            return
        if not self._is_bar:
            self.line(_text(found))
            return
        from pipeworker.display.terminal import bar_row

        width = _NOTEBOOK if self._notebook else shutil.get_terminal_size().columns - 1
        drawn = bar_row(found, self._done, self._total, width, (_BAR, _BAR))
        if self._notebook:
            if self._handle is None:
                ipython: Any = importlib.import_module("IPython.display")
                self._handle = ipython.display(drawn, display_id=True)
            else:
                self._handle.update(drawn)
            return
        if self._live is None:
            from rich.live import Live

            self._live = Live(drawn, auto_refresh=False)
            self._live.start()
        self._live.update(drawn, refresh=True)


def _text(found: list[Figure]) -> str:
    return GAP.join(figure.text for figure in found)
