"""The command line: commands, their arguments, and exit statuses."""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from launcher import choose, templates
from launcher.choose import Target
from launcher.command import (
    INTERRUPTED,
    JSON,
    PATH,
    NonEmptyPath,
    Shown,
    clearly,
    is_given,
    is_typed,
    origin,
)
from launcher.display_options import take_style
from launcher.engines.engine import Carrier, Cluster, SubmittedJob
from launcher.evaluate import evaluate
from launcher.job_command import JobCommand
from launcher.options import ANYWHERE, JOB_PARAMETERS, LAUNCH_PARAMETERS
from launcher.plan import plan
from launcher.run_commands import RUN_COMMANDS
from pipeworker.display.text import shell_join
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.host.signals import ignore_ends, restore_ends
from pipeworker.job.option_parsing import workers_per_replica
from pipeworker.job.options import PRECISIONS
from pipeworker.version import __version__

if TYPE_CHECKING:
    from launcher.spec import JobSpec
    from pipeworker.display.style import Style
    from pipeworker.runs.begin import RunRequest


_HELP = {"help_option_names": ["-h", "--help"]}
_JOB = {**_HELP, "auto_envvar_prefix": "PIPEWORKER"}


_ELSEWHERE = {
    **dict.fromkeys(("train", "run", "start"), "launch"),
    "resume": "launch --resume",
    "stop": "cancel",
}
"""Commands of other programs, for which no name of ours, or a wrong one, is a close match."""


class _Main(click.Group):
    """The top-level command; every error of ours is one message."""

    def invoke(self, ctx: click.Context) -> Any:
        with clearly():
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args:  # shows the help
            return super().parse_args(ctx, args)
        words = list(args)
        with clearly():
            try:
                return super().parse_args(ctx, args)
            except click.NoSuchOption as error:
                if any(error.option_name in option.opts for option in launch.params):
                    _suggest_launch(f"{error.option_name}: an option of launch", ctx, words)
                raise

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self.commands:
            if name.endswith(".py") or Path(name).is_file():
                _suggest_launch(f"{name}: no such command", ctx, args)
            shown = [name for name, command in self.commands.items() if not command.hidden]
            meant = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, shown, 1)
            advice = f"did you mean {meant[0]}?" if meant else f"use {', '.join(sorted(shown))}"
            raise UsageError(f"{name}: no such command; {advice}")
        return super().resolve_command(ctx, args)


def _suggest_launch(mistake: str, ctx: click.Context, words: Sequence[str]) -> NoReturn:
    """Reject a command line from which `launch` is missing, and show the whole command."""
    command = f"{ctx.info_name} launch {shell_join(words)}"
    raise UsageError(f"{mistake}; did you mean `{command}`?")


@click.group(cls=_Main, context_settings=_HELP, commands=[plan, evaluate, *RUN_COMMANDS])
@click.version_option(__version__)
def main() -> None:
    """Train a network too big for one accelerator, as a pipeline of worker processes."""


def _request(chosen: dict[str, Any], ranks: int | None = None) -> RunRequest:
    """Return the run that a command line requests; `ranks` is the number of a torchrun job."""
    from launcher import local
    from pipeworker.runs.begin import RunRequest

    context = click.get_current_context()
    of_run = ("run_dir", "resume", "auto_resume", "allow_change")
    options = chosen.keys() - {*of_run, "job_file"}
    typed = {name: chosen[name] for name in options if is_typed(context, name)}
    given = {name for name in options - typed.keys() if is_given(context, name)}
    local.check_surroundings(Path(chosen["job_file"]))
    stages = typed.pop("stages", None)
    return RunRequest(
        os.path.realpath(chosen["job_file"]),
        stages,
        typed,
        defaults={name: chosen[name] for name in given},
        origins={name: origin(context, name) for name in given},
        ranks=ranks,
        **{name: chosen[name] for name in of_run},
    )


@main.command(cls=JobCommand, params=LAUNCH_PARAMETERS, context_settings=_JOB, epilog=ANYWHERE)
def launch(
    hosts: str | None,
    hosts_file: str | None,
    sync: bool,
    launcher_address: str | None,
    on: str | None,
    nodes: int | None,
    settings: tuple[str, ...],
    dry_run: bool,
    debug: bool,
    **chosen: Any,
) -> None:
    """Train the model of JOB_FILE. Arguments after -- reach the file as sys.argv[1:].

    --resume RUN needs no JOB_FILE: the run has recorded it.
    """
    from launcher import foreground, local

    view = take_style(chosen, click.get_current_context())
    named = choose.named_hosts(hosts, hosts_file)
    given = choose.parse_settings(settings)
    target = Target(on or "", nodes, named, given, sync, launcher_address or "", dry_run)
    request, engine = _request(chosen), target.engine
    shares_files = not isinstance(engine, Cluster) or engine.shares_files
    if debug:
        foreground.check(request.stages, chosen["replicas"], here=target.is_local)
        request = replace(request, stages=1)
    elif chosen["stages"] is None:
        if target.hosts:
            workers = sum(host.workers for host in target.hosts)
            request = replace(request, stages=workers_per_replica(workers, chosen["replicas"]))
        elif not target.is_local and not (shares_files and request.is_resume):
            raise UsageError("--stages: missing; give the number of stages of the job")
        elif not request.is_resume:
            local.check_job_file(Path(request.job_file))  # first: torch takes seconds to import
            request = replace(request, stages=local.default_stages(chosen["replicas"]))
    request.validate(local=shares_files)  # only the other hosts know their paths
    local.check_job_file(Path(request.job_file))
    if debug:
        sys.exit(foreground.run(request, view))
    if isinstance(engine, Cluster) and shares_files:
        chosen = choose.with_recorded(request, chosen)
    spec = choose.spec_of(request, target, chosen)
    if isinstance(engine, Cluster):
        request = replace(request, stages=spec.stages)
        request.new_options()  # find mistakes before anything is sent
    new = replace(spec, run_dir=spec.run_dir or engine.new_run_dir(spec))
    if dry_run:
        click.echo(engine.render(new), nl=False)
    elif isinstance(engine, Cluster):
        if shares_files:
            request.check_directory()
        restore_ends()
        sys.exit(_follow(engine.submit(new)))
    else:
        atexit.register(ignore_ends)
        sys.exit(_run(request, engine, spec, view))


def _follow(job: SubmittedJob) -> int:
    """Follow a job that a cluster runs, until it ends; return the exit status."""
    try:
        return job.follow()
    except KeyboardInterrupt:
        job.cancel()
        text = "the job saves a checkpoint and ends; interrupt again to stop waiting for it"
        click.echo(text, err=True)
        job.follow()
        return INTERRUPTED


def _run(request: RunRequest, engine: Carrier, spec: JobSpec, view: Style) -> int:
    """Run a job whose hosts this process reaches; return the exit status."""
    from launcher import local

    engine.agents(spec)  # find mistakes before anything is created or sent
    engine.prepare(spec)
    with closing(request.prepare()) as begun:
        workers = begun.options.workers  # a resumed run has recorded them
        spec = replace(spec, run_dir=str(begun.run_dir.path), workers=workers)
        with ExitStack() as held:
            try:
                held.enter_context(engine.connected(spec))
            except BaseException:
                begun.undo.close()
                raise
            return local.run(begun, view, engine.agents(spec))


class _AfterRendezvous(Shown):
    """An error at or after the rendezvous of the ranks, which rank 0 knows."""


class _WorkerCommand(JobCommand):
    """The command of a torchrun rank. Every rank finds a mistake; only rank 0 shows it.

    torchrun ends all ranks when the first one ends, so the others give rank 0 time to show it.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            with clearly():
                return super().main(*args, **kwargs)
        except click.ClickException as error:
            from launcher import torchrun

            mistake = error.format_message()
            torchrun.write_error(mistake)
            if os.environ.get("RANK", "0") != "0":
                torchrun.wait_for_rank_0(mistake, met=isinstance(error, _AfterRendezvous))
            error.show()  # rank 0, or a rank that alone found the mistake
            sys.exit(error.exit_code)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first in main.commands and not Path(first).exists():
            if first != "launch":
                raise UsageError(f"{first}: not a command under torchrun; run `pipeworker {first}`")
            raise UsageError(
                "launch: not a command under torchrun; run torchrun … -m pipeworker model.py"
            )
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if any(error.option_name in option.opts for option in launch.params):
                raise UsageError(
                    f"{error.option_name}: an option of launch; torchrun decides where a job runs, "
                    "and each of its processes is a worker"
                ) from None
            raise


@click.command(cls=_WorkerCommand, params=JOB_PARAMETERS, context_settings=_JOB, epilog=ANYWHERE)
def worker(**chosen: Any) -> None:
    """Train the model of JOB_FILE as one rank of a torchrun job; each rank is a worker."""
    from launcher import local, torchrun
    from pipeworker.ranks.rank_info import RankInfo

    local.check_job_file(Path(chosen["job_file"]))
    info = RankInfo.from_environment()
    view = take_style(chosen, click.get_current_context())
    request = _request(chosen, info.world)
    request.validate()
    try:
        status = torchrun.run(info, request, view)
    except PipeworkerError as error:
        raise _AfterRendezvous(error) from None
    sys.exit(status)


@main.command(hidden=True)
@click.option("--nodes", type=click.IntRange(1), default=1, help="Number of hosts of the job.")
@click.option(
    "--rank",
    type=click.IntRange(0),
    default=0,
    envvar="JOB_COMPLETION_INDEX",
    help="Number of this host.",
)
@click.option("--workers", type=click.IntRange(1), default=1, help="Workers per host.")
@click.option("--at", default="localhost", help="Name of the first host.")
@click.option("--port", type=int, default=29500, help="Port of the rendezvous.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def node(nodes: int, rank: int, workers: int, at: str, port: int, words: tuple[str, ...]) -> None:
    """Run one host of a cluster's job; WORDS, after --, are the arguments of its ranks."""
    from launcher.node import run, torchrun_options

    placed = torchrun_options(nodes, rank, workers, at, port)
    sys.exit(run([*placed, "-m", "pipeworker", *words]))


@main.command()
@click.argument("source", type=PATH)
@click.argument("out", type=NonEmptyPath())
@click.option(
    "--dtype",
    type=click.Choice(PRECISIONS),
    help="Data type of floating tensors. [default: as they are]",
)
@click.option(
    "--shard-size",
    metavar="SIZE",
    help="Largest size of each file in a folder, as 500MB. [default: 5GB]",
)
@click.option("--best", is_flag=True, help="The run's checkpoint with the best evaluation.")
@click.option(
    "--like",
    metavar="FOLDER",
    type=PATH,
    help="Folder of the same model, whose configuration and tokenizer OUT gets too.",
)
@click.option("--adapters", is_flag=True, help="Only the adapters, as a folder of peft's own.")
def export(
    source: Path,
    out: str,
    dtype: str | None,
    shard_size: str | None,
    *,
    best: bool,
    like: Path | None,
    adapters: bool,
) -> None:
    """Write the weights of SOURCE to OUT, under the names of your own module.

    SOURCE is a checkpoint, or the directory of a run, whose newest checkpoint is exported.

    The ending of OUT selects the format; OUT appears only when it is complete:

    \b
      weights.safetensors   one file
      weights.pt, .pth      one file, a state dict for torch.load
      weights/, weights     a folder in Hugging Face's layout: model.safetensors,
                            or several files of at most SIZE with an index
    """
    from launcher import local

    local.check_current_folder()  # first: it imports torch
    from pipeworker.plan.figures import plural
    from pipeworker.record.weights.export import export_weights

    done = export_weights(
        source, out, dtype, shard_size, best=best, pattern=like, adapters=adapters
    )
    files = f" in {plural(done.files, 'file')}, Hugging Face's layout"
    made = f"{out.rstrip('/')}/: a folder of" if done.folder else f"{out}:"
    tensors = plural(done.tensors, "tensor")
    click.echo(f"{made} {tensors}{files * done.folder}, after step {done.step}")
    if done.leaves_adapters:
        click.echo(
            "note: the run has adapters; --adapters writes them as a folder of peft", err=True
        )
    for name in done.infinite:
        click.echo(
            f"warning: {name} has values beyond the range of {dtype}: now infinite", err=True
        )


@main.command()
@click.argument("file", type=PATH, default="model.py")
@click.option(
    "--example",
    type=click.Choice([*templates.EXAMPLES]),
    default="mlp",
    show_default=True,
    help="; ".join(f"{name}: {what}" for name, what in templates.EXAMPLES.items()) + ".",
)
def init(file: Path, example: str) -> None:
    """Write a commented job file that runs as it is to FILE (default: model.py)."""
    templates.write(file, example)
    command = click.get_current_context().find_root().info_name
    click.echo(f"{file}: {templates.EXAMPLES[example]}")
    click.echo(f"train it:  {command} launch --stages 2 {shell_join([str(file)])}")
    if package := templates.missing_package(example):
        click.echo(f"note: the package {package} is missing; pip install {package}", err=True)


@main.command()
@JSON
def env(*, as_json: bool) -> None:
    """Show versions, devices, limits and variables, for a bug report."""
    from launcher import local, machine

    local.check_current_folder()
    found = machine.facts()
    click.echo(json.dumps(found, indent=2) if as_json else machine.text(found))
