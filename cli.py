"""What the user types."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from launcher.choose import ELSEWHERE, Elsewhere
from pipeworker import __version__
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.job.given import complete, stages_of
from pipeworker.job.options import BACKENDS, DEVICES, PRECISIONS, READERS, WHEN_BUSY
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.schedule import RECOMPUTE_MODES
from pipeworker.timings import DEFAULT

if TYPE_CHECKING:
    from pipeworker.session.begin import Asked

_INTERRUPTED = 130  # what a shell gives a program that SIGINT ended


class _Shown(click.ClickException):
    def __init__(self, error: PipeworkerError) -> None:
        super().__init__(str(error))
        self.exit_code = error.exit_status  # type: ignore[misc]

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"error: {self.message}", file, err=file is None)


def _clearly(invoke: Callable[[click.Context], Any], ctx: click.Context) -> Any:
    """Our own errors are one message and an exit status."""
    try:
        return invoke(ctx)
    except PipeworkerError as error:
        raise _Shown(error) from None
    except OSError as error:  # what the system refuses: descriptors, processes, a file
        where = f"{error.filename}: " if error.filename else ""
        raise _Shown(PipeworkerError(f"{where}{error.strerror or error}")) from None
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        sys.exit(_INTERRUPTED)


class _Main(click.Group):
    """The command line; its errors are clear."""

    def invoke(self, ctx: click.Context) -> Any:
        return _clearly(super().invoke, ctx)


@click.group(cls=_Main)
@click.version_option(__version__)
def main() -> None:
    """Train a network too big for one accelerator, as a pipeline of worker processes."""


def _choice(name: str, values: tuple[str, ...], default: str) -> Callable[..., Any]:
    return click.option(name, type=click.Choice(values), default=default, show_default=True)


def job_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a training job, for `launch` and for a torchrun job."""
    for decorate in reversed(
        [
            click.argument("job_file", metavar="JOB_FILE"),
            click.argument("arguments", nargs=-1, type=click.UNPROCESSED),
            click.option(
                "--microbatches",
                type=int,
                help="Micro-batches a step, over all replicas. [default: 4 K R]",
            ),
            click.option(
                "--replicas",
                type=int,
                default=1,
                show_default=True,
                help="Copies of the pipeline, each with a part of every mini-batch.",
            ),
            _choice("--read-data", READERS, "every"),
            click.option(
                "--shard-optimizer/--no-shard-optimizer",
                help="Each replica updates a part of the weights, and keeps its state alone.",
            ),
            click.option(
                "--steps", type=int, help="Optimizer steps. [default: one pass of data()]"
            ),
            _choice("--schedule", tuple(ORDERS), "gpipe"),
            _choice("--recompute", RECOMPUTE_MODES, "auto"),
            click.option("--balance", help="Layers of each stage, as 3,5,5,3. [default: even]"),
            click.option("--clip-grad-norm", type=float, help="Bound on the global gradient norm."),
            click.option("--clip-grad-value", type=float, help="Bound on each gradient element."),
            _choice("--precision", PRECISIONS, "fp32"),
            click.option(
                "--accumulate",
                type=int,
                default=1,
                show_default=True,
                help="Mini-batches an optimizer step.",
            ),
            click.option(
                "--evaluate-every", type=int, help="Steps between evaluation passes. [default: off]"
            ),
            click.option(
                "--checkpoint-every",
                metavar="N",
                help="Steps between checkpoints, or time, as 30m. [default: at the end alone]",
            ),
            _choice("--checkpoint-busy", WHEN_BUSY, "skip"),
            click.option(
                "--keep", type=int, default=2, show_default=True, help="Checkpoints that stay."
            ),
            click.option(
                "--restarts",
                type=int,
                default=3,
                show_default=True,
                help="Losses of workers within an hour that the job goes on after.",
            ),
            click.option(
                "--elastic",
                type=int,
                metavar="MIN",
                help="Go on with fewer stages, down to MIN, when a worker cannot be replaced.",
            ),
            click.option(
                "--snapshot-every",
                type=int,
                help="Steps between copies of the state in memory. [default: by their cost]",
            ),
            click.option(
                "--deferred-batch-norm/--no-deferred-batch-norm",
                help="Batch-norm statistics of the whole mini-batch.",
            ),
            click.option("--init-from", metavar="FILE", help="Weights that training begins with."),
            click.option(
                "--init-partial/--no-init-partial",
                help="Take of them what the model has too, and leave the rest as it is.",
            ),
            click.option("--seed", type=int, default=0, show_default=True),
            click.option(
                "--threads", type=int, help="Intra-op threads. [default: OMP_NUM_THREADS, 1]"
            ),
            _choice("--device", DEVICES, "auto"),
            _choice("--backend", BACKENDS, "auto"),
            click.option(
                "--interface",
                metavar="NAME",
                help="What carries tensors between hosts, as eth1. [default: by route]",
            ),
            click.option("--run-dir", help="Where to record. [default: runs/<file stem>-<time>]"),
            click.option(
                "--resume",
                is_flag=True,
                help="Go on with the run in --run-dir, with its options where none are given.",
            ),
            click.option(
                "--go-on",
                is_flag=True,
                help="As --resume where --run-dir holds a run; else begin it.",
            ),
            click.option(
                "--allow",
                multiple=True,
                metavar="NAME",
                help="An option that may be another than the run's, as seed. Repeatable.",
            ),
            click.option(
                "--stop-on-nan/--no-stop-on-nan", help="End the run when the loss is not finite."
            ),
            click.option(
                "--worker-timeout",
                type=float,
                default=60.0,
                show_default=True,
                help="Seconds after which a silent worker is given up.",
            ),
        ]
    ):
        function = decorate(function)
    return function


def _said(chosen: dict[str, Any]) -> dict[str, Any]:
    """The options of a job that were said on the command line."""
    source = click.get_current_context().get_parameter_source
    elsewhere = ("job_file", "run_dir", "resume", "go_on", "allow")
    return {
        name: value
        for name, value in chosen.items()
        if name not in elsewhere and source(name) is ParameterSource.COMMANDLINE
    }


def asked(stages: int | None, chosen: dict[str, Any], ranks: int | None = None) -> Asked:
    """What the words of the command ask for, from what click made of them.

    Raises:
        UsageError: a value is out of range, or the current folder is gone.
    """
    from pipeworker.session.begin import Asked

    said = _said(chosen)
    try:
        Path.cwd()  # even where no path needs it: math libraries of torch end the process without
        job_file = str(Path(chosen["job_file"]).resolve())
    except OSError as error:
        raise UsageError(f"the current folder is gone: {error.strerror}") from None
    how = {name: chosen[name] for name in ("run_dir", "resume", "go_on", "allow")}
    found = Asked(job_file, stages, said, ranks=ranks, **how)
    found.check()
    return found


@main.command()
@click.option("--stages", type=int, help="Pipeline stages. [default: one per accelerator]")
@click.option("--hosts", metavar="A:2,B:2", help="Hosts that ssh reaches, each with its workers.")
@click.option(
    "--hosts-file", metavar="FILE", help="The same: a host, its workers and its python a line."
)
@click.option("--sync", is_flag=True, help="Send the job file's folder to the hosts first.")
@click.option("--on", type=click.Choice(ELSEWHERE), help="The cluster to submit the job to.")
@click.option("--nodes", type=int, help="Hosts of the cluster. [default: 1]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="What the cluster is asked for besides, as image=IMAGE. Repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be asked for.")
@job_options
def launch(
    stages: int | None,
    hosts: str | None,
    hosts_file: str | None,
    sync: bool,
    on: str | None,
    nodes: int | None,
    settings: tuple[str, ...],
    dry_run: bool,
    **chosen: Any,
) -> None:
    """Train the model of JOB_FILE. Words after -- reach the file as sys.argv[1:]."""
    from launcher import local

    where = Elsewhere.of(on, nodes, hosts, hosts_file, settings, sync, dry_run)
    if stages is None and where.hosts:
        stages = stages_of(sum(host.workers for host in where.hosts), chosen["replicas"])
    if where.here:
        if dry_run:
            raise UsageError("--dry-run is of --on and --hosts: here nobody else is asked")
        if stages is None and not (chosen["resume"] or chosen["go_on"]):
            stages = max(1, local.accelerators() // max(1, chosen["replicas"]))
        request = asked(stages, chosen)
        local.check_job_file(Path(request.job_file))
        with closing(request.begin()) as begun:
            sys.exit(local.run(begun.options, begun.run_dir, begun.warnings))
    sys.exit(_launch_elsewhere(stages, where, chosen))


def _launch_elsewhere(stages: int | None, where: Elsewhere, chosen: dict[str, Any]) -> int:
    """On other hosts than this one alone."""
    from launcher import choose, local, ssh
    from launcher.run import Launch

    if stages is None:
        option = "--on" if where.cluster else "an allocation"
        raise UsageError(f"{option} needs --stages: how many workers the job has there")
    request = asked(stages, chosen)
    job_file = Path(request.job_file)
    local.check_job_file(job_file)
    words = choose.words(click.get_current_context())
    replicas = max(1, chosen["replicas"])  # what is less has been said to be wrong
    workers = stages * replicas
    of_job = job_file, workers, words, chosen["arguments"], str(request.run_dir or "")
    spec = replace(choose.spec_of(*of_job, where), replicas=replicas)
    if where.cluster:
        complete(request.job_file, stages, request.said)  # a mistake is found before it is sent
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
        agents = choose.agents_of(spec)
        return Launch(begun.options, begun.run_dir, agents, begun.warnings).run()


class _AtMeeting(_Shown):
    """Said where ranks meet, or later: rank 0 knows it."""


class _Worker(click.Command):
    """A rank of a torchrun job. All ranks see a mistake; rank 0 alone says it.

    The first rank that ends has torchrun end the others, so they give rank 0 time to speak.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        from launcher import errorfile

        kwargs["standalone_mode"] = False
        try:
            return super().main(*args, **kwargs)
        except click.ClickException as error:
            errorfile.write(error.format_message())
            if os.environ.get("RANK", "0") != "0":
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                _give_time(error)
            error.show()  # it was a mistake of this rank's alone
            sys.exit(error.exit_code)

    def invoke(self, ctx: click.Context) -> Any:
        return _clearly(super().invoke, ctx)


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


@click.command(cls=_Worker)
@job_options
def worker(**chosen: Any) -> None:
    """Train the model of JOB_FILE as one rank of a torchrun job: a rank is a stage of a replica."""
    from launcher import local, torchrun
    from pipeworker.session.place import Place

    local.check_job_file(Path(chosen["job_file"]))
    place = Place.from_environment()
    request = asked(None, chosen, place.world)
    try:
        status = torchrun.run(place, request)
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
    from launcher.node import Node, run

    sys.exit(run(Node(rank, nodes, workers, at, port), words))


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
def checkpoint(run: Path) -> None:
    """Have the job that runs in RUN save at the end of its step, and wait until it has."""
    from pipeworker.session import ask

    click.echo(ask.for_checkpoint(run))


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def export(source: Path, out: Path) -> None:
    """Write the weights of a run or checkpoint as one .safetensors or .pt file."""
    from pipeworker.record import weights

    count = weights.export(source, out)
    click.echo(f"{out}: {count} tensors")
