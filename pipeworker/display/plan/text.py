"""A plan as text for a terminal: a table by stage, a timeline, and other choices beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from itertools import groupby

from pipeworker.display.plan.view import PlanView, StageView
from pipeworker.display.text import table
from pipeworker.plan.actions import Kind
from pipeworker.plan.figures import bytes_text, count_text, plural, rate_text, seconds_text
from pipeworker.plan.planner.choices import Alternative
from pipeworker.plan.simulate import Span

NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, input part",
    Kind.BACKWARD_WEIGHT: "backward, weight part",
}
"""The name of each kind of action, in the order of a legend."""
Run = tuple[str, "Kind | None"]
"""Some characters of a timeline, and the kind of their action; None where a worker is idle."""
Paint = Callable[[str, "Kind | None"], str]
"""Colours some characters of a timeline by the kind of their action."""
_IDLE, _FILL = "·", "─"
_LEAST = 20
"""The fewest columns of a timeline: on a narrower terminal lines are longer than it."""


def plain(text: str, kind: Kind | None) -> str:
    """Return a part of a timeline without colours."""
    return text


def lines_of(view: PlanView, width: int, paint: Paint = plain) -> Iterator[str]:
    """Yield the lines of a plan, its timeline in `width` columns, coloured by `paint`."""
    yield from summary(view)
    yield ""
    yield from stage_table(view)
    yield ""
    yield from timeline_lines(view.rows, view.spans, width, paint)
    if len(view.choices) > 1:
        yield ""
        yield from choice_table(view)


def summary(view: PlanView) -> Iterator[str]:
    """Yield the plan, its predicted figures, and why it is so."""
    planned = view.planned
    yield f"{view.title}, {plural(view.samples_each, 'sample')} a micro-batch"
    if view.measured:
        yield (
            f"step {seconds_text(planned.step_seconds)}, "
            f"{rate_text(view.samples_per_second(planned))} samples/s, "
            f"bubble {planned.timing.bubble:.1%}"
        )
    else:
        yield f"bubble {planned.timing.bubble:.1%}, from counted operations: nothing was measured"
    yield from planned.why


STAGE_HEAD = (
    *("stage", "worker", "layers", "parameters", "forward", "recompute", "backward"),
    *("memory", "limit", "recompute mode"),
)
CHOICE_HEAD = ("schedule", "stages", "step", "samples/s", "bubble", "memory")
"""The heads of a table of choices, whose last column is a note."""


def stage_cells(view: PlanView, stage: StageView) -> list[str]:
    """Return the cells of a stage, as in STAGE_HEAD; times are those of a step."""
    total = sum(one.seconds.total for one in view.stages)

    def time(seconds: float) -> str:
        if not seconds:
            return "-"
        return seconds_text(seconds) if view.measured else f"{seconds / total:.1%}"

    first, stop = stage.layers
    return [
        str(stage.stage),
        str(stage.worker),
        f"{first}-{stop - 1}" if stop - first > 1 else str(first),
        count_text(stage.parameters),
        *map(time, astuple(stage.seconds)),
        bytes_text(stage.memory),
        "-" if stage.limit is None else bytes_text(stage.limit),
        stage.mode,
    ]


def choice_cells(view: PlanView, one: Alternative) -> list[str]:
    """Return the cells of a choice, as in CHOICE_HEAD, and a note."""
    virtual = f" × {one.virtual_stages}" if one.virtual_stages > 1 else ""
    name, planned = [one.name, f"{one.request.workers}{virtual}"], one.planned
    if planned is None:
        return [*name, *"----", one.problem]
    return [
        *name,
        seconds_text(planned.step_seconds) if view.measured else "-",
        rate_text(view.samples_per_second(planned)) if view.measured else "-",
        f"{planned.timing.bubble:.1%}",
        bytes_text(max(planned.memory)),
        "" if planned.fits else "does not fit",
    ]


def stage_table(view: PlanView) -> list[str]:
    """Return a table with a row for each stage, and its worker if workers hold several."""
    rows = [[*STAGE_HEAD], *(stage_cells(view, stage) for stage in view.stages)]
    if view.planned.virtual_stages == 1:
        rows = [[stage, *others] for stage, _, *others in rows]
    return table(rows, right=range(len(rows[0]) - 1))


def choice_table(view: PlanView) -> list[str]:
    """Return a table of plans side by side; this plan is marked."""
    rows = [["", *CHOICE_HEAD, ""]]
    rows += [["*" if view.is_chosen(one) else "", *choice_cells(view, one)] for one in view.choices]
    return table(rows, right=range(2, 7))


def timeline_lines(
    labels: Sequence[str], spans: Sequence[Sequence[Span]], width: int, paint: Paint
) -> list[str]:
    """Return a timeline, and what its letters mean; `paint` colours its parts."""
    rows = timeline_rows(labels, spans, width)
    lines = ["".join(paint(text, kind) for text, kind in row) for row in rows]
    kinds = {span.action.kind for some in spans for span in some}
    names = [paint(f"{k.value} {name}", k) for k, name in NAMES.items() if k in kinds]
    return [*lines, "   ".join([*names, f"{_IDLE} idle"])]


def timeline_rows(
    labels: Sequence[str], spans: Sequence[Sequence[Span]], width: int
) -> list[list[Run]]:
    """Return the rows of a timeline to scale, `width` columns wide: one for each worker.

    The first item of a row is its label.
    """
    margin = max(map(len, labels), default=0) + 2
    columns = max(width - margin, _LEAST)
    end = max((span.end for some in spans for span in some), default=1.0)
    return [
        [(label.ljust(margin), None), *_runs(some, end, columns)]
        for label, some in zip(labels, spans, strict=True)
    ]


def _runs(spans: Sequence[Span], end: float, columns: int) -> Iterator[Run]:
    """Yield what a worker does, in `columns` characters."""
    cells, labelled = _cells(spans, end, columns), set[int]()
    for span in spans:
        label = f"{span.action.kind.value}{span.action.microbatch}"
        first, last = (round(columns * time / end) for time in (span.start, span.end))
        if len(label) <= last - first:
            for at, character in enumerate(label.ljust(last - first, _FILL), first):
                cells[at] = character, span.action.kind
                labelled.add(at)
    for at in range(1, columns):  # between two labels, shared by their actions
        if at not in labelled and at - 1 in labelled and cells[at][1] is cells[at - 1][1]:
            cells[at] = _FILL, cells[at][1]
    for kind, same in groupby(cells, key=lambda cell: cell[1]):
        yield "".join(character for character, _ in same), kind


def _cells(spans: Sequence[Span], end: float, columns: int) -> list[Run]:
    """Return for each character the kind that takes most of its time."""
    shares: list[dict[Kind | None, float]] = [{None: 1.0} for _ in range(columns)]
    for (kind, *_), start, stop in spans:
        left, right = columns * start / end, columns * stop / end
        for at in range(int(left), min(math.ceil(right), columns)):
            share = min(right, at + 1) - max(left, at)
            shares[at][kind] = shares[at].get(kind, 0.0) + share
            shares[at][None] -= share
    most = [max(share, key=lambda kind: share[kind]) for share in shares]
    return [(_IDLE if kind is None else kind.value, kind) for kind in most]
