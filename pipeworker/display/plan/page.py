"""A plan as one HTML file: the picture, the stages and other choices. It loads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipeworker.display.html import document, table
from pipeworker.display.plan.svg import Picture
from pipeworker.display.plan.text import (
    CHOICE_HEAD,
    STAGE_HEAD,
    choice_cells,
    stage_cells,
    summary,
)
from pipeworker.display.plan.view import PlanView
from pipeworker.plan.figures import rate_text, seconds_text

_WORDS = ("schedule", "recompute mode", "note")
"""Columns of words."""


def picture_of(view: PlanView) -> Picture:
    """Return the picture of a plan's step."""
    planned = view.planned
    speed = ""
    if view.measured:
        speed = f": step {seconds_text(planned.step_seconds)}, "
        speed += f"{rate_text(view.samples_per_second(planned))} samples/s"
    return Picture(
        f"{view.title}{speed}",
        view.rows,
        view.spans,
        planned.timing.bubble,
        planned.update,
        timed=view.measured,
    )


def html(view: PlanView) -> str:
    """Return the page of a plan."""
    return "\n".join([*document(view.title, _body(view)), ""])


def _body(view: PlanView) -> Iterator[str]:
    _, *others = summary(view)
    yield from (f"<p>{escape(line)}</p>" for line in others)
    yield f"<figure>{picture_of(view).svg()}</figure>"
    yield "<h2>Stages</h2>"
    yield "<p>Times are those of a step; memory is that of the stage's worker.</p>"
    yield from table(STAGE_HEAD, _stage_rows(view), _WORDS)
    if len(view.choices) > 1:
        yield "<h2>Schedules and numbers of stages</h2>"
        yield from table((*CHOICE_HEAD, "note"), _choice_rows(view), _WORDS)


def _stage_rows(view: PlanView) -> Iterator[tuple[str, Sequence[str]]]:
    for stage in view.stages:
        cells = dict(zip(STAGE_HEAD, map(escape, stage_cells(view, stage)), strict=True))
        if stage.limit is not None:
            share = min(1.0, stage.memory / stage.limit) if stage.limit else 1.0
            meter = f'<meter value="{share:.3f}" aria-label="{share:.0%} of the limit"></meter>'
            cells["memory"] += f" {meter}"
        yield "stage", [*cells.values()]


def _choice_rows(view: PlanView) -> Iterator[tuple[str, Sequence[str]]]:
    for one in view.choices:
        kind = "chosen" if view.is_chosen(one) else "choice"
        yield kind, [*map(escape, choice_cells(view, one))]
