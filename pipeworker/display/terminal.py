"""A job on a terminal: a progress bar at the bottom, and everything else above it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeworker.display.figures import Figure, Rank, evaluating, figures, fitting, step_of
from pipeworker.display.lines import LineDisplay
from pipeworker.display.output import Printed
from pipeworker.display.text import duration
from pipeworker.facts.step import StepResult
from pipeworker.wire.lines import Planned

_BAR = (12, 40)
"""The fewest and the most columns of the bar."""
_ECHO = len("^C")
"""Columns for what the terminal itself writes after the bar."""
_WIDTH = 80
"""Columns of a terminal that does not report its width."""


def bar_row(
    found: list[Figure], done: int, total: int | None, room: int, bar: tuple[int, int]
) -> Table:
    """Return those of the figures that fit in `room` columns, with a bar if a total is known.

    `bar` is the fewest and the most columns of the bar.
    """
    least, most = bar
    if total:
        found = [found[0], Figure(" " * least, Rank.BAR), *found[1:]]
    shown = fitting(found, room)
    spare = room - sum(len(f.text) + 2 for f in shown) + 2
    drawn = ProgressBar(total, done, width=min(most, least + spare))
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(*(drawn if f.rank is Rank.BAR else Text(f.text, no_wrap=True) for f in shown))
    return row


class TerminalDisplay(LineDisplay):
    """A bar with the last step's figures, below the lines; redrawn output of the job above it."""

    def __init__(self, *of_lines: Any) -> None:
        super().__init__(*of_lines)
        self._began = self._now()
        self._redrawn: dict[str, str] = {}
        self._console = Console(file=self._out, width=self._width())
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: Group(*self._rows()),
        )

    def begin(self) -> None:
        self._attempt(lambda: self._live.start(refresh=True))

    def _planned(self, plan: Planned) -> None:
        self.begin()
        super()._planned(plan)

    def _step(self, row: StepResult) -> None:
        if self._style.log_every is not None:
            super()._step(row)

    def tick(self) -> None:
        self._console.width = self._width()
        self._attempt(self._live.refresh)

    def write(self, text: str, *, error: bool = False) -> None:
        if self.lost or (error and not self._error.isatty()):
            super().write(text, error=error)
        else:
            self._attempt(lambda: self._console.out(text, highlight=False))

    def close(self) -> None:
        self._redrawn.clear()
        self._attempt(self._live.stop)

    def _accepts(self, printed: Printed) -> bool:
        """Return whether to print it above the bar: whole lines. The bar shows redrawn ones."""
        if printed.whole or not printed.text:
            self._redrawn.pop(printed.mark, None)
        else:
            self._redrawn[printed.mark] = printed.text
        return printed.whole

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns or _WIDTH
        except OSError:
            return _WIDTH

    def _rows(self) -> Iterator[RenderableType]:
        for mark, text in self._redrawn.items():
            yield Text(f"{mark} {text}", no_wrap=True, overflow="ellipsis")
        room = self._console.width - _ECHO
        done = self._last.step if self._last else self._options.resume_step
        yield bar_row(self._current_figures(), done, self._total, room, _BAR)

    def _current_figures(self) -> list[Figure]:
        total, now = self._total, self._now()
        left = self._pace.remaining(now) if self._last and self._last.step != total else None
        time = duration(now - self._began) if left is None else f"{duration(left)} left"
        doing = evaluating(self._activity)
        if self._last is not None:
            verbose, memory = self._style.verbose, self._activity.memory
            found = figures(self._last, total, time, verbose=verbose, memory=memory)
            return [found[0], Figure(doing, Rank.LOSS), *found[1:]] if doing else found
        return [
            Figure(step_of(self._options.resume_step, total), Rank.STEP),
            Figure(doing or "starting", Rank.LOSS),
            Figure(time, Rank.TIME),
        ]
