"""Curves of a run as pictures: of any number of steps, in a bounded number of points. Pure.

Where a picture has less points than the run has steps, a line shows the mean of neighbouring steps,
and a band behind it their least and greatest values: a peak of one step stays to be seen.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from pipeworker.display.text import number

MOST_POINTS = 400
MOST_STEPS = 1 << 53
STYLE = """\
.curve text { fill: var(--soft); font: 11px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.curve .name { fill: var(--ink); font-size: 13px; font-weight: 600; }
.curve .axis { stroke: var(--line); }
.curve .mean { fill: none; stroke: #0072b2; stroke-width: 1.5; stroke-linejoin: round; }
.curve .band { fill: #0072b2; fill-opacity: 0.22; }
.curve .other { fill: #d55e00; }
.curve .at { stroke: var(--soft); stroke-dasharray: 3 3; }
@media (prefers-color-scheme: dark) {
  .curve .mean { stroke: #56b4e9; } .curve .band { fill: #56b4e9; }
}
"""
_WIDTH, _HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 334, 28, 146
"""The edges of the curve."""
_Y_TICKS, _X_TICKS = 3, 3


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure by step, in points that each stand for some steps.

    Attributes:
        name: of the figure, with its unit.
        steps: the last step of each point.
        low, mean, high: of the figure, over the steps of a point.
        others: values of another figure at some steps, which are drawn as dots.
        others_name: what the dots are.
    """

    name: str
    steps: Sequence[int]
    low: Sequence[float]
    mean: Sequence[float]
    high: Sequence[float]
    others: Mapping[int, float]
    others_name: str = ""

    @staticmethod
    def of(
        name: str,
        steps: Sequence[float],
        values: Sequence[float],
        others: Mapping[int, float] | None = None,
        others_name: str = "",
    ) -> Curve | None:
        """Return the curve of a figure; None if it has no finite value."""
        at, found = np.asarray(steps, np.float64), np.asarray(values, np.float64)
        known = np.isfinite(found) & (np.abs(at) < MOST_STEPS)
        at, found = at[known].astype(np.int64), found[known]
        if not len(at):
            return None
        starts = np.unique(np.linspace(0, len(at), MOST_POINTS, endpoint=False).astype(np.int64))
        ends = np.append(starts[1:], len(at))
        return Curve(
            name,
            at[ends - 1].tolist(),
            np.minimum.reduceat(found, starts).tolist(),
            (np.add.reduceat(found, starts) / (ends - starts)).tolist(),
            np.maximum.reduceat(found, starts).tolist(),
            {k: v for k, v in (others or {}).items() if math.isfinite(v)},
            others_name,
        )

    def svg(self) -> str:
        """Return the picture; the page's script shows the numbers of its points."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        scale = _Scale.of(self)
        first, last = (f"{number(self.mean[k])} at step {self.steps[k]:,}" for k in (0, -1))
        box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" data-left="{_LEFT}" data-right="{_RIGHT}"'
        yield f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
        yield f"<title>{escape(self.name)}: {first}, {last}</title>"
        yield f'<text x="0" y="14" class="name">{escape(self.name)}</text>'
        if self.others:
            text = f'<tspan class="other">●</tspan> {escape(self.others_name)}'
            yield f'<text x="{_RIGHT}" y="14" text-anchor="end">{text}</text>'
        yield from scale.axes()
        points = [*zip(self.steps, self.low, self.mean, self.high, strict=True)]
        if any(low != high for _, low, _, high in points):
            upper = [scale.at(step, high) for step, _, _, high in points]
            lower = [scale.at(step, low) for step, low, _, _ in reversed(points)]
            yield f'<path d="M{"L".join([*upper, *lower])}Z" class="band"/>'
        mean = [scale.at(step, value) for step, _, value, _ in points]
        yield f'<path d="M{"L".join(mean)}" class="mean"/>'
        for step, value in self.others.items():
            if scale.first <= step <= scale.last:
                x, y = scale.at(step, value).split()
                yield f'<circle cx="{x}" cy="{y}" r="2.5" class="other"/>'
        yield "</svg>"

    @property
    def first(self) -> int:
        """The step at the left edge of the picture."""
        return min([self.steps[0], *self.others])


@dataclass(frozen=True, slots=True)
class _Scale:
    """The steps and values at the edges of a picture."""

    first: float
    last: float
    least: float
    most: float

    @staticmethod
    def of(curve: Curve) -> _Scale:
        least = min([*curve.low, *curve.others.values()])
        most = max([*curve.high, *curve.others.values()])
        if least == most:
            margin = abs(least) / 10 or 0.1
            least, most = least - margin, most + margin
        first = curve.first
        return _Scale(first, max(curve.steps[-1], first + 1), least, most)

    def at(self, step: float, value: float) -> str:
        """Return the place of a value, as ``x y``."""
        x = _LEFT + (step - self.first) / (self.last - self.first) * (_RIGHT - _LEFT)
        y = _TOP + (self.most - value) / (self.most - self.least) * (_BOTTOM - _TOP)
        return f"{x:.1f} {y:.1f}"

    def axes(self) -> Iterator[str]:
        """Yield lines and numbers of round values, and numbers of round steps."""
        for tick in _ticks(self.least, self.most, _Y_TICKS):
            _, y = self.at(self.first, tick).split()
            yield f'<path d="M{_LEFT} {y}H{_RIGHT}" class="axis"/>'
            place = f'x="{_LEFT - 6}" y="{float(y) + 4:g}"'
            yield f'<text {place} text-anchor="end">{tick:.9g}</text>'
        for tick in _ticks(self.first, self.last, _X_TICKS):
            if tick == int(tick):
                x, _ = self.at(tick, self.least).split()
                place = f'x="{x}" y="{_HEIGHT - 6}"'
                yield f'<text {place} text-anchor="middle">{int(tick):,}</text>'


def _ticks(least: float, most: float, count: int) -> list[float]:
    """Return round numbers between two, at least `count` of them or one less."""
    room = (most - least) / count
    if not sys.float_info.min <= room <= sys.float_info.max:
        return []
    power = 10.0 ** math.floor(math.log10(room))
    step = max((n * power for n in (1, 2, 5) if n * power <= room * (1 + 1e-9)), default=power)
    begin, end = math.ceil(least / step - 1e-9), math.floor(most / step + 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(k * step, digits) for k in range(begin, end + 1)]
