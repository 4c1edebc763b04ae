"""The calls of a loop of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.limits import check
from pipeworker.wire.messages.step import Batch, StepResult


class CallKind(Enum):
    """What the user's own loop asks for."""

    STEP = "step"
    EVALUATE = "evaluate"
    PREDICT = "predict"
    SAVE = "save"
    LOAD = "load"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checkpoint that a loop of the user's own goes on from: its step and loss scale."""

    step: int
    scale: float = 0.0
    good_steps: int = 0

    def __post_init__(self) -> None:
        check(min(self.step, self.scale, self.good_steps) >= 0, "a checkpoint that cannot be")


@dataclass(frozen=True, slots=True)
class Call:
    """The user's own loop made its next call on this rank; all ranks make the same ones.

    Attributes:
        batch: of STEP, the mini-batch that the first stage was given; None from the others.
        last: of STEP, whether the optimizer step is complete with this mini-batch.
        everywhere: of PREDICT, whether every stage wants the output.
        loaded: of LOAD, what was.
    """

    rank: int
    kind: CallKind
    batch: Batch | None = None
    last: bool = True
    everywhere: bool = False
    loaded: Loaded | None = None

    def __post_init__(self) -> None:
        right = (self.loaded is not None) == (self.kind is CallKind.LOAD)
        check(right, "a checkpoint is loaded by LOAD")


@dataclass(frozen=True, slots=True)
class Wait:
    """For the next call of the user's own loop; `gave` is what the last one gave."""

    gave: StepResult | Evaluation | None = None
