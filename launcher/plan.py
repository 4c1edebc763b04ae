"""The command ``plan``: what a step looks like before it runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import click

from launcher import local
from launcher.aside import run_aside, temporary_run
from launcher.command import PATH, Option, is_typed
from launcher.job_command import FileCommand
from launcher.options import LAUNCH_PARAMETERS
from pipeworker.coordinator.job import SLOTS
from pipeworker.coordinator.service import recorded_facts
from pipeworker.display.plan import page, schedules
from pipeworker.display.plan.as_json import to_json
from pipeworker.display.plan.schedules import EqualStages
from pipeworker.display.plan.text import Paint, lines_of, plain
from pipeworker.display.plan.view import PlanView
from pipeworker.display.style import is_dumb
from pipeworker.errors import PipeworkerError, UsageError, writing
from pipeworker.facts.layer_facts import NetworkFacts
from pipeworker.job.interval import END
from pipeworker.job.option_parsing import make_options
from pipeworker.job.options import Options
from pipeworker.job.planning import limited, request_of
from pipeworker.job.renamed import RENAMED, written
from pipeworker.plan import text
from pipeworker.plan.actions import Kind
from pipeworker.plan.figures import bytes_text, plural
from pipeworker.plan.orders import AUTO, ORDERS, resolve
from pipeworker.plan.partition import block
from pipeworker.plan.planner import choices
from pipeworker.plan.planner.planner import whole_text
from pipeworker.record.files.atomic_file import write_bytes

_OF_SCHEDULE = ("replicas", "microbatches", "schedule", "virtual_stages", "recompute")
"""Options of `launch` that decide a schedule."""
_OF_MODEL = (
    *("threads", "device", "seed", "precision", "deferred_batch_norm", "compile"),
    *("deterministic", "shard_optimizer", "balance", "data_reader", "memory", "no_profile"),
)
"""Options of `launch` that matter to the facts of a network, or to its division."""
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


class PlanCommand(FileCommand):
    """The command, whose job file is optional."""

    def reject(self, error: click.NoSuchOption) -> NoReturn:
        name = error.option_name
        former = RENAMED.get(name.removeprefix("--").replace("-", "_"))
        names = {name, former and written(former.new)}
        lacked = (one for one in LAUNCH_PARAMETERS if one not in self.params)
        if any(names & {*one.opts, *one.secondary_opts} for one in lacked):
            raise UsageError(
                f"{name}: an option of launch that changes no plan; leave it out"
            ) from None
        super().reject(error)

    def invoke(self, ctx: click.Context) -> Any:
        if ctx.params["job_file"] is not None:
            self.fill_in(ctx)
            return super().invoke(ctx)
        given = [name for name in _OF_MODEL if is_typed(ctx, name)]  # variables are for all plans
        given += ["config"] if ctx.params.pop("config") else []
        if given:
            raise UsageError(f"{written(given[0])}: no model is given; add JOB_FILE")
        return super().invoke(ctx)


def _launch_parameters(*names: str) -> list[click.Parameter]:
    return [one for one in LAUNCH_PARAMETERS if one.name in names]


def _parameters() -> list[click.Parameter]:
    stages = Option("--stages", "Workers. [default: those of a schedule file]", int)
    stages.group = "Workers"
    forms = (
        Option("--text as_text", "Print the schedule as a file for --schedule.", is_flag=True),
        Option("--json as_json", "Print one JSON object.", is_flag=True),
        Option("--svg", "Write a picture of a step.", PATH, metavar="FILE"),
        Option("--html", "Write a page with the picture and all figures.", PATH, metavar="FILE"),
        Option("--fit", "Print how many micro-batches fit, and on how few stages.", is_flag=True),
    )
    for form in forms:
        form.group, form.once, form.allow_from_autoenv = "Plan", True, False
    return [
        *_launch_parameters("job_file", "arguments"),
        stages,
        *_launch_parameters(*_OF_SCHEDULE, *_OF_MODEL),
        *forms,
        *_launch_parameters("config"),
    ]


@click.command(
    cls=PlanCommand, params=_parameters(), context_settings={"auto_envvar_prefix": "PIPEWORKER"}
)
def plan(
    *,
    job_file: str | None,
    arguments: tuple[str, ...],
    as_text: bool,
    as_json: bool,
    svg: Path | None,
    html: Path | None,
    fit: bool,
    **chosen: Any,
) -> None:
    """Show a step of the model of JOB_FILE before it runs: stages, memory, bubble and timeline.

    The layers are measured, one at a time; nothing is trained and no run directory is made. Other
    schedules and numbers of stages stand beside the plan. Without JOB_FILE all stages take equally
    long.
    """
    forms = {"--text": as_text, "--json": as_json, "--svg": svg, "--html": html, "--fit": fit}
    given = [name for name, value in forms.items() if value]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: choose one")
    if job_file is None:
        for name in ("--json", "--html", "--fit"):
            if name in given:
                raise UsageError(f"{name}: no model is given; add JOB_FILE")
        if chosen["schedule"] == AUTO:
            raise UsageError(f"--schedule {AUTO}: no model is given; add JOB_FILE")
        _show_schedule(_options("", chosen), svg, as_text=as_text)
        return
    path = Path(job_file)
    local.check_job_file(path)
    options = _options(str(path.resolve()), {**chosen, "arguments": arguments})
    facts = limited(_measured(options), options)
    request = request_of(options)
    if fit:
        for line in _fitting(facts, request):
            click.echo(line)
        return
    planned = choices.plan_request(facts, request)
    if as_text:
        order = resolve(planned.order, planned.virtual_stages)
        click.echo(whole_text(planned, order, planned.name), nl=False)
        return
    own, others = choices.Alternative(request, planned), choices.alternatives(facts, request)
    view = PlanView.of(planned, facts, [] if svg else [own, *others])
    if as_json:
        click.echo(json.dumps(to_json(view)))
    elif svg is not None:
        _write(svg, page.picture_of(view).svg(), f"a step of {planned.schedule.name}")
    elif html is not None:
        _write(html, page.html(view), f"the plan of {path.name}")
    else:
        for line in lines_of(view, _width(), _paint()):
            click.echo(line)  # without colours if this is no terminal


def _options(job_file: str, chosen: dict[str, Any]) -> Options:
    """Return the options of a job."""
    stages = chosen.pop("stages")
    if stages is None and text.is_text(chosen["schedule"]):
        stages = len(text.parse(chosen["schedule"]).workers)
    if stages is None:
        if not job_file:
            raise UsageError("--stages: missing; give the number of stages")
        stages = local.default_stages(chosen["replicas"])
    return make_options(job_file, stages, chosen)


def _measured(options: Options) -> NetworkFacts:
    """Return the facts of the layers, found by the start of the job, without a step."""
    slots = SLOTS if options.max_restarts else 1
    options = replace(options, plan_only=True, balance=None, max_restarts=0, checkpoint_every=END)
    with temporary_run() as run_dir:
        run_aside(options, run_dir)
        found = recorded_facts(run_dir)
    if found is None:
        raise PipeworkerError("plan: the facts of the layers were not recorded")
    return replace(found, copies=slots) if found.copies else found


def _fitting(facts: NetworkFacts, request: choices.PlanRequest) -> Iterator[str]:
    """Yield how large a job fits: its micro-batches have the size that was measured."""
    if text.is_text(request.schedule) or request.schedule == AUTO:
        raise UsageError(
            f"--fit and --schedule {text.name_of(request.schedule)}: it is for one number of "
            "micro-batches; name another schedule"
        )
    limits = [limit for limit in facts.limits if limit is not None]
    if not limits:
        yield "no limit of the memory is known: any number of micro-batches fits"
        return
    samples = f"{plural(facts.samples, 'sample')} a micro-batch"
    yield f"{bytes_text(min(limits))} a worker, {samples}, {request.order.name}"
    part = choices.largest_microbatches(facts, request)
    count, on = part * request.replicas, f"on {plural(request.workers, 'stage')}"
    fitting = plural(count, "micro-batch")
    if part == choices.MOST_MICROBATCHES:
        yield f"{on}: {fitting} or more fit"
    elif part:
        yield f"{on}: at most {fitting}, {count * facts.samples} samples a step"
    else:
        yield f"{on}: nothing fits"
    fewest = choices.fewest_workers(facts, request)
    where = f"{plural(fewest, 'stage')} or more" if fewest else "no number of stages"
    yield f"{plural(request.microbatches, 'micro-batch')} fit on {where}"


def _show_schedule(options: Options, svg: Path | None, *, as_text: bool) -> None:
    """Show a schedule without a model."""
    found = _equal_stages(options)
    if as_text:
        name = text.name_of(options.schedule)
        click.echo(text.format_compute(found.schedule, name), nl=False)
    elif svg is not None:
        _write(svg, found.picture().svg(), f"a step of {found.schedule.name}")
    else:
        for line in (*found.lines(_width(), _paint()), ""):
            click.echo(line)
        for line in schedules.side_by_side(_compared(options, found)):
            click.echo(line)


def _write(path: Path, content: str, what: str) -> None:
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UsageError(f"{path}: is no regular file; choose another file")
    with writing(path):
        write_bytes(path, content.encode())
    click.echo(f"{path}: {what}")


def _width() -> int:
    return shutil.get_terminal_size((_WIDTH, 0)).columns


def _paint() -> Paint:
    return plain if os.environ.get("NO_COLOR") or is_dumb() else _painted


def _painted(text: str, kind: Kind | None) -> str:
    if kind is None:
        return text
    background, ink = _COLOURS[kind]
    return click.style(text, fg=ink, bg=background)


def _equal_stages(options: Options) -> EqualStages:
    placement = options.placement.copies(1)
    modes: Sequence[str] = (options.recompute,) * placement.stages
    count = len(block(options.microbatches, options.replicas, 0))
    return EqualStages.of(options.schedule_source.build(placement, count, modes))


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
