"""Which mini-batches are recorded: as many as the timeline has room for. Pure.

The room grows by a number of bytes a minute at first, and then by less and less, with the logarithm
of time, so that a run of a week has a timeline of some hundred megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipeworker.plan.schedule import Schedule

BYTES_A_MINUTE = 5 << 20
"""The bytes by which the timeline of a job may grow at first, over all of its workers."""
_FULL_RATE = 600.0
"""Seconds after which it grows by less: in proportion to the inverse of the time."""
_AT_ONCE = 1 << 20
_OF_AN_ACTION = 10
"""The begin and end of an action as differences in microseconds, with their commas."""
_OF_A_ROW = 150


def row_bytes(replicas: Iterable[Schedule]) -> int:
    """Estimate the bytes of the rows of one mini-batch, of all workers of these replicas."""
    workers = [actions for schedule in replicas for actions in schedule.workers]
    return sum(_OF_A_ROW + _OF_AN_ACTION * len(actions) for actions in workers)


class Sampling:
    """The bytes that rows may have now; they grow with time."""

    def __init__(self) -> None:
        self._left, self._began, self._at = float(_AT_ONCE), 0.0, 0.0

    def takes(self, size: int, now: float) -> bool:
        """Return whether rows of `size` bytes are recorded, at a time in seconds.

        Rows that are larger than all that may be left are recorded when as much is left.
        """
        if not self._at:
            self._began = self._at = now
        share = min(1.0, _FULL_RATE / max(_FULL_RATE, now - self._began))
        grown = (now - self._at) * share * BYTES_A_MINUTE / 60
        self._left, self._at = min(float(_AT_ONCE), self._left + grown), now
        if self._left < min(size, _AT_ONCE):
            return False
        self._left -= size
        return True
