"""Which of several reports is the cause. Pure.

A closed channel and a signal from outside are *echoes*: they wait for the cause behind them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeworker.coordinator.roster import Roster
from pipeworker.wire.lines import WorkerExited
from pipeworker.wire.messages.failure import Cause, Failure


@dataclass(slots=True)
class FirstCause:
    """The echoes of a generation, and what is behind them."""

    roster: Roster
    _echo: tuple[Failure, float] | None = None
    _echoed: set[int] = field(default_factory=set)

    def reported(self, failure: Failure, now: float) -> Failure | None:
        """Somebody reports a failure; returns it if it is a cause, None for an echo."""
        if failure.cause not in (Cause.PEER, Cause.SIGNAL):
            return failure
        self._echoed.add(failure.rank)
        if self._echo is None:
            self._echo = failure, now + self.roster.timings.echo
        return None

    def stopped(self, seconds: float) -> None:
        """What is behind an echo may have been said, and not heard, for so long."""
        if self._echo is not None:
            failure, until = self._echo
            self._echo = failure, until + seconds

    def echoed(self, rank: int) -> bool:
        """Whether this rank has reported an echo."""
        return rank in self._echoed

    def exited(self, report: WorkerExited) -> Failure:
        """The process of a worker ended before it was told to."""
        echo = self._echo[0] if self._echo else None
        if echo and echo.rank == report.rank and echo.cause is Cause.SIGNAL:
            return replace(echo, cause=Cause.LOST)
        return self.roster.exited(report)

    def overdue(self, now: float, patience: float) -> Failure | None:
        """What time alone shows: an echo that no cause came behind, or silence.

        Behind an echo, a rank gone silent without a word is the likely cause. A signal that nothing
        is behind is returned as it is: somebody asked all to end.

        Args:
            patience: seconds a worker may be silent.
        """
        if self._echo is None or now < self._echo[1]:
            return self.roster.overdue(now, patience)
        echo, _ = self._echo
        silent = [rank for rank in self.roster.silent(now) if rank not in self._echoed]
        if silent:
            return self.roster.members[silent[0]].gone()
        if echo.cause is Cause.SIGNAL:
            return echo
        return replace(echo, message=f"{echo.message}, and nobody reported why")
