"""Whether the job goes on after a loss. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.position import Position

WINDOW = 3600.0
"""Seconds within which losses count: a long job meets some."""


@dataclass(slots=True)
class Restarts:
    """The losses of a job.

    Args:
        most: that it goes on after within an hour.

    Attributes:
        causes: of all, in words.
    """

    most: int
    causes: list[str] = field(default_factory=list)
    _at: list[float] = field(default_factory=list)
    _last: tuple[Cause, int, Position] | None = None

    def enough(self, failure: Failure, now: float) -> str:
        """Why the job does not go on after another loss; or nothing."""
        where = failure.cause, failure.rank, failure.position
        again = where == self._last and failure.position.layer >= 0
        self._last = where
        self._at = [at for at in self._at if now - at < WINDOW]
        if not self.most:
            return "--restarts 0"
        if again:
            return "it happened again at the same place"
        if len(self._at) >= self.most:
            return f"{self.most} restarts within an hour are all used (--restarts)"
        return ""

    def begin(self, said: str, now: float) -> None:
        """The job goes on after a loss, which is this in words."""
        self._at.append(now)
        self.causes.append(said)
