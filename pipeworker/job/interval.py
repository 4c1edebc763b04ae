"""The interval between checkpoints: steps or time, as ``--checkpoint-every`` specifies it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeworker.errors import UsageError

END = "end"
"""A value for an interval between checkpoints: there are none before the end."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval between checkpoints: a number of steps, or of seconds."""

    steps: int = 0
    seconds: float = 0.0

    def due(self, step: int, seconds: float) -> bool:
        """Return whether the interval is over after `step`, `seconds` after the last checkpoint."""
        return step % self.steps == 0 if self.steps else seconds >= self.seconds

    @staticmethod
    def parse(text: str) -> Interval:
        """Read ``100`` (steps), ``90s``, ``30m`` or ``2h``; ``end`` for no interval."""
        if text == END:
            return Interval(seconds=math.inf)
        number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "")
        if not (number.isascii() and number.isdigit() and len(number) < 10 and int(number)):
            raise UsageError(
                f"--checkpoint-every {text}: must be a number of steps, as 100, a time, as 30m, "
                "or end, for one at the end alone"
            )
        return Interval(seconds=int(number) * _UNITS[unit]) if unit else Interval(int(number))
