"""Rank 0's side of the coordinator, which it starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pipeworker.environment import timings
from pipeworker.errors import PipeworkerError, RecordError
from pipeworker.record.rundir import write_summary
from pipeworker.session.begin import Begun
from pipeworker.session.processes import coordinator
from pipeworker.wire.lines import (
    Bound,
    CannotStart,
    Configuration,
    FromCoordinator,
    Interrupt,
    Verdict,
    Warned,
)
from pipeworker.wire.messages.step import StepResult

Hear = Callable[[FromCoordinator], None]
"""Is given what the coordinator says; a verdict is the last."""
UNSAID = Verdict("failed", 1, 0, 0.0, (), 0.0, None)
"""That it is over: who calls says why."""


class Head:
    """Rank 0's coordinator: a child process, and a thread that passes on what it says."""

    def __init__(self, begun: Begun, token: str, host: str, hear: Hear) -> None:
        self._hear = hear
        self._begun = begun
        self._started = time.monotonic()
        self._steps = begun.options.resume_step
        self._verdict: Verdict | None = None
        self._unheard = False
        options, run_dir = begun.options.to_json(), str(begun.run_dir.path)
        try:
            self._coordinator = coordinator()
            self._coordinator.say(Configuration(options, run_dir, token, host, starter=0))
            self.endpoint = self._bound()
        except PipeworkerError as error:
            self._conclude(1, str(error))
            begun.close()
            self._tell(UNSAID)
            raise
        self._listener = threading.Thread(target=self._listen, name="coordinator", daemon=True)
        self._listener.start()

    def _bound(self) -> str:
        while True:
            events, more = self._coordinator.hear()
            for event in events:
                if isinstance(event, Bound):
                    return event.endpoint
                if isinstance(event, Verdict):
                    self._coordinator.finish(timings().leave)
                    raise PipeworkerError(event.error or event.status)
            if not more:
                self._coordinator.finish(timings().leave)
                raise PipeworkerError(
                    "the coordinator did not start: see its log in the run directory"
                )

    def _listen(self) -> None:
        """Pass on what the coordinator says until it ends."""
        more = True
        while more:
            events, more = self._coordinator.hear()
            for event in events:
                if isinstance(event, Verdict):
                    self._verdict = event
                if isinstance(event, StepResult):
                    self._steps = event.step
                self._tell(event)

    def _tell(self, event: FromCoordinator) -> None:
        """Show something; a terminal that is gone ends the job as an interrupt does."""
        try:
            self._hear(event)
        except OSError:
            if not self._unheard and self._verdict is None:
                self._coordinator.say(Interrupt())
            self._unheard = True

    def give_up(self, rank: int, why: str) -> None:
        """End the job, which this rank cannot join; who calls says why, and the record has it."""
        self._tell(UNSAID)
        self._unheard, self._hear = True, lambda _: None
        self._coordinator.say(CannotStart(rank, 1, why))
        self.finish(1)

    def finish(self, status: int) -> int:
        """Let the coordinator speak its verdict and end; returns the job's exit status.

        Args:
            status: what it is when there is no verdict.
        """
        self._listener.join(timings().verdict)
        silent = self._listener.is_alive()
        self._coordinator.hang_up()
        self._coordinator.finish(timings().leave)
        if self._verdict is None:
            how = "has not answered" if silent else "was killed"
            self._say_ourselves(status or 1, f"the coordinator (pid {self._coordinator.pid}) {how}")
        assert self._verdict
        self._begun.close(self._verdict)
        return self._verdict.exit_status

    def _say_ourselves(self, status: int, error: str) -> None:
        """The verdict that the coordinator could not speak."""
        self._tell(self._conclude(status, error))

    def _conclude(self, status: int, error: str) -> Verdict:
        """Write the summary that the coordinator could not write."""
        seconds, options = time.monotonic() - self._started, self._begun.options
        workers = options.stages * options.replicas
        verdict = Verdict("failed", status, self._steps, seconds, (0,) * workers, 0.0, error)
        self._verdict = verdict
        try:
            write_summary(self._begun.run_dir, verdict, options.stages)
        except OSError as failed:
            self._tell(Warned(str(RecordError(self._begun.run_dir.summary, failed))))
        return verdict
