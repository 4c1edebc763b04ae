"""The speed of the steps that this coordinator saw. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeworker.facts.speed import Speed
from pipeworker.facts.step import StepResult

_RECENT = 1 << 16
"""Steps of which the median is taken: the most recent ones."""


@dataclass(slots=True)
class SpeedMeter:
    """Adds up the times of steps.

    The first step of new workers allocates memory and compiles kernels: its duration is left out,
    unless there is no other.
    """

    _is_first: bool = True
    _is_warm: bool = False
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _seconds: float = 0.0
    _samples: int = 0
    _tokens: int = 0
    _data: float = 0.0

    def begin(self) -> None:
        """Note that new workers run the next step."""
        self._is_first = True

    def add(self, row: StepResult, data: float) -> None:
        """Add a step, in which the first stage read mini-batches for `data` seconds."""
        self._data += data
        first, self._is_first = self._is_first, False
        if first and self._is_warm:
            return
        if not first and not self._is_warm:
            self._is_warm = True
            self._recent.clear()
            self._seconds, self._samples, self._tokens = 0.0, 0, 0
        self._recent.append(row.seconds)
        self._seconds += row.seconds
        self._samples += row.samples
        self._tokens += row.tokens or 0

    def speed(self, busy: Sequence[float]) -> Speed | None:
        """Return the speed; None before the first step. `busy` is by worker of a replica."""
        if not self._recent:
            return None
        seconds = self._seconds or math.inf  # a clock may stand still
        median = statistics.median(self._recent)
        rates = self._samples / seconds, self._tokens / seconds
        return Speed(median, *rates, tuple(busy), self._data)
