"""A step as a picture to scale, after figure 2c of GPipe (Huang et al. 2019).

Each kind of action has a colour of Okabe and Ito's palette, which colour-blind readers tell apart,
another brightness, for print without colours, and a pattern or none. Strips mark the second and
later stages of a worker. The background is transparent.
Colours of the text follow the reader's theme, light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pipeworker.display.plan.text import NAMES
from pipeworker.plan.actions import Kind
from pipeworker.plan.figures import seconds_text
from pipeworker.plan.simulate import Span

_CLASSES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input",
    Kind.BACKWARD_WEIGHT: "weight",
}
_UPDATE, _LATER = "update", "later"
STYLE = """\
text { fill: #24292f; font: 12px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.mark { font-size: 11px; text-anchor: middle; }
.label, .tick { fill: #57606a; }
.label { text-anchor: end; }
.tick { text-anchor: middle; font-size: 11px; }
.axis { stroke: #8c959f; stroke-width: 1; }
.idle { fill: #8c959f; fill-opacity: 0.16; }
.forward { fill: #0072b2; }
.recompute { fill: #9ccff0; }
.backward { fill: #e69f00; }
.input { fill: #f4c65c; }
.weight { fill: #7a3d6b; }
.update { fill: #8c959f; }
.on-forward, .on-weight { fill: #ffffff; }
.on-recompute, .on-backward, .on-input, .on-update { fill: #1a1a1a; }
.on-recompute { paint-order: stroke; stroke: #9ccff0; stroke-width: 3px; }
.on-weight { paint-order: stroke; stroke: #7a3d6b; stroke-width: 3px; }
.later { fill: #000000; fill-opacity: 0.6; }
.hatch { stroke: #0072b2; stroke-width: 2; stroke-opacity: 0.55; }
.dot { fill: #d9a8cb; }
@media (prefers-color-scheme: dark) {
  text { fill: #d5dbe3; }
  .label, .tick { fill: #9aa4b0; }
  .on-forward, .on-weight { fill: #ffffff; }
  .on-recompute, .on-backward, .on-input, .on-update { fill: #1a1a1a; }
}
"""
"""The style of the picture; a page that has the picture in it needs no other."""
_PATTERNS = """\
<defs>
<pattern id="recompute" width="8" height="8" patternUnits="userSpaceOnUse" \
patternTransform="rotate(45)"><rect width="8" height="8" class="recompute"/>\
<line x1="0" y1="0" x2="0" y2="8" class="hatch"/></pattern>
<pattern id="weight" width="6" height="6" patternUnits="userSpaceOnUse">\
<rect width="6" height="6" class="weight"/><circle cx="3" cy="3" r="1" class="dot"/></pattern>
</defs>"""
_PATTERNED = ("recompute", "weight")
_ROW, _GAP, _TOP = 28, 4, 34
_CHARACTER = 6.6
"""Pixels of a character of a mark or a label, at most."""
_LEAST = 0.75
"""Pixels below which neighbouring actions of a kind are drawn as one."""
_TICKS = 8


@dataclass(frozen=True, slots=True)
class Picture:
    """A step to draw.

    Attributes:
        title: a sentence that describes it, also for readers who hear it.
        rows: a label for each worker.
        spans: when each worker computes what.
        bubble: the idle share of the step, 0..1.
        update: seconds of the update of the weights after it.
        timed: whether times are seconds; else the picture has no axis.
        width: in pixels.
    """

    title: str
    rows: Sequence[str]
    spans: Sequence[Sequence[Span]]
    bubble: float
    update: float = 0.0
    timed: bool = True
    width: int = 960

    def svg(self) -> str:
        """Return the picture as a file of its own."""
        return "\n".join([*self._lines(), ""])

    def _lines(self) -> Iterator[str]:
        margin = round(max(map(len, self.rows), default=0) * _CHARACTER) + 16
        last = max((span.end for spans in self.spans for span in spans), default=0.0)
        end = last + self.update or 1.0
        scale = (self.width - margin - 8) / end
        below = _TOP + len(self.rows) * _ROW
        legend = below + (34 if self.timed else 16)
        entries = list(self._legend(margin, legend))
        height = max(y for _, _, _, y in entries) + 20
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" '
            f'width="{self.width}" height="{height}" role="img">'
        )
        yield f"<title>{escape(self.title)}</title>"
        yield f"<style>\n{STYLE}</style>"
        yield _PATTERNS
        yield f'<text x="{margin}" y="20">{escape(self.title)}</text>'
        y: float
        for row, (label, spans) in enumerate(zip(self.rows, self.spans, strict=True)):
            y, held = _TOP + row * _ROW, sorted({span.action.stage for span in spans})
            box = f'y="{y}" height="{_ROW - _GAP}"'
            yield f'<text x="{margin - 8}" y="{y + 16}" class="label">{escape(label)}</text>'
            yield f'<rect x="{margin}" {box} width="{_px(last * scale)}" class="idle"/>'
            for stage in {span.action.stage: None for span in spans}:
                own = [span for span in spans if span.action.stage == stage]
                yield from self._boxes(own, margin, scale, y, held.index(stage))
            if self.update:
                start, width = _px(margin + last * scale), _px(self.update * scale)
                yield f'<rect x="{start}" {box} width="{width}" class="{_UPDATE}"/>'
        if self.timed:
            yield from _axis(margin, below, end, scale)
        for name, label, x, y in entries:
            box = f'x="{_px(x)}" y="{y}" width="18" height="14"'
            yield f"<rect {box} {_filled(_CLASSES[Kind.FORWARD] if name == _LATER else name)}/>"
            if name == _LATER:
                yield f'<rect x="{_px(x)}" y="{y + 11}" width="18" height="3" class="{_LATER}"/>'
            yield f'<text x="{_px(x + 24)}" y="{y + 12}">{label}</text>'
        yield "</svg>"

    def _boxes(
        self, spans: Sequence[Span], margin: float, scale: float, y: float, depth: int
    ) -> Iterator[str]:
        """Yield the boxes of one stage, with as many strips as `depth`.

        Actions too narrow to be seen are drawn together.
        """
        for first, end in _merged(spans, scale):
            (kind, stage, microbatch, _), start, _ = first
            x, width = margin + start * scale, (end - start) * scale
            name = _CLASSES[kind]
            single = end == first.end
            what = f"{first.action}: {NAMES[kind]} of micro-batch {microbatch} on stage {stage}"
            when = "" if single else " and following"
            if single and self.timed:
                when = f", {seconds_text(start)} to {seconds_text(end)}"
            yield (
                f'<rect x="{_px(x)}" y="{y}" width="{_px(width)}" height="{_ROW - _GAP}" '
                f'{_filled(name)} stroke="#ffffff" stroke-width="{0.6 if width > 3 else 0}">'
                f"<title>{what}{when}</title></rect>"
            )
            for strip in range(depth):
                bottom = y + _ROW - _GAP - 3 - 5 * strip
                yield (
                    f'<rect x="{_px(x)}" y="{bottom}" width="{_px(width)}" height="3" '
                    f'class="{_LATER}"/>'
                )
            mark = str(microbatch)
            if single and width >= len(mark) * _CHARACTER + 2:
                middle = _px(x + width / 2)
                yield f'<text x="{middle}" y="{y + 16}" class="mark on-{name}">{mark}</text>'

    def _legend(self, x: float, y: float) -> Iterator[tuple[str, str, float, float]]:
        """Yield class, label and place of each entry of the legend, in lines of the width."""
        kinds = {span.action.kind for spans in self.spans for span in spans}
        entries = [(_CLASSES[kind], name) for kind, name in NAMES.items() if kind in kinds]
        if any(len({span.action.stage for span in spans}) > 1 for spans in self.spans):
            entries.append((_LATER, "on the worker's next stage"))
        entries += [(_UPDATE, "update of the weights")] if self.update else []
        entries.append(("idle", f"idle, the bubble: {self.bubble:.1%}"))
        left = x
        for name, label in entries:
            width = 24 + len(label) * _CHARACTER + 16
            if x > left and x + width > self.width:
                x, y = left, y + 20
            yield name, label, x, y
            x += width


def _merged(spans: Sequence[Span], scale: float) -> Iterator[tuple[Span, float]]:
    """Yield each span, or the first of several that are drawn together, and where they end."""
    first: Span | None = None
    end = 0.0
    for span in spans:
        if first is not None:
            alike = first.action.kind is span.action.kind
            narrow = (span.end - span.start) * scale < _LEAST
            if alike and narrow and (span.start - end) * scale < _LEAST / 2:
                end = span.end
                continue
            yield first, end
        first, end = span, span.end
    if first is not None:
        yield first, end


def _axis(margin: float, y: float, end: float, scale: float) -> Iterator[str]:
    """Yield an axis of time with a few round ticks."""
    yield f'<line x1="{margin}" y1="{y}" x2="{_px(margin + end * scale)}" y2="{y}" class="axis"/>'
    step = _round_step(end / _TICKS)
    for tick in range(int(end / step + 1e-9) + 1):
        x = _px(margin + tick * step * scale)
        yield f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + 4}" class="axis"/>'
        label = seconds_text(tick * step) if tick else "0"
        yield f'<text x="{x}" y="{y + 16}" class="tick">{label}</text>'


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least * (1 - 1e-9))


def _filled(name: str) -> str:
    """Return the attributes that fill a box of a class."""
    return f'class="{name}"' + (f' style="fill:url(#{name})"' if name in _PATTERNED else "")


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
