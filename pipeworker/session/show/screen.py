"""Shows a job in a thread of its own: a terminal that stands still, or a slow reader, holds up
neither the job nor who keeps it alive."""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path

from pipeworker.host import streams
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.session.show.output import Output
from pipeworker.session.show.plain import Show
from pipeworker.session.show.view import View
from pipeworker.wire.lines import Again, FromCoordinator, Planned, Verdict
from pipeworker.wire.messages.step import StepResult

_LOOK = 0.25
"""Seconds between two looks at what the job has printed."""
_HELD = 1.0
"""The same before there is a plan: what is printed is shown a look later."""
_NO_BAR = ("dumb", "unknown")
"""Terminals that cannot draw one."""
_MOST = 1 << 10
"""Steps that wait to be shown: those behind them are not."""


class Screen:
    """What the user sees; nothing here waits for them, but the end.

    Args:
        output: what the job prints.
    """

    def __init__(self, show: Show, output: Output) -> None:
        self._show = show
        self._output = output
        self._events: queue.SimpleQueue[FromCoordinator | None] = queue.SimpleQueue()
        self._looks = 0.0  # when it looks again
        self._reads = 0.0  # when it looks at logs again
        self._planned = False
        self._told = False
        self._thread = threading.Thread(target=self._run, name="screen", daemon=True)
        self._thread.start()

    def hear(self, event: FromCoordinator) -> None:
        """Show something, soon; a verdict, before this returns: it is the last.

        Raises:
            OSError: a terminal is gone; once.
        """
        if not (isinstance(event, StepResult) and self._events.qsize() > _MOST):
            self._events.put(event)
        if isinstance(event, Verdict):
            self._thread.join()
        if self._show.gone and not self._told:
            self._told = True
            raise self._show.gone

    def close(self) -> None:
        """Leave the terminal as it was; no more is shown. Idempotent."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        over = False
        while not over:
            try:
                event = self._events.get(timeout=max(0.0, self._looks - time.monotonic()))
            except queue.Empty:
                self._look()
                continue
            over = event is None or isinstance(event, Verdict)
            if event is not None:
                self._heard(event)
        self._show.close()

    def _look(self) -> None:
        """At what the job has printed."""
        now = time.monotonic()
        self._looks = now + _LOOK
        if self._planned or now >= self._reads:
            self._reads = now + _HELD
            self._show.printed(self._output.more(early=not self._planned))
        self._show.look()

    def _heard(self, event: FromCoordinator) -> None:
        if isinstance(event, Again | Verdict):  # the last words of who is gone come first
            if not (isinstance(event, Verdict) and event.own):  # it has what all were about to say
                self._show.printed(self._output.end())
        elif time.monotonic() >= self._looks or (
            self._planned and not isinstance(event, StepResult)
        ):
            self._look()
        if isinstance(event, Planned):
            self._planned = True
            self._output.of(len(event.balance))
        self._show.hear(event)


def screen(options: Options, run_dir: str, view: View, *, starting: bool = False) -> Screen:
    """Of a job whose user sees the standard output and error that this process has now.

    Args:
        starting: show that it is, before there is a plan.
    """
    out, error = streams.second(1), streams.second(2)
    kind: type[Show] = Show
    if out.isatty() and not view.quiet and os.environ.get("TERM") not in _NO_BAR:
        from pipeworker.session.show.terminal import TerminalShow  # rich takes its time

        kind = TerminalShow
    found = RunDir(Path(run_dir))
    output = Output(found, view.shows, options.stages, options.replicas, ours=view.verbose)
    show = kind(options, run_dir, view, out, error)
    if starting:
        show.begin()
    return Screen(show, output)
