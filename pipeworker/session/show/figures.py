"""How the figures of a step read, which of them fit, and how long the rest takes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.step import StepResult

GAP = "  "
_RECENT = 50


class Worth(IntEnum):
    """What a figure is worth on a narrow terminal: the largest goes first."""

    STEP = 0
    LOSS = 1
    TIME = 2
    SPEED = 3
    RATE = 4
    BAR = 5
    BUBBLE = 6
    MORE = 7


@dataclass(frozen=True, slots=True)
class Figure:
    """A few words of a line."""

    text: str
    worth: Worth


def figures(
    row: StepResult, total: int | None, time: str = "", *, verbose: bool = False
) -> list[Figure]:
    """Those of a step, in their order.

    Args:
        total: steps; None where nobody knows.
        time: that is left, or has passed.
    """
    found = [
        Figure(f"step {counted(row.step, total)}", Worth.STEP),
        Figure(f"loss {number(row.loss)}", Worth.LOSS),
        Figure(f"lr {row.lr:.3g}", Worth.RATE),
        Figure(f"{row.samples_per_second:.1f} samples/s", Worth.SPEED),
        Figure(f"bubble {row.bubble:.1%}", Worth.BUBBLE),
    ]
    if verbose:
        found.append(Figure(f"gradient norm {number(row.grad_norm)}", Worth.MORE))
        found.append(Figure(f"epoch {row.epoch}", Worth.MORE))
        if row.loss_scale is not None:
            found.append(Figure(f"loss scale {row.loss_scale:g}", Worth.MORE))
    if time:
        found.append(Figure(time, Worth.TIME))
    return found


def counted(step: int, total: int | None) -> str:
    """A step, and of how many."""
    return f"{step}/{total}" if total else f"{step}"


def evaluated(evaluation: Evaluation) -> str:
    """The line of an evaluation pass."""
    found = GAP.join(f"{name} {number(value)}" for name, value in evaluation.row().items())
    return f"evaluation after step {evaluation.step}{GAP}{found}"


def number(value: float) -> str:
    """With four places; a small one with four digits."""
    return f"{value:.4f}" if not 0 < abs(value) < 0.001 else f"{value:.3e}"


def clock(seconds: float) -> str:
    """As ``1:02:03``, or ``2:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def fitting(found: Sequence[Figure], width: int) -> list[Figure]:
    """Those that fit in so many columns, with gaps; the least important go first."""
    kept = list(found)
    while len(kept) > 1 and sum(len(GAP) + len(f.text) for f in kept) - len(GAP) > width:
        kept.remove(max(kept, key=lambda figure: figure.worth))
    return kept


class Pace:
    """How quickly steps follow each other, the last ones; and how long the rest takes."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._seen: deque[tuple[float, int]] = deque(maxlen=_RECENT)

    def seen(self, step: int, now: float) -> None:
        """A step is done."""
        self._seen.append((now, step))

    def left(self, now: float) -> float | None:
        """Seconds to the last step; None while nobody knows."""
        if not self._total or len(self._seen) < 2:
            return None
        (began, first), (last, step) = self._seen[0], self._seen[-1]
        if step <= first:
            return None
        each = (last - began) / (step - first)
        return max(0.0, each * (self._total - step) - (now - last))
