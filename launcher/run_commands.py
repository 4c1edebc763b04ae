"""The commands for runs that exist, whether their jobs still run or not."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from launcher.command import JSON, PATH, RUN, NonEmptyPath
from pipeworker.errors import UsageError


@click.command("list")
@click.argument("folder", metavar="[DIR]", type=PATH, default="runs")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per run.")
@click.option(
    "--sort",
    metavar="NAME",
    default="started",
    show_default=True,
    help="Column to sort by, the largest last; -NAME: the largest first.",
)
@click.option(
    "--columns",
    metavar="A,B",
    help="Columns: run, status, steps, loss, evaluation, stages, arguments, time, disk, started, "
    "evaluation.NAME, or an option. [default: these, and the options that differ]",
)
def list_runs(folder: Path, sort: str, columns: str | None, *, as_json: bool) -> None:
    """List the runs in the folder DIR (default: runs), one line each, the newest last."""
    from pipeworker.runs import listing

    if columns is not None and as_json:
        raise UsageError("--columns: the objects of --json have all facts; leave it out")
    chosen = [name.strip() for name in columns.split(",")] if columns is not None else []
    click.echo(listing.list_runs(folder, as_json=as_json, sort=sort, columns=chosen))


@click.command()
@click.argument("first", metavar="RUN", type=PATH)
@click.argument("second", metavar="RUN2", type=PATH)
@JSON
def compare(first: Path, second: Path, *, as_json: bool) -> None:
    """Show what differs between RUN and RUN2: options, versions, results and curves."""
    from pipeworker.runs import compare

    click.echo(compare.compare(first, second, as_json=as_json))


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option("--keep-weights", is_flag=True, help="Keep each run's newest and best checkpoints.")
@click.option("--remove-weights", is_flag=True, help="Remove all checkpoints of each run.")
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
def prune(folder: Path, *, keep_weights: bool, remove_weights: bool, dry_run: bool) -> None:
    """Free the disk of old checkpoints of DIR, a folder of runs or a run.

    Runs that are running are left alone. Options, rows and logs of all runs stay.
    """
    from pipeworker.runs import prune

    if keep_weights == remove_weights:
        raise UsageError(
            "prune: choose one of --keep-weights, which keeps each run's newest and best "
            "checkpoints, and --remove-weights, which removes all; --dry-run only shows them"
        )
    for line in prune.prune(folder, keep_weights=keep_weights, dry_run=dry_run):
        click.echo(line)


@click.command()
@RUN
@click.option(
    "--steps", metavar="A:B", help="The first and the last step. [default: the last ones]"
)
@click.option(
    "-o",
    "--output",
    type=PATH,
    help="The file to write. [default: timeline.json, or timeline.tar for several hosts]",
)
def trace(run: Path, steps: str | None, output: Path | None) -> None:
    """Write what the workers of RUN did and when, for Perfetto; RUN may be running."""
    from pipeworker.runs import trace

    click.echo(trace.write_trace(run, steps, output))


@click.command()
@RUN
@click.option("--compare", "other", metavar="RUN2", type=PATH, help="Another run, side by side.")
@JSON
@click.option("--html", metavar="FILE", type=PATH, help="Write a page for a browser.")
def report(run: Path, other: Path | None, html: Path | None, *, as_json: bool) -> None:
    """Show where the time of the steps of RUN went, and what to change; RUN may be running."""
    from pipeworker.runs import report, report_page

    if html is None:
        click.echo(report.report(run, other, as_json=as_json))
    elif as_json or other is not None:
        raise UsageError("--html: it is of one run, and for people; leave --json and --compare out")
    else:
        click.echo(report_page.write_page(run, html))


@click.command()
@RUN
@click.option("--once", is_flag=True, help="Show it once.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, once.")
def top(run: Path, *, once: bool, as_json: bool) -> None:
    """Show what the workers of the job that runs in RUN do, live; the job is left alone."""
    from pipeworker.display.style import is_dumb
    from pipeworker.runs import top

    if as_json:
        click.echo(json.dumps(top.snapshot(run), indent=2))
    elif once or not sys.stdout.isatty() or is_dumb():
        top.show_once(run)
    else:
        top.watch(run)


@click.command()
@click.argument("run", type=NonEmptyPath())
def cancel(run: str) -> None:
    """End the job of RUN, wherever it runs, with a checkpoint.

    RUN is its run directory; or, on Kubernetes, that in the pods or the name of the job.
    """
    from launcher.cancel import cancel

    click.echo(cancel(run))


@click.command()
@RUN
def checkpoint(run: Path) -> None:
    """Make the job that runs in RUN save at the end of its step, and wait for the checkpoint."""
    from pipeworker.runs import checkpoint_request

    click.echo(checkpoint_request.request_checkpoint(run))


@click.command()
@RUN
@JSON
def show(run: Path, *, as_json: bool) -> None:
    """Show what the run in the directory RUN was and did, and where its weights are."""
    from pipeworker.runs import show

    click.echo(show.show(run, as_json=as_json))


RUN_COMMANDS = (cancel, list_runs, compare, prune, report, top, trace, checkpoint, show)
