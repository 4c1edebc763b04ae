"""The page of a run, for `pipeworker report --html`: its answer first, then pictures and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from pipeworker.display import html
from pipeworker.display.report import curves
from pipeworker.display.report.curves import Curve
from pipeworker.display.report.view import Box, MemoryView, ReportView, StepView
from pipeworker.plan.actions import Kind
from pipeworker.plan.figures import bytes_text, seconds_text
from pipeworker.trace.causes import Breakdown

_KINDS: dict[Kind | str, tuple[str, str, str, str, str]] = {
    Kind.FORWARD: ("forward", "#0072b2", "#ffffff", "", ""),
    Kind.RECOMPUTE: ("recompute", "#9ccff0", "#1a1a1a", "stripes", "#5aa0cf"),
    Kind.BACKWARD: ("backward", "#e69f00", "#1a1a1a", "", ""),
    Kind.BACKWARD_INPUT: ("backward of the input", "#f4c65c", "#1a1a1a", "", ""),
    Kind.BACKWARD_WEIGHT: ("backward of the weights", "#7a3d6b", "#ffffff", "dots", "#d9a8cb"),
    Kind.LOAD: ("data()", "#f0e442", "#1a1a1a", "", ""),
    "update": ("update of the weights", "#8c959f", "#1a1a1a", "", ""),
    "other": ("snapshot, checkpoint or evaluation", "#009e73", "#ffffff", "stripes", "#55c8a8"),
}
"""By kind: name, colour (of Okabe and Ito's palette), colour of text on it, pattern, its colour."""
_COLOURS = {
    "forward": "#0072b2",
    "recompute": "#9ccff0",
    "backward": "#e69f00",
    "optimizer": "#8c959f",
    "fill_drain": "#d0d7de",
    "imbalance": "#cc79a7",
    "transfer": "#009e73",
    "data": "#f0e442",
    "coordinator": "#d55e00",
    "checkpoint": "#7a3d6b",
    "recovery": "#56203d",
    "other": "#a8b0b8",
}
WORDS = {"fill_drain": "fill, drain"}
"""Parts whose text has another name."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 360, 130, 64, 24, 20
_LONGEST = 1e9
"""Seconds of a step that is drawn, at most."""
_KEYS = (
    ("+", "-", "0"),
    ("←", "→"),
    ("↑", "↓"),
    ("n", "p"),
)
_WHAT = ("zoom in, out, whole step", "earlier, later", "another worker", "next, previous action")


def page(view: ReportView) -> str:
    """Return the page."""
    here = files(__package__)
    style = curves.STYLE + here.joinpath("page.css").read_text("utf-8")
    script = here.joinpath("page.js").read_text("utf-8")
    return "\n".join([*html.document(view.title, _body(view), style=style, script=script), ""])


def _body(view: ReportView) -> Iterator[str]:
    yield f'<p class="answer">{escape(view.answer)}</p>'
    yield '<dl class="figures">'
    for name, value in view.figures:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"
    if view.curves:
        yield "<h2>By step</h2>"
        yield '<div class="curves">'
        for curve in view.curves:
            yield f'<figure class="curve">{curve.svg()}<figcaption></figcaption></figure>'
        yield "</div>"
    if view.found is not None:
        yield "<h2>A step, to scale</h2>"
        yield from _timeline(view)
        yield "<h2>Where the time went</h2>"
        yield from _shares(view.found, view.workers)
    if view.foreseen is not None:
        yield "<h2>Where it goes as planned</h2>"
        yield from _shares(view.foreseen, view.workers)
    if view.memory:
        yield "<h2>Memory of each worker over a step</h2>"
        yield from _memories(view.memory)
    yield "<h2>What happened</h2>"
    yield '<ul class="happened">'
    for when, what in view.happened:
        yield f"<li><time>{escape(when)}</time>{escape(what)}</li>"
    yield "</ul>"
    text = json.dumps(_data(view), separators=(",", ":")).replace("<", "\\u003c")
    yield f'<script type="application/json" id="data">{text}</script>'


def _timeline(view: ReportView) -> Iterator[str]:
    yield '<div class="controls">'
    if len(view.steps) > 1:
        options = "".join(f"<option>{escape(step.title)}</option>" for step in view.steps)
        yield f'<select id="step" aria-label="step">{options}</select>'
    for name, text in (
        ("zoom-in", "Zoom in"),
        ("zoom-out", "Zoom out"),
        ("earlier", "Earlier"),
        ("later", "Later"),
        ("whole", "Whole step"),
    ):
        yield f'<button type="button" id="{name}">{text}</button>'
    yield "</div>"
    keys = "; ".join(
        f"{' '.join(f'<kbd>{key}</kbd>' for key in some)} {what}"
        for some, what in zip(_KEYS, _WHAT, strict=True)
    )
    yield f'<p class="keys">Keys, when a timeline has the focus: {keys}.</p>'
    for name in ("measured", *(("planned",) if view.planned else ())):
        yield f'<figure class="panel" id="{name}"><figcaption></figcaption>'
        yield '<canvas tabindex="0" role="application"></canvas></figure>'
    yield '<output id="what" aria-live="polite"></output>'
    used = {_key(box.kind) for step in _steps(view) for row in step.rows for box in row}
    yield '<ul class="legend">'
    for kind, (name, colour, _, pattern, mark) in _KINDS.items():
        if kind in used:
            yield f"<li>{_swatch(colour, pattern, mark)}{escape(name)}</li>"
    yield "</ul>"


def _steps(view: ReportView) -> Sequence[StepView]:
    return [*view.steps, *([view.planned] if view.planned else ())]


def _key(kind: Kind | str) -> Kind | str:
    return kind if kind in _KINDS else "other"


_MARKS = {
    "": "",
    "stripes": '<path d="M-7 14L7 0M0 14L14 0M7 14L21 0" stroke="{}" stroke-width="2"/>',
    "dots": '<path d="M3.5 3.5h0M10.5 3.5h0M3.5 10.5h0M10.5 10.5h0" stroke="{}" stroke-width="3" '
    'stroke-linecap="round"/>',
}
"""Patterns of swatches, which the script repeats on the timeline."""


def _swatch(colour: str, pattern: str = "", mark: str = "") -> str:
    return (
        '<svg width="14" height="14" aria-hidden="true">'
        f'<rect width="14" height="14" fill="{colour}"/>{_MARKS[pattern].format(mark)}</svg>'
    )


def _data(view: ReportView) -> dict[str, Any]:
    """Return what the script draws."""
    names = ("name", "color", "ink", "pattern", "mark")
    kinds = [dict(zip(names, kind, strict=True)) for kind in _KINDS.values()]
    numbers = {kind: number for number, kind in enumerate(_KINDS)}
    return {
        "kinds": kinds,
        "workers": list(view.workers),
        "steps": [_drawn(step, numbers) for step in view.steps],
        "planned": _drawn(view.planned, numbers) if view.planned else None,
        "curves": [_points(curve) for curve in view.curves],
    }


def _points(curve: Curve) -> dict[str, Any]:
    names = ("low", "mean", "high")
    values = {name: [float(f"{x:.6g}") for x in getattr(curve, name)] for name in names}
    return {"first": curve.first, "steps": list(curve.steps), **values}


def _drawn(step: StepView, numbers: Mapping[Kind | str, int]) -> dict[str, Any]:
    def flat(row: Sequence[Box]) -> Iterator[int]:
        for box in row:
            begin, end = (round(min(at, _LONGEST) * 1e6) for at in (box.begin, box.end))
            yield from (numbers[_key(box.kind)], box.stage, box.microbatch, begin, end - begin)

    rows = [list(flat(row)) for row in step.rows]
    seconds = min(max(step.seconds, 1e-6), _LONGEST)
    return {"title": step.title, "seconds": seconds, "rows": rows}


def _shares(found: Breakdown, workers: Sequence[str]) -> Iterator[str]:
    """Yield a table with a bar for each worker, and the shares of its parts."""
    rows = [("worker", workers[time.worker], time.parts) for time in found.workers]
    if len(rows) > 1:
        rows.append(("mean", "mean", found.mean))
    shown = [name for name, seconds in found.mean.items() if seconds]
    heads = [f"{_swatch(_COLOURS[name])} {WORDS.get(name, name)}" for name in shown]
    count = len(found.steps) or 1
    each = found.seconds / count
    steps = f"{count} recorded steps of {seconds_text(each)}" if count > 1 else seconds_text(each)
    yield f"<p>Shares of {steps}.</p>"
    yield '<div class="shares">'
    cells: list[tuple[str, Sequence[str]]] = []
    for kind, label, parts in rows:
        shares = (f"{_share(parts[name], found.seconds):.1%}" for name in shown)
        cells.append((kind, [escape(label), _bar(parts, found.seconds), *shares]))
    yield from html.table(["worker", "", *heads], cells, ("worker", ""))
    yield "</div>"


def _share(seconds: float, whole: float) -> float:
    return seconds / whole if whole > 0 else 0.0


def _bar(parts: Mapping[str, float], whole: float) -> str:
    """Return a bar of shares of a time."""
    at, boxes = 0.0, []
    for name, seconds in parts.items():
        width = 1000 * _share(seconds, whole)
        if width > 0:
            title = f"<title>{WORDS.get(name, name)}: {width / 10:.1f}%</title>"
            box = f'x="{at:.1f}" width="{width:.1f}" height="18" fill="{_COLOURS[name]}"'
            boxes.append(f"<rect {box}>{title}</rect>")
            at += width
    return (
        '<svg class="bar" viewBox="0 0 1000 18" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(boxes)}</svg>"
    )


def _memories(found: Sequence[MemoryView]) -> Iterator[str]:
    yield "<p>Measured, the peak that was planned (dashed), and the limit where it is near.</p>"
    least = min(min(one.sizes) for one in found)
    most = max(max([*one.sizes, one.planned or 0]) for one in found)
    room = max(4, (most - least) // 4)
    yield '<div class="memory">'
    for one in found:
        yield f"<figure>{''.join(_memory(one, max(0, least - room), most + room // 4))}</figure>"
    yield "</div>"


def _memory(one: MemoryView, least: int, most: int) -> Iterator[str]:
    """Yield a picture of a worker's memory, between bytes that all pictures have."""
    last = one.times[-1] or 1.0
    across, down = _WIDTH - _LEFT - 8, _HEIGHT - _TOP - _BOTTOM

    def at(seconds: float, size: float) -> str:
        x, y = seconds / last * across, (most - size) / (most - least) * down
        return f"{_LEFT + x:.1f} {_TOP + y:.1f}"

    planned = f", planned {bytes_text(one.planned)}" if one.planned else ""
    label = f"{one.label}: {bytes_text(max(one.sizes))}{planned}"
    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"><title>{escape(label)}</title>'
    yield f'<text x="0" y="14" class="name">{escape(label)}</text>'
    points = map(at, one.times, one.sizes)
    ends = at(one.times[0], least), at(last, least)
    yield f'<path d="M{ends[0]}L{"L".join(points)}L{ends[1]}Z" class="used"/>'
    for size in (least, (least + most) // 2, most):
        _, y = at(0, size).split()
        place = f'x="{_LEFT - 6}" y="{float(y) + 4:.1f}"'
        yield f'<text {place} text-anchor="end">{bytes_text(size)}</text>'
    for name, line in (("planned", one.planned), ("limit", one.limit)):
        if line is not None and line <= most:
            yield f'<path d="M{at(0, line)}h{across}" class="{name}"/>'
    right = f'x="{_LEFT + across}" y="{_HEIGHT - 4}" text-anchor="end"'
    yield f"<text {right}>{seconds_text(last)}</text>"
    yield "</svg>"
