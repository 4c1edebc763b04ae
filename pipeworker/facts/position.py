"""Positions: what a worker is doing, and for which step, micro-batch and layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, unique

from pipeworker.facts.limits import check


@unique
class Phase(IntEnum):
    """The activity of a worker, for failure messages. A number, because it is written often."""

    STARTING = 0
    LOADING = 1
    BUILDING = 2
    CONNECTING = 3
    READING = 4
    WAITING = 5
    FORWARD = 6
    RECOMPUTE = 7
    BACKWARD = 8
    LOSS = 9
    UPDATE = 10
    SAVING = 11
    EVALUATION = 12
    SURVEY = 13
    RESTORING = 14
    COMPILING = 15
    MEASURING = 16
    PREDICTION = 17


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a worker. A field that does not apply is -1; steps count from 1."""

    phase: Phase = Phase.STARTING
    step: int = -1
    microbatch: int = -1
    layer: int = -1

    def __post_init__(self) -> None:
        least = min(self.step, self.microbatch, self.layer)
        check(least >= -1, f"a position of {least}")
