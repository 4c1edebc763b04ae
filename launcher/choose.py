"""The choice of the engine that runs a job, and the command line as the job's specification."""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from launcher.command import is_given, is_typed
from launcher.engines.engine import Carrier, Cluster, Local
from launcher.engines.kubernetes import Kubernetes
from launcher.engines.ray import Ray
from launcher.engines.slurm import Slurm, SlurmAllocation, check_job_step
from launcher.engines.ssh import Ssh, parse_hosts, read_hosts
from launcher.spec import Host, JobSpec, job_name
from pipeworker.errors import UsageError
from pipeworker.timings import VARIABLE

if TYPE_CHECKING:
    from pipeworker.runs.begin import RunRequest

CLUSTERS: dict[str, Cluster | Carrier] = {
    "kubernetes": Kubernetes(),
    "ray": Ray(),
    "slurm": Slurm(),
}
"""The engines that ``--on`` names."""
_LAUNCHER_OPTIONS = frozenset(
    {
        *("on", "nodes", "settings", "dry_run", "stages", "run_dir", "hosts", "hosts_file"),
        *("sync", "launcher_address", "auto_resume", "config"),
    }
)
"""Options of the launcher alone, which no rank has."""
_OF_SPEC = ("stages", "replicas", "schedule", "threads")
"""Options of a job that its specification has, and that a run has recorded."""
_REPEATED = ("patch",)
"""Settings that may be given several times: their values are lines of one."""
_PASSED_ON = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONPATH", "PYTHONHASHSEED", VARIABLE)
"""Variables that decide how a process computes: they must be the same on all hosts."""


@dataclass(frozen=True, slots=True)
class Target:
    """The place where a job is to run, as the command line specifies it.

    Attributes:
        cluster: which is asked for hosts; empty for none.
        nodes: the number of hosts that the cluster is asked for; None for the default.
        sync: whether the job file's folder is sent to the hosts first.
        launcher_address: at which the hosts reach this one; empty for the one that they see.
        dry_run: whether the request is only shown.
    """

    cluster: str
    nodes: int | None
    hosts: tuple[Host, ...]
    settings: Mapping[str, str]
    sync: bool
    launcher_address: str
    dry_run: bool

    def __post_init__(self) -> None:
        if self.cluster and self.hosts:
            raise UsageError(f"--on {self.cluster} and --hosts: choose one")
        for option, value in (("--nodes", self.nodes), ("--set", self.settings)):
            if value not in (None, {}) and not self.cluster:
                raise UsageError(
                    f"{option}: no cluster is given; add --on {' or --on '.join(CLUSTERS)}"
                )
        if self.sync and not self.hosts:
            raise UsageError("--sync: no host is given to send the folder to; add --hosts")
        if self.launcher_address:
            self._check_launcher_address()
        if self.dry_run and self.is_local:
            raise UsageError("--dry-run: a local job submits nothing; add --on or --hosts")

    def _check_launcher_address(self) -> None:
        if self.is_local or isinstance(self.engine, Cluster):
            raise UsageError("--launcher-address: no other host connects to this one; add --hosts")
        try:
            ipaddress.ip_address(self.launcher_address)
        except ValueError:
            raise UsageError(
                f"--launcher-address {self.launcher_address}: must be an IP address"
            ) from None

    @property
    def engine(self) -> Cluster | Carrier:
        """The engine that is named, or that this process runs in."""
        if self.cluster:
            return CLUSTERS[self.cluster]
        if self.hosts:
            return Ssh()
        check_job_step(os.environ)
        allocation = SlurmAllocation()
        return allocation if allocation.is_inside(os.environ) else Local()

    @property
    def is_local(self) -> bool:
        """Whether the job runs on this host alone."""
        return isinstance(self.engine, Local)


def named_hosts(hosts: str | None, hosts_file: str | None) -> tuple[Host, ...]:
    """Return the hosts that the user has named."""
    if hosts is not None and hosts_file is not None:
        raise UsageError("--hosts and --hosts-file: choose one")
    if hosts is not None:
        return parse_hosts(hosts)
    return () if hosts_file is None else read_hosts(Path(hosts_file))


def rank_options(context: click.Context) -> tuple[str, ...]:
    """Return the options that are for the ranks, as typed.

    Options of the environment or of a file are included, as neither is on the other hosts; unless
    the job resumes a run, which has recorded them.
    """
    found: list[str] = []
    included = is_typed if context.params.get("resume") else is_given
    for parameter in context.command.params:
        name = parameter.name or ""
        if not isinstance(parameter, click.Option) or name in _LAUNCHER_OPTIONS:
            continue
        if not included(context, name):
            continue
        value, option = context.params[name], parameter.opts[-1]
        if parameter.is_flag:
            found += [option] if value else parameter.secondary_opts[-1:]
            continue
        for one in value if parameter.multiple else (value,):
            found += (option, str(one))
    return tuple(found)


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Parse the values of ``--set NAME=VALUE``."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise UsageError(f"--set {text}: not a setting; write --set NAME=VALUE")
        if name in found and name not in _REPEATED:
            raise UsageError(f"--set {name}: given twice; give it once")
        found[name] = f"{found[name]}\n{value}" if name in found else value
    return found


def with_recorded(request: RunRequest, chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the command's parameters, with those that the run to resume has."""
    is_here = Path(request.run_dir or "", "run.json").exists()
    if not request.is_resume or not (is_here or chosen["stages"] is None):
        return chosen
    recorded = request.merged_options()
    return {**chosen, **{name: getattr(recorded, name) for name in _OF_SPEC}}


def spec_of(request: RunRequest, target: Target, chosen: Mapping[str, Any]) -> JobSpec:
    """Return the specification of a job, given the values of the command's parameters."""
    from pipeworker.plan.orders import resolve

    job_file, engine = Path(request.job_file), target.engine
    stages = chosen["stages"] if request.stages is None else request.stages
    stages = stages or 1  # a resumed run on this host has recorded them
    replicas = max(1, chosen["replicas"])  # a smaller number has been rejected
    context = click.get_current_context()
    # A resumed run has recorded the arguments of a file.
    typed = not request.resume or is_typed(context, "arguments")
    source = ""
    if isinstance(engine, Cluster) and not engine.shares_files and not target.settings.get("job"):
        try:
            source = job_file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise UsageError(f"{job_file}: not a text file: {error}") from None
    return JobSpec(
        name=job_name(job_file.stem),
        job_file=str(job_file),
        workers=resolve(chosen["schedule"]).place(stages, replicas).ranks,
        options=rank_options(context),
        arguments=chosen["arguments"] if typed else (),
        folder=str(Path.cwd()),
        run_dir=str(Path(request.run_dir).absolute()) if request.run_dir else "",
        nodes=1 if target.nodes is None else target.nodes,
        hosts=target.hosts,
        environment={name: os.environ[name] for name in _PASSED_ON if name in os.environ},
        settings=target.settings,
        replicas=replicas,
        threads=chosen["threads"] or 1,
        launcher_address=target.launcher_address,
        sync=target.sync,
        auto_resume=request.auto_resume,
        source=source,
        python=sys.executable,
    )
