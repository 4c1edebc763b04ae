"""The speed of a job's steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a job's steps, without its start-up, evaluation passes and checkpoints.

    Attributes:
        median_step: seconds of a step.
        tokens_per_second: 0 if the number of tokens is unknown.
        busy: seconds that each worker of a replica computed or read, since their number last
            changed.
        data: seconds that the first stage read mini-batches.
    """

    median_step: float
    samples_per_second: float
    tokens_per_second: float
    busy: tuple[float, ...]
    data: float

    def fields(self) -> dict[str, Any]:
        """Return the figures by the names that files and events have; null is unknown."""
        return {
            "median_step_seconds": self.median_step,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second or None,
            "busy_seconds": list(self.busy),
            "data_seconds": self.data,
        }
