"""Who starts a job: what was said on the command line, as the spec of a job elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from launcher import ssh
from launcher.cluster import sbatch, slurm
from launcher.command import INTERRUPTED, is_given, is_said
from launcher.spec import Carried, Host, JobSpec, job_name, seats
from pipeworker.errors import UsageError
from pipeworker.timings import VARIABLE

ELSEWHERE = ("slurm", "kubernetes")
"""What ``--on`` may say."""
_OURS = frozenset(
    {
        *("on", "nodes", "settings", "dry_run", "stages", "run_dir", "hosts", "hosts_file"),
        *("sync", "go_on"),
    }
)
"""Options that are no rank's."""
_GIVEN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "PYTHONHASHSEED", VARIABLE)
"""Variables that decide how a process computes: they must be the same on all hosts."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Where a job is to run, as it was said.

    Attributes:
        cluster: to submit it to; empty for none.
        sync: the job file's folder is sent to the hosts first.
        dry_run: only what would be asked for is shown.

    Raises:
        UsageError: some of it does not go with the rest.
    """

    cluster: str = ""
    nodes: int | None = None
    hosts: tuple[Host, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    sync: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        if self.cluster and self.hosts:
            raise UsageError(f"--on {self.cluster} and --hosts: choose one")
        for option, said in (("--nodes", self.nodes), ("--set", self.settings)):
            if said not in (None, {}) and not self.cluster:
                raise UsageError(f"{option} is of --on: which cluster?")
        if self.sync and not self.hosts:
            raise UsageError("--sync is of --hosts: where is it to be sent?")

    @property
    def here(self) -> bool:
        """Whether it is this host alone."""
        return not (self.cluster or self.hosts or slurm.is_inside(os.environ))

    @staticmethod
    def of(
        on: str | None,
        nodes: int | None,
        hosts: str | None,
        hosts_file: str | None,
        said: Sequence[str],
        sync: bool,
        dry_run: bool,
    ) -> Elsewhere:
        """Read it.

        Raises:
            UsageError: as for the class; or something cannot be read.
        """
        if hosts is not None and hosts_file is not None:
            raise UsageError("--hosts and --hosts-file: choose one")
        found = () if hosts_file is None else ssh.hosts_in(Path(hosts_file))
        found = found if hosts is None else ssh.hosts_of(hosts)
        return Elsewhere(on or "", nodes, found, settings(said), sync, dry_run)


def words(context: click.Context) -> tuple[str, ...]:
    """The options that are for the ranks, as words again.

    What the environment or a file gives is not there where they are; but a run that goes on has
    options already.
    """
    found: list[str] = []
    given = is_said if context.params.get("resume") else is_given
    for parameter in context.command.params:
        name = parameter.name or ""
        if not isinstance(parameter, click.Option) or name in _OURS or not given(context, name):
            continue
        value, option = context.params[name], parameter.opts[-1]
        if parameter.is_flag:
            found.append(option if value else parameter.secondary_opts[-1])
            continue
        for one in value if parameter.multiple else (value,):
            found += (option, str(one))
    return tuple(found)


def settings(said: Sequence[str]) -> dict[str, str]:
    """What ``--set NAME=VALUE`` says.

    Raises:
        UsageError: it has no ``=``.
    """
    found = {}
    for text in said:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"--set {text}: must be NAME=VALUE")
        found[name] = value
    return found


def spec_of(
    job_file: Path,
    workers: int,
    options: tuple[str, ...],
    arguments: tuple[str, ...],
    run_dir: str,
    elsewhere: Elsewhere,
) -> JobSpec:
    """A job that runs elsewhere."""
    given = {name: os.environ[name] for name in _GIVEN if name in os.environ}
    return JobSpec(
        name=job_name(job_file.stem),
        job_file=str(job_file),
        workers=workers,
        words=options,
        arguments=arguments,
        folder=str(Path.cwd()),
        run_dir=run_dir,
        nodes=1 if elsewhere.nodes is None else elsewhere.nodes,
        hosts=elsewhere.hosts,
        environment=given,
        settings=elsewhere.settings,
    )


def dated(job_file: Path) -> str:
    """The run directory of a job that does not say one; it is not made yet."""
    return str(Path("runs", f"{job_file.stem}-{time.strftime('%Y%m%d-%H%M%S')}").absolute())


def agents_of(spec: JobSpec) -> tuple[Carried, ...]:
    """The agents of a job's hosts: those that were said, or else the nodes of the allocation.

    Raises:
        UsageError: there are too few places, or too many nodes, for its workers.
    """
    if spec.hosts:
        seats([host.workers for host in spec.hosts], spec.workers)
        return ssh.render(spec).carried
    return slurm.carried(spec, sbatch.allocation(os.environ))


def submit(spec: JobSpec, cluster: str, *, dry_run: bool) -> int:
    """Have a cluster run a job; returns the exit status.

    Args:
        dry_run: only show what it would be asked for.

    Raises:
        PipeworkerError: the job or the cluster is not as it must be.
    """
    if cluster == "kubernetes":
        click.echo(on_kubernetes(spec, dry_run=dry_run))
        return 0
    if not spec.run_dir:
        spec = replace(spec, run_dir=dated(Path(spec.job_file)))
    script = slurm.render(spec, sys.executable)
    if dry_run:
        click.echo(script.text(), nl=False)
        return 0
    job = sbatch.Sbatch.submit(script)
    click.echo(f"job {job.job} is submitted; its output goes to {job.log}", err=True)
    try:
        return job.follow()
    except KeyboardInterrupt:
        job.cancel()
        click.echo(f"job {job.job} is told to save and to end; again to leave it alone", err=True)
        job.follow()
        return INTERRUPTED


def on_kubernetes(spec: JobSpec, *, dry_run: bool) -> str:
    """Submit a job to the cluster that kubectl is set to; returns what to show.

    Args:
        dry_run: only show what it would be asked for.

    Raises:
        PipeworkerError: the job or the cluster is not as it must be.
    """
    from launcher.cluster.kubectl import Kubectl
    from launcher.cluster.kubernetes import render
    from launcher.cluster.pod import RUNS

    if not spec.run_dir:  # pods that begin anew must find it, other jobs must not
        stamp = time.strftime("%Y%m%d-%H%M%S")
        spec = replace(spec, run_dir=f"{RUNS}/{spec.name}-{stamp}")
    try:
        source = "" if spec.settings.get("job") else Path(spec.job_file).read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{spec.job_file} is no text: {error}") from None
    manifests = render(spec, source)
    if dry_run:
        return manifests.text().rstrip("\n")
    Kubectl(manifests).submit()
    where = f" --namespace {manifests.namespace}" if manifests.namespace else ""
    label = f"app.kubernetes.io/instance={manifests.name}"
    return (
        f"{manifests.kind} {manifests.name} is submitted; its run directory is {spec.run_dir}\n"
        f"  kubectl get pods{where} --selector {label}\n"
        f"  kubectl logs{where} --follow --selector {label}\n"
        f"  kubectl delete {manifests.kind}{where} {manifests.name}"
    )
