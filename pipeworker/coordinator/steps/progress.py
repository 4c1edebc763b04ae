"""What lasts as long as the job: steps done, the loss scale, how busy its stages were. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeworker.coordinator.scaler import Scaler
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.coordinator.steps.tally import Outcome
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.step import StepResult


@dataclass(slots=True)
class Progress:
    """How far a job is.

    Attributes:
        steps: that are done.
        scaler: with fp16.
        evaluation: the last one.
        attempts: generations begun.
        recorded, evaluated: the last step whose row, and whose evaluation, is recorded; what is
            repeated behind a loss gives the same, and is not recorded again.
        saved: the step of the last checkpoint, -1 for none.
        saved_at: when the last one was begun.
        asked: somebody wants one, and it is not begun.
        unsaved: attempts at a checkpoint that failed since the last that did not.
        seconds: that the last step took.
    """

    steps: int = 0
    scaler: Scaler | None = None
    evaluation: Evaluation | None = None
    attempts: int = 0
    recorded: int = 0
    evaluated: int = 0
    saved: int = -1
    saved_at: float = 0.0
    asked: bool = False
    unsaved: int = 0
    seconds: float = 0.0
    _done: int = 0  # steps, here and now
    _bubbles: float = 0.0  # the sum of theirs
    _worked: tuple[float, ...] = ()  # seconds, by worker; since there are as many as now
    _lasted: float = 0.0  # seconds, of the same steps

    @property
    def begun(self) -> bool:
        """Whether a step was completed, here and now: not before the run was gone on with."""
        return self._done > 0

    @property
    def bubble(self) -> float:
        """The mean over the steps."""
        return self._bubbles / self._done if self._done else 0.0

    @property
    def busy(self) -> tuple[float, ...]:
        """The share of the time of its steps that each worker of a replica computed."""
        return tuple(worked / self._lasted for worked in self._worked) if self._lasted else ()

    @property
    def mark(self) -> Mark:
        """Where the job stands."""
        this = self.evaluation and self.evaluation.step == self.steps
        return Mark(self.steps, self.scaler, self.evaluation if this else None)

    def unsaved_at(self, step: int) -> bool:
        """Whether something was done up to a step that is in no checkpoint."""
        return step > max(0, self.saved)

    def back_to(self, mark: Mark) -> None:
        """What was done since is to be done again."""
        self.steps, self.scaler = mark.step, mark.scaler
        self.evaluation = mark.evaluation

    def done(self, step: int, outcome: Outcome) -> StepResult:
        """A step is complete; returns its row."""
        scaler = self.scaler
        self.steps = step
        self._done += 1
        self._bubbles += outcome.bubble
        if len(outcome.busy) != len(self._worked):  # the first step, or of another number
            self._worked, self._lasted = (0.0,) * len(outcome.busy), 0.0
        pairs = zip(self._worked, outcome.busy, strict=True)
        self._worked = tuple(so_far + more for so_far, more in pairs)
        self._lasted += outcome.seconds
        if scaler:
            self.scaler = scaler.after(overflow=outcome.overflow)
        seconds = self.seconds = outcome.seconds
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
