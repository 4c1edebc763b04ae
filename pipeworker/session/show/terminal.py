"""What the user sees of a job on a terminal: a bar, and everything else above it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeworker.session.show.figures import Figure, Worth, clock, counted, figures, fitting
from pipeworker.session.show.output import Said
from pipeworker.session.show.plain import Show
from pipeworker.wire.lines import Planned
from pipeworker.wire.messages.step import StepResult

_BAR = (12, 40)
"""Columns of the bar: the least, and the most."""
_ECHO = len("^C")
"""Columns for what the terminal writes behind the bar by itself."""
_WIDTH = 80
"""Of a terminal that does not say how wide it is."""


class TerminalShow(Show):
    """A bar with the last step's figures, under lines; and what the job draws anew, above it."""

    def __init__(self, *of_show: Any) -> None:
        super().__init__(*of_show)
        self._began = self._now()
        self._drawn: dict[str, str] = {}
        self._console = Console(file=self._out, width=self._width())
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: Group(*self._rows()),
        )

    def begin(self) -> None:
        self._write(lambda: self._live.start(refresh=True))

    def planned(self, plan: Planned) -> None:
        self.begin()
        super().planned(plan)

    def step(self, row: StepResult) -> None:
        if self._view.log_every is not None:
            super().step(row)

    def look(self) -> None:
        self._console.width = self._width()
        self._write(self._live.refresh)

    def line(self, text: str, *, error: bool = False) -> None:
        if self.gone or (error and not self._error.isatty()):
            super().line(text, error=error)
        else:
            self._write(lambda: self._console.out(text, highlight=False))

    def close(self) -> None:
        self._drawn.clear()
        self._write(self._live.stop)

    def _shows(self, said: Said) -> bool:
        """Whole lines above; those that are drawn anew with the bar."""
        if said.whole or not said.text:
            self._drawn.pop(said.mark, None)
        else:
            self._drawn[said.mark] = said.text
        return said.whole

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._out.fileno()).columns or _WIDTH
        except OSError:
            return _WIDTH

    def _rows(self) -> Iterator[RenderableType]:
        for mark, text in self._drawn.items():
            yield Text(f"{mark} {text}", no_wrap=True, overflow="ellipsis")
        least, most = _BAR
        total = self._total
        found = self._now_figures()
        if total:
            found.insert(1, Figure(" " * least, Worth.BAR))
        room = self._console.width - _ECHO
        kept = fitting(found, room)
        row = Table.grid(padding=(0, 2, 0, 0))
        cells: list[RenderableType] = []
        for figure in kept:
            if figure.worth is Worth.BAR:
                spare = room - sum(len(f.text) + 2 for f in kept) + 2
                done = self._last.step if self._last else self._options.resume_step
                width = min(most, least + spare)
                cells.append(ProgressBar(total, done, width=width))
            else:
                cells.append(Text(figure.text, no_wrap=True))
        row.add_row(*cells)
        yield row

    def _now_figures(self) -> list[Figure]:
        total, now = self._total, self._now()
        left = self._pace.left(now) if self._last and self._last.step != total else None
        time = clock(now - self._began) if left is None else f"{clock(left)} left"
        if self._last is not None:
            return figures(self._last, total, time, verbose=self._view.verbose)
        return [
            Figure(f"step {counted(self._options.resume_step, total)}", Worth.STEP),
            Figure("starting", Worth.LOSS),
            Figure(time, Worth.TIME),
        ]
