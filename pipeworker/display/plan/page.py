"""A plan as one HTML file: the picture, the stages and other choices. It loads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from pipeworker.display.html import document, table
from pipeworker.display.plan.svg import Picture
from pipeworker.display.plan.text import summary
from pipeworker.display.plan.view import PlanView
from pipeworker.plan.figures import bytes_text, count_text, rate_text, seconds_text

_STAGE_HEAD = (
    *("stage", "worker", "layers", "parameters", "forward", "recompute", "backward"),
    *("memory", "limit", "recompute mode"),
)
_CHOICE_HEAD = ("schedule", "stages", "step", "samples/s", "bubble", "memory", "note")
_WORDS = ("schedule", "recompute mode", "note")
"""Columns of words."""


def picture_of(view: PlanView, width: int = 960) -> Picture:
    """Return the picture of a plan's step."""
    planned = view.planned
    speed = ""
    if view.measured:
        speed = f": step {seconds_text(planned.step_seconds)}, "
        speed += f"{rate_text(view.samples_per_second)} samples/s"
    return Picture(
        f"{view.title}{speed}",
        view.rows,
        view.spans,
        planned.timing.bubble,
        planned.update,
        timed=view.measured,
        width=width,
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
    yield from table(_STAGE_HEAD, _stage_rows(view), _WORDS)
    if len(view.choices) > 1:
        yield "<h2>Schedules and numbers of stages</h2>"
        yield from table(_CHOICE_HEAD, _choice_rows(view), _WORDS)


def _stage_rows(view: PlanView) -> Iterator[tuple[str, Sequence[str]]]:
    total = sum(stage.seconds for stage in view.stages) or 1.0
    for stage in view.stages:
        times = (stage.forward, stage.recompute, stage.backward)
        first, stop = stage.layers
        memory, limit = bytes_text(stage.memory), "-"
        if stage.limit is not None:
            limit = bytes_text(stage.limit)
            share = min(1.0, stage.memory / stage.limit) if stage.limit else 1.0
            memory += f' <meter value="{share:.3f}" aria-label="{share:.0%} of the limit"></meter>'
        yield (
            "stage",
            (
                str(stage.stage),
                str(stage.worker),
                f"{first}-{stop - 1}" if stop - first > 1 else str(first),
                count_text(stage.parameters),
                *(_time(seconds, total, measured=view.measured) for seconds in times),
                memory,
                limit,
                escape(stage.mode),
            ),
        )


def _time(seconds: float, total: float, *, measured: bool) -> str:
    if not seconds:
        return "-"
    return seconds_text(seconds) if measured else f"{seconds / total:.1%}"


def _choice_rows(view: PlanView) -> Iterator[tuple[str, Sequence[str]]]:
    for one in view.choices:
        virtual = f" × {one.virtual_stages}" if one.virtual_stages > 1 else ""
        figures = ("-",) * 4
        if not one.problem:
            measured = view.measured
            figures = (
                seconds_text(one.step_seconds) if measured else "-",
                rate_text(one.samples_per_second) if measured else "-",
                f"{one.bubble:.1%}",
                bytes_text(one.memory),
            )
        note = one.problem or ("" if one.fits else "does not fit")
        yield (
            "chosen" if view.is_chosen(one) else "choice",
            (escape(one.order), f"{one.stages}{virtual}", *figures, escape(note)),
        )
