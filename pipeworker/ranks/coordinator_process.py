"""The coordinator of a job whose ranks pipeworker did not start: a child process of rank 0."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError
from pipeworker.facts.step import StepResult
from pipeworker.host.hook_process import HookProcess
from pipeworker.host.line_process import start_coordinator
from pipeworker.record.run_record import summary_problem
from pipeworker.runs.begin import PreparedRun
from pipeworker.wire import lines

EventListener = Callable[[lines.FromCoordinator], None]
"""Receives the coordinator's events; a verdict is the last one."""
REPORTED_BY_CALLER = lines.Verdict("failed", 1, 0, 0.0, (), 0.0, None)
"""The verdict for a listener of a job whose failure the caller reports by raising an error."""


def failure_text(error: BaseException) -> str:
    """Return why a job has not started."""
    if isinstance(error, PipeworkerError):
        return str(error)
    if isinstance(error, Exception):
        return f"rank 0 cannot start the job: {type(error).__name__}: {error}"
    return f"rank 0 was interrupted by {type(error).__name__}"


class CoordinatorProcess:
    """Rank 0's coordinator: a child process, and a thread that forwards its events to `on_event`.

    It listens on the address `host`; `endpoint` has the port too. :meth:`finish` closes the run.

    Raises:
        PipeworkerError: the coordinator did not start.
    """

    def __init__(self, run: PreparedRun, token: str, host: str, on_event: EventListener) -> None:
        self._on_event = on_event
        self._run = run
        self._started = time.monotonic()
        self._steps = run.options.resume_step
        self._verdict: lines.Verdict | None = None
        self._last_heard = self._started
        self._listener_failed = False
        self._hooks = HookProcess(run.options, run.run_dir)
        options, run_dir = run.options.to_json(), str(run.run_dir.path)
        process = None
        try:
            process = self._process = start_coordinator()
            self._process.send(lines.Configuration(options, run_dir, token, host, parent_rank=0))
            self.endpoint, begun = self._wait_for_endpoint()
        except BaseException as error:  # an interrupt too
            if process is not None:
                process.close_input()
                process.wait(timings().exit)
            self._record_failure(1, failure_text(error))
            run.close()
            self._notify(REPORTED_BY_CALLER)
            raise
        self._thread = threading.Thread(
            target=self._forward, args=(begun,), name="coordinator", daemon=True
        )
        self._thread.start()

    def _wait_for_endpoint(self) -> tuple[str, Sequence[lines.FromCoordinator]]:
        """Return the endpoint, and the events that came behind it; forward those before it."""
        error, more = "the coordinator did not start: see its log in the run directory", True
        while more:
            events, more = self._process.receive()
            for place, event in enumerate(events, 1):
                if isinstance(event, lines.Bound):
                    return event.endpoint, events[place:]
                if isinstance(event, lines.Verdict):
                    error, more = event.error or event.status, False
                else:  # a warning, as of a log that cannot be written
                    self._notify(event)
        self._process.wait(timings().exit)
        raise PipeworkerError(error)

    def _forward(self, events: Sequence[lines.FromCoordinator]) -> None:
        """Forward events, and all that the coordinator sends after them."""
        more = True
        while True:
            for event in events:
                if isinstance(event, lines.Verdict):
                    self._verdict = event
                    self._hooks.finish(self._notify, event)
                if isinstance(event, lines.Planned):
                    self._hooks.start(event.hooks)
                if isinstance(event, StepResult):
                    self._steps = event.step
                self._notify(event)
            for warning in self._hooks.warnings():
                self._notify(warning)
            if not more:
                return
            events, more = self._process.receive()
            self._last_heard = time.monotonic()

    def _notify(self, event: lines.FromCoordinator) -> None:
        """Forward an event; the loss of the terminal ends the job as an interrupt does."""
        try:
            self._on_event(event)
        except OSError:
            if not self._listener_failed and self._verdict is None:
                self._process.send(lines.Interrupt())
            self._listener_failed = True

    def abort(self, rank: int, reason: str) -> None:
        """End the job because a rank cannot join it; the caller raises the reason as an error."""
        self._notify(REPORTED_BY_CALLER)
        self._listener_failed, self._on_event = True, lambda _: None
        self._process.send(lines.CannotStart(rank, 1, reason))
        self.finish(1)

    def finish(self, status: int) -> int:
        """Wait for the verdict and the coordinator's end; return the exit status of the job.

        That is `status`, or 1, if the coordinator ends without a verdict.
        """
        self._wait_for_verdict(keeps_alive=not status)
        if self._verdict is not None:  # the hooks may take longer, up to a limit
            self._thread.join()
        hangs = self._thread.is_alive()
        self._hooks.kill()
        self._process.close_input()
        self._process.wait(timings().exit)
        if self._verdict is None:
            how = "has not answered" if hangs else "was killed"
            error = f"the coordinator (pid {self._process.pid}) {how}"
            self._notify(self._record_failure(status or 1, error))
        assert self._verdict
        self._run.close(self._verdict)
        return self._verdict.exit_status

    def _wait_for_verdict(self, *, keeps_alive: bool) -> None:
        """Wait for the verdict, or for the time in which it should arrive.

        A coordinator that has sent `Finish` may still wait for the disk: if it `keeps_alive`, that
        time begins again with each of its lines.
        """
        since = time.monotonic()
        while self._verdict is None and self._thread.is_alive():
            last = max(since, self._last_heard) if keeps_alive else since
            if time.monotonic() - last > timings().verdict:
                return
            self._thread.join(timings().poll)

    def _record_failure(self, status: int, error: str) -> lines.Verdict:
        """Write the summary in place of the coordinator; return its verdict."""
        seconds, placement = time.monotonic() - self._started, self._run.options.placement
        peaks = (0,) * placement.ranks
        verdict = lines.Verdict("failed", status, self._steps, seconds, peaks, 0.0, error)
        self._verdict = verdict
        run = self._run
        if problem := summary_problem(run.run_dir, verdict, placement.stages, run.options.best):
            self._notify(lines.Warned(problem))
        return verdict
