"""The states of a generation: the message each one waits for, and the reason."""

from __future__ import annotations

from enum import Enum


class State(Enum):
    """The event that a generation waits for.

    Attributes:
        awaited_message: the name of the message that every awaited rank sends, or "".
        reason: the reason to wait, for logs and messages.
    """

    def __init__(self, awaited_message: str, reason: str) -> None:
        self.awaited_message, self.reason = awaited_message, reason

    JOINING = "Described", "the plan needs every worker's description of the model"
    BUILDING = "Ready", "no step begins before every stage is built and connected"
    STEPPING = "StepDone", "an update happens on all stages or on none"
    EVALUATING = "EvaluationDone", "the next step begins after all stages have evaluated"
    CALLING = "Call", "every rank makes the same calls"
    SAVING = "Saved", "a checkpoint is complete or absent"
    COMMITTING = "", "the checkpoint is being completed"
    OVER = "", "the generation has ended"


BEFORE_STEPS = (State.JOINING, State.BUILDING)
"""States in which no step has begun."""
