"""What lasts as long as the job: steps done, the loss scale, how busy its stages were. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.tally import Outcome
from pipeworker.wire.messages import StepResult


@dataclass(slots=True)
class Progress:
    """How far a job is.

    Attributes:
        steps: that are done.
        scaler: with fp16.
        attempts: generations begun.
    """

    steps: int = 0
    scaler: Scaler | None = None
    attempts: int = 0
    _bubbles: list[float] = field(default_factory=list)

    @property
    def bubble(self) -> float:
        """The mean over the steps."""
        return sum(self._bubbles) / len(self._bubbles) if self._bubbles else 0.0

    def done(self, step: int, outcome: Outcome) -> StepResult:
        """A step is complete; returns its row."""
        scaler = self.scaler
        self.steps = step
        self._bubbles.append(outcome.bubble)
        if scaler:
            self.scaler = scaler.after(overflow=outcome.overflow)
        seconds = outcome.seconds
        return StepResult(
            step=step,
            loss=outcome.loss,
            samples=outcome.samples,
            seconds=seconds,
            samples_per_second=outcome.samples / seconds if seconds > 0 else math.inf,
            grad_norm=outcome.norm,
            lr=outcome.learning_rate,
            bubble=outcome.bubble,
            epoch=outcome.epoch,
            loss_scale=scaler.scale if scaler else None,
        )
