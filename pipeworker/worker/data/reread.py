"""The progress of reading mini-batches again, in the worker's output, which the launcher shows."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

_PATIENCE, _INTERVAL = 2.0, 5.0
"""Seconds before the first report, and between two."""


class Reread:
    """Reports how many of `total` mini-batches are read again, if that takes long.

    The reports are one line that is redrawn; the last one, a line of its own, names the remedy.
    """

    def __init__(self, name: str, total: int, now: Callable[[], float] = time.monotonic) -> None:
        self._name, self._total, self._now = name, total, now
        self._began = now()
        self._due = _PATIENCE  # seconds after the beginning

    def show(self, done: int) -> None:
        """Report that so many are read, or, after the last one, how long it took."""
        seconds = self._now() - self._began
        if done == self._total and seconds >= _PATIENCE:
            _write(
                f"\r{self._name}: {self._total} mini-batches were read again in {seconds:.0f} s; a "
                "map-style DataLoader, or data(start), skips them\n"
            )
        elif seconds >= self._due:
            self._due = seconds + _INTERVAL
            _write(f"\rreading data again {done}/{self._total}")


def _write(text: str) -> None:
    with contextlib.suppress(ValueError, OSError):  # the job has closed the stream; a full disk
        print(text, end="", file=sys.stderr, flush=True)
