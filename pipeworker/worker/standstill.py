"""The stack of a worker's main thread that has computed at one position for long."""

from __future__ import annotations

import sys
import threading

from pipeworker.host.position import Tracker
from pipeworker.worker.blame import user_stack


class Standstill:
    """Observes the position of the thread that creates this object, from another thread."""

    def __init__(self, tracker: Tracker, now: float) -> None:
        self._tracker, self._thread = tracker, threading.get_ident()
        self._position, self._since = tracker.get(), now
        self._stack = ""

    def stack(self, now: float, limit: float) -> str:
        """Return the user's frames, or "" before the position has lasted for `limit` seconds.

        They are found again after each `limit`: code that is slow may have moved on.
        """
        position = self._tracker.get()
        if position != self._position or self._tracker.waiting:
            self._position, self._since, self._stack = position, now, ""
        elif now - self._since > limit:
            self._since = now
            self._stack = user_stack(sys._current_frames().get(self._thread))
        return self._stack
