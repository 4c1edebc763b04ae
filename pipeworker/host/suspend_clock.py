"""A clock for timeouts, in a process that may be suspended together with the others."""

from __future__ import annotations

import time


class SuspendAwareClock:
    """A clock that does not count the time during which its process was suspended.

    A batch system suspends whole jobs, and containers are paused as a whole; the other processes
    need time to send after they resume. A process that runs reads the clock at least every
    `max_interval` seconds: any time beyond that counts as suspended.
    """

    def __init__(self, max_interval: float) -> None:
        self.suspended = 0.0
        self._max_interval = max_interval
        self._last = time.monotonic()

    def now(self) -> float:
        """Return seconds since an arbitrary point in time."""
        before, self._last = self._last, time.monotonic()
        self.suspended += max(0.0, self._last - before - self._max_interval)
        return self._last - self.suspended
