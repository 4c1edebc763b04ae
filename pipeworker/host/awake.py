"""How long others have been silent, for a process that may have been stopped together with them."""

from __future__ import annotations

import time


class Awake:
    """A clock that stands still while its process does.

    A batch system suspends whole jobs and a container is paused whole: who goes on first must give
    the others the time to speak.

    Args:
        most: seconds that pass between two looks; in what is beyond them it was stopped.

    Attributes:
        stopped: these seconds, in all.
    """

    def __init__(self, most: float) -> None:
        self.stopped = 0.0
        self._most = most
        self._looked = time.monotonic()

    def look(self) -> float:
        """Seconds, counted from anywhere."""
        before, self._looked = self._looked, time.monotonic()
        self.stopped += max(0.0, self._looked - before - self._most)
        return self._looked - self.stopped
