"""What a generation waits for and why, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.coordinator.effects import Status
from pipeworker.wire.messages.failure import Failure


class State(Enum):
    """What a generation waits for."""

    JOINING = "joining"
    BUILDING = "building"
    STEPPING = "stepping"
    EVALUATING = "evaluating"
    CALLING = "calling"
    SAVING = "saving"
    COMMITTING = "committing"
    OVER = "over"


_WHY = {
    State.JOINING: ("Described", "the plan needs every worker's word on the model"),
    State.BUILDING: ("Ready", "no step begins before every stage is built and connected"),
    State.STEPPING: ("StepDone", "an update happens on all stages or on none"),
    State.EVALUATING: ("EvaluationDone", "the next step begins when every stage is through"),
    State.CALLING: ("Call", "every rank makes the same calls"),
    State.SAVING: ("Saved", "a checkpoint is complete or it is not there"),
    State.COMMITTING: ("", "the checkpoint is being made complete"),
    State.OVER: ("", "it is over"),
}


@dataclass(frozen=True, slots=True)
class Waiting:
    """For whom, for what and why: in words, for logs and messages."""

    state: State
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        what, why = _WHY[self.state]
        ranks = f" of rank {', '.join(map(str, self.ranks))}" if self.ranks else ""
        return f"waiting for {what}{ranks}: {why}" if what else why


@dataclass(frozen=True, slots=True)
class Verdict:
    """The job ends with this generation."""

    status: Status
    exit_status: int
    failure: Failure | None = None


STOPPED = Verdict(Status.INTERRUPTED, 130)
"""The user asked for it."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker is gone, by nothing that is sure to happen again: the job may go on without it."""

    failure: Failure


End = Verdict | Lost
"""How a generation ends: with a verdict, or with a reason to start again."""
