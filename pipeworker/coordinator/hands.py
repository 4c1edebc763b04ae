"""With how many stages a job goes on when a worker cannot be replaced. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_EARLY = 2
"""Losses in a row, before a step, that mean that this many stages do not come to be."""


@dataclass(slots=True)
class Hands:
    """The workers that there are.

    Args:
        asked: that the job is to have.
        least: that it may go on with.
        wait: seconds until all are tried again; twice as many after each time in vain.
    """

    asked: int
    least: int
    wait: float
    now: int = 0
    _since: float = 0.0
    _early: int = 0
    _tried: bool = False

    def __post_init__(self) -> None:
        self.now = self.asked

    def lost(self, now: float, *, cannot_start: bool, early: bool, room: int = -1) -> bool:
        """A worker is lost; returns whether the job goes on with fewer.

        Args:
            cannot_start: the system does not start another in its place.
            early: it had not come so far that a step was run.
            room: how many can be started in all; -1 where nobody knows.
        """
        self._early = self._early + 1 if early else 0
        if not cannot_start and self._early < _EARLY:
            return False
        left = self.now - 1 if room < 0 else min(self.now - 1, room)
        if left < self.least:
            return False
        if self._tried:
            self.wait *= 2
        self._tried = False
        self.now = left
        self._since, self._early = now, 0
        return True

    def settled(self, now: float) -> None:
        """Steps are run with what there is."""
        self._since = now

    def may_grow(self, now: float) -> bool:
        """Whether it is time to try with all again."""
        return self.now < self.asked and now - self._since >= self.wait

    def grow(self) -> None:
        """All are tried."""
        self.now, self._tried = self.asked, True
