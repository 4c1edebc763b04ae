"""Which mini-batches are recorded: as many as the timeline and the steps have room for. Pure.

The timeline grows by a number of bytes a minute at first, and then by less and less, with the
logarithm of time, so that a run of a week has a timeline of some hundred megabytes. The workers
spend at most a share of the time on it, which decides for short steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeworker.plan.schedule import Schedule

BYTES_A_MINUTE = 5 << 20
"""The bytes by which the timeline of a job may grow at first, over all of its workers."""
SHARE = 0.005
"""The share of a worker's time that recording may take."""
_FULL_RATE = 600.0
"""Seconds after which the timeline grows by less: in proportion to the inverse of the time."""
_BYTES_AT_ONCE = 1 << 20
_SECONDS_AT_ONCE = 0.02
_BYTES_OF_AN_ACTION = 15
"""The begin and end of an action, in microseconds, and its memory, as differences with commas."""
_SECONDS_OF_AN_ACTION = 15e-6
"""Measured with short steps: the worker reads its memory, and makes and writes the row."""
_BYTES_OF_A_ROW = 300
"""Besides the actions, and with the row of the command after it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Estimates for the rows of one mini-batch.

    Attributes:
        size: bytes of the rows of all workers.
        seconds: time that the worker with the most actions spends on its row.
    """

    size: int
    seconds: float


def cost_of(replicas: Iterable[Schedule]) -> Cost:
    """Estimate what it costs to record one mini-batch of all workers of these replicas."""
    counts = [len(actions) for schedule in replicas for actions in schedule.workers]
    return Cost(
        _BYTES_OF_A_ROW * len(counts) + _BYTES_OF_AN_ACTION * sum(counts),
        _SECONDS_OF_AN_ACTION * max(counts),
    )


class Sampling:
    """The bytes and the seconds that rows may take now; both grow with time."""

    def __init__(self) -> None:
        self._size, self._seconds = float(_BYTES_AT_ONCE), _SECONDS_AT_ONCE
        self._began = self._at = 0.0
        self._takes = False

    def takes(self, cost: Cost, now: float, *, begins: bool = True) -> bool:
        """Return whether a mini-batch is recorded that begins at a time in seconds.

        One that costs more than all that may be left is recorded when as much is left. Of a step
        either all mini-batches are recorded or none: the one that `begins` it decides.
        """
        if not self._at:
            self._began = self._at = now
        passed, self._at = now - self._at, now
        rate = min(1.0, _FULL_RATE / max(_FULL_RATE, now - self._began)) * BYTES_A_MINUTE / 60
        self._size = min(float(_BYTES_AT_ONCE), self._size + passed * rate)
        self._seconds = min(_SECONDS_AT_ONCE, self._seconds + passed * SHARE)
        if begins:
            fits = self._size >= min(cost.size, _BYTES_AT_ONCE)
            self._takes = fits and self._seconds >= min(cost.seconds, _SECONDS_AT_ONCE)
        if self._takes:
            self._size -= cost.size
            self._seconds -= cost.seconds
        return self._takes
