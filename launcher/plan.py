"""The command ``plan``: what a step of a schedule looks like before it runs."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from launcher.command import Command, Option
from launcher.options import LAUNCH_PARAMETERS
from pipeworker.display.plan import schedules
from pipeworker.display.plan.schedules import EqualStages
from pipeworker.display.plan.text import plain
from pipeworker.errors import RecordError, UsageError
from pipeworker.job.option_parsing import make_options
from pipeworker.job.options import Options
from pipeworker.plan import text
from pipeworker.plan.actions import Kind
from pipeworker.plan.orders import ORDERS
from pipeworker.record.atomic_file import write_bytes

_TAKEN = ("microbatches", "schedule", "virtual_stages", "recompute")
"""Options of `launch` that decide a schedule."""
_COLOURS = {
    Kind.FORWARD: ("blue", "bright_white"),
    Kind.RECOMPUTE: ("cyan", "black"),
    Kind.BACKWARD: ("yellow", "black"),
    Kind.BACKWARD_INPUT: ("bright_yellow", "black"),
    Kind.BACKWARD_WEIGHT: ("magenta", "bright_white"),
}
"""The background and the ink of each kind of action on a terminal."""
_WIDTH = 100
"""Columns of a timeline that is not printed on a terminal."""


def _parameters() -> list[click.Parameter]:
    taken = [one for one in LAUNCH_PARAMETERS if one.name in _TAKEN]
    stages = Option("--stages", "Workers. [default: those of a schedule file]", int)
    stages.group = "Schedule and memory"
    forms = (
        Option("--text as_text", "Print the schedule as a file for --schedule.", is_flag=True),
        Option("--svg", "Write a picture of a step.", click.Path(path_type=Path), metavar="FILE"),
    )
    for form in forms:
        form.group = "Form"
    return [stages, *taken, *forms]


@click.command(cls=Command, params=_parameters())
def plan(*, as_text: bool, svg: Path | None, **chosen: Any) -> None:
    """Show a step of a schedule: which worker runs what and when, the bubble, and other schedules.

    Stages take equally long; the table compares all schedules with as many workers.
    """
    if as_text and svg is not None:
        raise UsageError("--text and --svg: choose one")
    options = _options(chosen)
    found = _equal_stages(options)
    if as_text:
        name = text.name_of(options.schedule)
        click.echo(text.format_compute(found.schedule, name), nl=False)
        return
    if svg is not None:
        try:
            write_bytes(svg, found.picture().svg().encode())
        except OSError as error:
            raise RecordError(svg, error) from None
        click.echo(f"{svg}: a step of {found.schedule.name}")
        return
    paint = plain if os.environ.get("NO_COLOR") else _painted
    for line in found.lines(shutil.get_terminal_size((_WIDTH, 0)).columns, paint):
        click.echo(line)  # without colours if this is no terminal
    click.echo("")
    for line in schedules.side_by_side(_compared(options, found)):
        click.echo(line)


def _painted(text: str, kind: Kind | None) -> str:
    if kind is None:
        return text
    background, ink = _COLOURS[kind]
    return click.style(text, fg=ink, bg=background)


def _options(chosen: dict[str, Any]) -> Options:
    """Return the options of a job with this schedule.

    Raises:
        UsageError: an option is out of range, or does not fit the others.
    """
    stages = chosen.pop("stages")
    if stages is None and text.is_text(chosen["schedule"]):
        stages = len(text.parse(chosen["schedule"]).workers)
    if stages is None:
        raise UsageError("--stages: missing; give the number of stages")
    return make_options("", stages, chosen)


def _equal_stages(options: Options) -> EqualStages:
    placement = options.placement
    modes = (options.recompute,) * placement.stages
    source = options.schedule_source
    return EqualStages.of(source.build(placement, options.microbatches, modes))


def _compared(options: Options, found: EqualStages) -> dict[str, EqualStages | str]:
    """Return the schedule, and all others for as many workers and micro-batches."""
    recompute = options.recompute
    actions = (action for some in found.schedule.workers for action in some)
    if not any(action.kind is Kind.RECOMPUTE for action in actions):
        recompute = "never"  # as a file decides
    compared: dict[str, EqualStages | str] = {found.schedule.name: found}
    for name in ORDERS:
        if name in compared:
            continue
        try:
            other = replace(options, schedule=name, virtual_stages=None, recompute=recompute)
            compared[name] = _equal_stages(other)
        except UsageError as error:
            compared[name] = str(error)
    return compared
