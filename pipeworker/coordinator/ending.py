"""How a generation ends, and which of several failure reports is the cause. Pure.

A closed channel and a signal from outside are *secondary failures*: they wait for a grace period
for the report of the cause behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from pipeworker.coordinator.roster import Roster
from pipeworker.facts.failure import Cause, Failure
from pipeworker.wire.lines import WorkerExited


class Status(Enum):
    """The outcome of a job; it is lost if its launcher was killed or did not answer."""

    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The job ends with this generation."""

    status: Status
    exit_status: int
    failure: Failure | None = None


INTERRUPTED = JobEnd(Status.INTERRUPTED, 130)
"""The end of a job that the user stopped."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone, for a reason that need not occur again: the job may restart.

    Attributes:
        stops: whether it has held up the end of a job that the user stopped.
    """

    failure: Failure
    stops: bool = False


End = JobEnd | Lost
"""The end of a generation: that of the job, or a reason to restart."""


@dataclass(slots=True)
class FirstCause:
    """The secondary failures of a generation, the ranks that reported them, and their cause."""

    roster: Roster
    reporters: set[int] = field(default_factory=set)
    _pending: tuple[Failure, float] | None = None

    def report(self, failure: Failure, now: float) -> Failure | None:
        """Return `failure` if it is a cause; keep it and return None if it is secondary."""
        if failure.cause not in (Cause.PEER, Cause.SIGNAL):
            return failure
        self.reporters.add(failure.rank)
        if self._pending is None:
            self._pending = failure, now + self.roster.timings.grace
        return None

    def suspended(self, seconds: float) -> None:
        """Extend the grace period by the time for which the coordinator was suspended."""
        if self._pending is not None:
            failure, until = self._pending
            self._pending = failure, until + seconds

    def worker_exited(self, report: WorkerExited) -> Failure:
        """Return the failure behind an unexpected exit: the signal the worker reported, if any."""
        pending = self._pending[0] if self._pending else None
        if pending and pending.rank == report.rank and pending.cause is Cause.SIGNAL:
            return replace(pending, cause=Cause.LOST)
        return self.roster.worker_exited(report)

    def expired(self, now: float) -> Failure | None:
        """Return the cause once the grace period of a secondary failure has ended, else None.

        The likely cause is a rank that has fallen silent without a report. Without one, a signal is
        returned unchanged: all workers were asked to end.
        """
        if self._pending is None or now < self._pending[1]:
            return None
        pending, _ = self._pending
        silent = [rank for rank in self.roster.silent(now) if rank not in self.reporters]
        if silent:
            return self.roster.members[silent[0]].gone()
        if pending.cause is Cause.SIGNAL:
            return pending
        return replace(pending, message=f"{pending.message}; no worker reported a cause")
