"""What the user types."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from launcher import templates
from launcher.choose import Elsewhere
from launcher.command import Command, Shown, clearly, is_given, is_said, origin
from launcher.defaults import Defaults, slips
from launcher.options import ANYWHERE, export_options, init_options, job_options, launch_options
from launcher.view import take
from pipeworker import __version__
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.job.given import stages_of
from pipeworker.timings import DEFAULT

if TYPE_CHECKING:
    from pipeworker.session.begin import Asked
    from pipeworker.session.show.view import View


_HELP = {"help_option_names": ["-h", "--help"]}
_JOB = {**_HELP, "auto_envvar_prefix": "PIPEWORKER"}


class _Main(click.Group):
    """The command line; its errors are clear."""

    def invoke(self, ctx: click.Context) -> Any:
        with clearly():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(error.option_name in option.opts for option in launch.params):
                _meant(f"{error.option_name} is an option of launch", ctx, words)
            raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands and (name.endswith(".py") or Path(name).is_file()):
            _meant(f"{name} is no command", ctx, args)
        return super().resolve_command(ctx, args)


def _meant(wrong: str, ctx: click.Context, words: Sequence[str]) -> NoReturn:
    """Say what `launch` was left out of."""
    command = f"{ctx.info_name} launch {shlex.join(words)}"
    raise Shown(UsageError(f"{wrong}: did you mean `{command}`?"))


class _Job(Command):
    """A command that a file of the project's may give options."""

    def invoke(self, ctx: click.Context) -> Any:
        folders = (Path(ctx.params["job_file"]).parent, Path())
        Defaults.find(folders).fill(ctx, launch.params)
        if os.environ.get("RANK", "0") == "0":  # of a torchrun job one rank says it
            for text in slips(os.environ, launch.params):
                click.echo(f"warning: {text}", err=True)
        return super().invoke(ctx)


@click.group(cls=_Main, context_settings=_HELP)
@click.version_option(__version__)
def main() -> None:
    """Train a network too big for one accelerator, as a pipeline of worker processes."""


def asked(chosen: dict[str, Any], ranks: int | None = None) -> Asked:
    """What the words of the command ask for, from what click made of them.

    Raises:
        UsageError: the current folder is gone.
    """
    from pipeworker.session.begin import Asked

    context = click.get_current_context()
    how = {name: chosen[name] for name in ("run_dir", "resume", "go_on", "allow")}
    options = chosen.keys() - how.keys() - {"job_file"}
    said = {name: chosen[name] for name in options if is_said(context, name)}
    defaults = {name: chosen[name] for name in options - said.keys() if is_given(context, name)}
    try:
        Path.cwd()  # even where no path needs it: math libraries of torch end the process without
        job_file = str(Path(chosen["job_file"]).resolve())
    except OSError as error:
        raise UsageError(f"the current folder is gone: {error.strerror}") from None
    stages = said.pop("stages", None)
    origins = {name: origin(context, name) for name in defaults}
    return Asked(job_file, stages, said, defaults=defaults, origins=origins, ranks=ranks, **how)


def _check(request: Asked, *, here: bool = True) -> None:
    """That nothing is wrong with it; an option that the command line does not say has a source."""
    try:
        request.check(here=here)
    except UsageError as error:
        context = click.get_current_context()
        for name in request.defaults:
            if str(error).startswith(f"--{name.replace('_', '-')} "):
                raise UsageError(f"{error} ({origin(context, name)})") from None
        raise


@main.command(cls=_Job, context_settings=_JOB, epilog=ANYWHERE)
@launch_options
def launch(
    hosts: str | None,
    hosts_file: str | None,
    sync: bool,
    on: str | None,
    nodes: int | None,
    settings: tuple[str, ...],
    dry_run: bool,
    debug: bool,
    **chosen: Any,
) -> None:
    """Train the model of JOB_FILE. Words after -- reach the file as sys.argv[1:]."""
    from launcher import foreground, local

    view = take(chosen, click.get_current_context())
    where = Elsewhere.of(on, nodes, hosts, hosts_file, settings, sync, dry_run)
    request = asked(chosen)
    if debug:
        foreground.check(request.stages, chosen["replicas"], here=where.here)
        request = replace(request, stages=1)
    if chosen["stages"] is None and where.hosts:
        workers = sum(host.workers for host in where.hosts)
        request = replace(request, stages=stages_of(workers, chosen["replicas"]))
    if not where.here:
        sys.exit(_launch_elsewhere(request, where, view, chosen))
    if dry_run:
        raise UsageError("--dry-run is of --on and --hosts: here nobody else is asked")
    if chosen["stages"] is None and not request.goes_on and not debug:
        stages = max(1, local.accelerators() // max(1, chosen["replicas"]))
        request = replace(request, stages=stages)
    _check(request)
    local.check_job_file(Path(request.job_file))
    sys.exit(foreground.run(request, view) if debug else local.run(request.begin(), view))


def _launch_elsewhere(request: Asked, where: Elsewhere, view: View, chosen: dict[str, Any]) -> int:
    """On other hosts than this one alone."""
    from launcher import choose, local, ssh

    stages = chosen["stages"] if request.stages is None else request.stages
    if stages is None:
        option = "--on" if where.cluster else "an allocation"
        raise UsageError(f"{option} needs --stages: how many workers the job has there")
    _check(request, here=where.cluster != "kubernetes")  # pods have files of their own
    job_file = Path(request.job_file)
    local.check_job_file(job_file)
    words = choose.words(click.get_current_context())
    replicas = max(1, chosen["replicas"])  # what is less has been said to be wrong
    workers = stages * replicas
    of_job = job_file, workers, words, chosen["arguments"], str(request.run_dir or "")
    threads = chosen["threads"] or 1
    spec = replace(choose.spec_of(*of_job, where), replicas=replicas, threads=threads)
    if where.cluster:
        replace(request, stages=stages).anew()  # a mistake is found before it is sent
        return choose.submit(spec, where.cluster, dry_run=where.dry_run)
    if where.dry_run:
        planned = replace(spec, run_dir=spec.run_dir or choose.dated(job_file))
        click.echo(ssh.render(planned, sync=where.sync).text(), nl=False)
        return 0
    choose.agents_of(spec)  # a mistake is found before anything is made or sent
    ssh.send(ssh.render(spec, sync=where.sync))
    with closing(request.begin()) as begun:
        options = begun.options
        workers = options.stages * options.replicas  # of a run that goes on, as it was
        spec = replace(spec, run_dir=str(begun.run_dir.path), workers=workers)
        return local.run(begun, view, choose.agents_of(spec))


class _AtMeeting(Shown):
    """Said where ranks meet, or later: rank 0 knows it."""


class _Worker(_Job):
    """A rank of a torchrun job. All ranks see a mistake; rank 0 alone says it.

    The first rank that ends has torchrun end the others, so they give rank 0 time to speak.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        from launcher import errorfile

        kwargs["standalone_mode"] = False
        try:
            with clearly():
                return super().main(*args, **kwargs)
        except click.ClickException as error:
            errorfile.write(error.format_message())
            if os.environ.get("RANK", "0") != "0":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _give_time(error)
            error.show()  # it was a mistake of this rank's alone
            sys.exit(error.exit_code)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first in main.commands and not Path(first).exists():
            if first != "launch":
                raise UsageError(f"{first} is no matter for torchrun: say `pipeworker {first}`")
            raise UsageError("under torchrun leave out launch: torchrun … -m pipeworker model.py")
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(error.option_name in option.opts for option in launch.params):
                raise UsageError(
                    f"{error.option_name} is an option of launch: torchrun says where a job runs, "
                    "and each of its processes is a stage"
                ) from None
            raise


def _give_time(error: click.ClickException) -> None:
    """To rank 0, to say a mistake; it is told, if it may wait for this rank on another host."""
    from launcher import torchrun
    from pipeworker.session.place import Place

    with suppress(PipeworkerError):
        place = Place.from_environment()
        if place.rank != place.local_rank and isinstance(error, _AtMeeting):
            return  # rank 0 is on another node, and does not end with this one
        if place.agent_serves and place.local_world != place.world:
            torchrun.refuse(place, error.format_message())
            return
    time.sleep(DEFAULT.speak)  # the mistake may be in what changes the timings


@click.command(cls=_Worker, context_settings=_JOB, epilog=ANYWHERE)
@job_options
def worker(**chosen: Any) -> None:
    """Train the model of JOB_FILE as one rank of a torchrun job: a rank is a stage of a replica."""
    from launcher import local, torchrun
    from pipeworker.session.place import Place

    local.check_job_file(Path(chosen["job_file"]))
    place = Place.from_environment()
    view = take(chosen, click.get_current_context())
    request = asked(chosen, place.world)
    _check(request)
    try:
        status = torchrun.run(place, request, view)
    except PipeworkerError as error:
        raise _AtMeeting(error) from None
    sys.exit(status)


@main.command(hidden=True)
@click.option("--nodes", type=click.IntRange(1), default=1, help="Hosts of the job.")
@click.option(
    "--rank", type=click.IntRange(0), default=0, envvar="JOB_COMPLETION_INDEX", help="This one's."
)
@click.option("--workers", type=click.IntRange(1), default=1, help="Of each host.")
@click.option("--at", default="localhost", help="The first host's name.")
@click.option("--port", type=int, default=29500, help="Where the hosts meet.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def node(nodes: int, rank: int, workers: int, at: str, port: int, words: tuple[str, ...]) -> None:
    """Be one host of a job, as a cluster starts it; WORDS, behind --, are those of its ranks."""
    from launcher.cluster.node import Node, run

    sys.exit(run(Node(rank, nodes, workers, at, port), words))


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
def checkpoint(run: Path) -> None:
    """Have the job that runs in RUN save at the end of its step, and wait until it has."""
    from pipeworker.session import ask

    click.echo(ask.for_checkpoint(run))


@main.command(cls=Command)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out")
@export_options
def export(source: Path, out: str, dtype: str | None, shard_size: str | None) -> None:
    """Write the weights of SOURCE to OUT, under the names of your own module.

    SOURCE is the directory of a run, of which the newest checkpoint is taken, or a checkpoint.

    OUT says by its ending what is written; what is not whole is never there:

    \b
      weights.safetensors   one file
      weights.pt            one file, a state dict for torch.load; .pth likewise
      weights/, weights     a folder in Hugging Face's layout: model.safetensors,
                            or several files of at most SIZE with an index
    """
    from pipeworker.record.export import weights

    done = weights.export(source, out, dtype, shard_size)
    files = f" in {done.files} file{'s' * (done.files > 1)}, Hugging Face's layout"
    made = f"{out.rstrip('/')}/: a folder of" if done.folder else f"{out}:"
    click.echo(f"{made} {done.tensors} tensors{files * done.folder}")
    for name in done.infinite:
        click.echo(f"warning: {name} has values beyond those of {dtype}: infinite now", err=True)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="All of it as one JSON object.")
def show(run: Path, *, as_json: bool) -> None:
    """Show what the run in the directory RUN was and did, and where its weights are."""
    from pipeworker.past import page

    click.echo(page.show(run, as_json=as_json))


@main.command("list")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default="runs")
@click.option("--json", "as_json", is_flag=True, help="As a JSON object a line.")
def list_runs(folder: Path, *, as_json: bool) -> None:
    """List the runs in the folder DIR (default: runs), a line a run, the newest last."""
    from pipeworker.past import table

    click.echo(table.listed(folder, as_json=as_json))


@main.command(cls=Command)
@click.argument("file", type=click.Path(path_type=Path), default="model.py")
@init_options
def init(file: Path, example: str) -> None:
    """Write a job file to begin with, which runs as it is: FILE, or model.py."""
    templates.write(file, example)
    command = click.get_current_context().find_root().info_name
    click.echo(f"{file}: {templates.EXAMPLES[example]}")
    click.echo(f"train it:  {command} launch --stages 2 {shlex.quote(str(file))}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def env(*, as_json: bool) -> None:
    """Show versions, devices, limits and variables, for a report of a defect."""
    from launcher import machine

    found = machine.facts()
    click.echo(json.dumps(found, indent=2) if as_json else machine.text(found))
