"""The figures of a step: their text, their choice by width, and the time that is left. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from pipeworker.display.text import megabytes, number
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.lines import Activity

GAP = "  "
_RECENT = 50


Rank = IntEnum("Rank", "STEP LOSS TIME SPEED RATE BAR BUBBLE MORE")
"""The order in which figures are left out on a narrow terminal: the last one goes first."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A few words of a line."""

    text: str
    rank: Rank


def figures(
    row: StepResult,
    total: int | None,
    time: str = "",
    *,
    verbose: bool = False,
    memory: Sequence[int] = (),
) -> list[Figure]:
    """Return the figures of a step, of `total`, in the order of their display; `time` as text.

    If `verbose` they have the present `memory` of the workers, in bytes.
    """
    found = [
        Figure(step_of(row.step, total), Rank.STEP),
        Figure(f"loss {number(row.loss)}", Rank.LOSS),
        Figure(f"lr {row.lr:.3g}", Rank.RATE),
        Figure(f"{row.samples_per_second:.1f} samples/s", Rank.SPEED),
        Figure(f"bubble {row.bubble:.1%}", Rank.BUBBLE),
    ]
    if verbose:
        found.append(Figure(f"gradient norm {number(row.grad_norm)}", Rank.MORE))
        found.append(Figure(f"epoch {row.epoch}", Rank.MORE))
        if row.loss_scale is not None:
            found.append(Figure(f"loss scale {row.loss_scale:g}", Rank.MORE))
        if memory:
            found.append(Figure(f"memory {megabytes(memory)}", Rank.MORE))
    if time:
        found.append(Figure(time, Rank.TIME))
    return found


def step_of(step: int, total: int | None) -> str:
    """Format ``step 3`` or ``step 3/10``."""
    return f"step {step}/{total}" if total else f"step {step}"


def evaluating(activity: Activity) -> str:
    """Format ``evaluating 12/60``; "" outside of an evaluation pass."""
    if activity.evaluated < 0:
        return ""
    length = f"/{activity.evaluation_length}" if activity.evaluation_length else ""
    return f"evaluating {activity.evaluated}{length}"


def evaluation_line(evaluation: Evaluation) -> str:
    """Format the line of an evaluation pass."""
    found = GAP.join(f"{name} {number(value)}" for name, value in evaluation.row().items())
    return f"evaluation {after(evaluation.step)}{GAP}{found}"


def after(step: int) -> str:
    """Format ``after step 3``."""
    return f"after step {step}" if step else "before step 1"


def fitting(found: Sequence[Figure], width: int) -> list[Figure]:
    """Return the figures that fit in `width` columns with gaps between them; at least one."""
    fits = list(found)
    while len(fits) > 1 and sum(len(GAP) + len(f.text) for f in fits) - len(GAP) > width:
        fits.remove(max(fits, key=lambda figure: figure.rank))
    return fits


class Pace:
    """The speed of the most recent steps, and the time to the last one."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def add(self, step: int, now: float) -> None:
        """Record that a step was done at `now`, in seconds."""
        self._done.append((now, step))

    def remaining(self, now: float) -> float | None:
        """Return the seconds to the last step; None while they are unknown."""
        if not self._total or len(self._done) < 2:
            return None
        (began, first), (last, step) = self._done[0], self._done[-1]
        if step <= first:
            return None
        each = (last - began) / (step - first)
        return max(0.0, each * (self._total - step) - (now - last))
