"""Displays a job in a thread of its own.

So a stopped terminal or a slow reader delays neither the job nor the thread that keeps it alive.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from pipeworker.display.events import EventDisplay
from pipeworker.display.lines import LineDisplay
from pipeworker.display.output import WorkerOutput
from pipeworker.display.style import Style, is_dumb
from pipeworker.facts.step import StepResult
from pipeworker.host import streams
from pipeworker.job.options import Options
from pipeworker.plan.placement import Placement
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import FromCoordinator, Planned, Restart, Verdict

_READ_SECONDS = 0.25
"""Between two reads of what the workers print."""
_STARTING_READ_SECONDS = 1.0
"""The same before there is a plan; output is then shown one read later."""
_MAX_QUEUED = 1 << 10
"""Events that may wait to be shown; steps beyond them are left out."""


class DisplayThread:
    """Shows events and workers' output; only :meth:`close` and a verdict wait for the terminal.

    It closes the `files` of the display at its end.
    """

    def __init__(
        self, display: LineDisplay, output: WorkerOutput, files: Sequence[TextIO] = ()
    ) -> None:
        self._display = display
        self._output = output
        self._files = files
        self._events: deque[FromCoordinator | None] = deque()
        self._due = threading.Event()
        """Set if one of the events cannot wait until the next tick."""
        self._next_tick = 0.0
        self._next_read = 0.0
        self._is_planned = False
        self._reported_loss = False
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)
        self._thread.start()

    def show(self, event: FromCoordinator) -> None:
        """Show an event soon; a verdict, which is the last event, before this call returns.

        A step waits for the next tick, because waking the thread takes as long as all else that the
        launcher does for a step.

        Raises:
            OSError: the terminal has been lost; raised once.
        """
        is_step = isinstance(event, StepResult)
        if not (is_step and len(self._events) > _MAX_QUEUED):
            self._events.append(event)
        if not is_step:
            self._due.set()
        if isinstance(event, Verdict):
            self._thread.join()
        if self._display.lost and not self._reported_loss:
            self._reported_loss = True
            raise self._display.lost

    def close(self) -> None:
        """Restore the terminal and show nothing more. Idempotent."""
        self._events.append(None)
        self._due.set()
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            self._due.wait(max(0.0, self._next_tick - time.monotonic()))
            self._due.clear()
            while self._events and not over:
                event = self._events.popleft()
                over = event is None or isinstance(event, Verdict)
                if event is not None:
                    self._show(event)
            if not over and time.monotonic() >= self._next_tick:
                self._tick()
        self._display.close()
        for file in self._files:
            with suppress(OSError):  # the terminal may be gone
                file.close()

    def _tick(self) -> None:
        """Show what the workers have printed, and lines that were held back."""
        now = time.monotonic()
        self._next_tick = now + _READ_SECONDS
        if self._is_planned or now >= self._next_read:
            self._next_read = now + _STARTING_READ_SECONDS
            self._display.show_output(self._output.read(delayed=not self._is_planned))
        self._display.tick()

    def _show(self, event: FromCoordinator) -> None:
        if isinstance(event, Restart | Verdict):  # the last output of the workers comes first
            quoted = isinstance(event, Verdict) and event.job_exited  # the verdict has that output
            if not quoted:
                self._display.show_output(self._output.flush())
        elif time.monotonic() >= self._next_tick or (
            self._is_planned and not isinstance(event, StepResult)
        ):
            self._tick()
        if isinstance(event, Planned):
            self._is_planned = True
            self._output.follow(Placement(event.held, event.replicas))
        self._display.show(event)


def start_display(
    options: Options, run_dir: RunDir, style: Style, *, starting: bool = False
) -> DisplayThread:
    """Display a job on this process's present standard output and error.

    `starting` shows at once that workers are started, before there is a plan.
    """
    out, error = streams.duplicate(1), streams.duplicate(2)
    kind: type[LineDisplay] = LineDisplay
    if style.json:
        kind = EventDisplay
    elif out.isatty() and not style.quiet and not is_dumb():
        from pipeworker.display.terminal import TerminalDisplay  # rich takes 0.1 s to import

        kind = TerminalDisplay
    output = WorkerOutput(run_dir, style.shown_output, options.placement, ours=style.verbose)
    display = kind(options, run_dir, style, out, error)
    if starting:
        display.begin()
    return DisplayThread(display, output, (out, error))
