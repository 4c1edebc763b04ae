"""The specification of a job, which an engine renders into a request (as TorchX does). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any, TypeVar

from pipeworker.errors import UsageError
from pipeworker.job.renamed import hyphened
from pipeworker.plan.figures import plural

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Host:
    """A host of a job, as ssh or the cluster names it; without `python`, it has ours."""

    name: str
    workers: int
    python: str = ""


@dataclass(frozen=True, slots=True)
class RemoteAgent:
    """The agent of a host.

    The pipes of `command` carry its lines; it is empty for an agent on this host. `remedy` says
    what to do if that host lacks the job's files.
    """

    host: Host
    command: tuple[str, ...] = ()
    remedy: str = "share its folder"

    @property
    def name(self) -> str:
        """The name of its host in messages."""
        return f"host {self.host.name}" if self.command else "this host"


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job, as the user specified it.

    Attributes:
        name: as clusters accept it: lower-case letters, digits, ``-``.
        job_file: an absolute path.
        workers: the number of workers of all replicas.
        options: the other options of ``pipeworker launch``, as typed.
        arguments: the words after ``--``.
        folder: the absolute path of the folder in which the command was typed.
        run_dir: an absolute path; empty if the engine chooses it.
        nodes: the number of hosts that a cluster is asked for.
        hosts: those that the user named.
        environment: variables that processes on other hosts need.
        settings: further settings of a cluster (``--set NAME=VALUE``).
        threads: per worker.
        launcher_address: of the launcher's host, for hosts that see it at another one.
        sync: whether the job file's folder is sent to the hosts first.
        auto_resume: whether each start, also the first, resumes a run that `run_dir` holds.
        source: the text of the job file, if the hosts do not share this host's files.
        python: the interpreter that runs the launcher.
    """

    name: str
    job_file: str
    workers: int
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    folder: str = "/"
    run_dir: str = ""
    nodes: int = 1
    hosts: tuple[Host, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    threads: int = 1
    launcher_address: str = ""
    sync: bool = False
    auto_resume: bool = False
    source: str = ""
    python: str = "python"

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.workers:
            workers = plural(self.workers, "worker")
            raise UsageError(f"--nodes {self.nodes}: must be 1 to the {workers}")

    @property
    def stages(self) -> int:
        """The number of workers of a replica."""
        return self.workers // self.replicas

    @property
    def workers_per_node(self) -> int:
        """The number of workers of the fullest node: the first nodes may have one more."""
        return -(-self.workers // self.nodes)

    @property
    def cores_per_node(self) -> int:
        """The number of cores on which the workers of the fullest node compute."""
        return self.workers_per_node * self.threads

    def option(self, name: str) -> str:
        """Return the value of an option that was typed; "" if it was not."""
        return dict(pairwise(self.options)).get(name, "")

    def settings_as(self, kind: type[S], engine: str) -> S:
        """Return the settings in a dataclass of texts and numbers, named with ``-`` for ``_``."""
        known = {hyphened(one.name): one for one in fields(kind)}  # type: ignore[arg-type]
        if unknown := sorted(self.settings.keys() - known.keys()):
            known_names = ", ".join(known)
            raise UsageError(
                f"--set {unknown[0]}: no setting of --on {engine}; must be one of {known_names}"
            )
        values: dict[str, Any] = {}
        for name, text in self.settings.items():
            number = known[name].type == "int"
            if number and not (text.isascii() and text.isdigit() and len(text) < 7):
                raise UsageError(f"--set {name}={text}: must be a number")
            values[known[name].name] = int(text) if number else text
        return kind(**values)

    def words(self, job_file: str, *more: str) -> list[str]:
        """Return the job's options, `more` of them, its file and its arguments."""
        arguments = ["--", *self.arguments] if self.arguments else []
        return [*self.options, "--run-dir", self.run_dir, *more, job_file, *arguments]


def assign_ranks(places: Sequence[int], ranks: int) -> list[int]:
    """Return the host of each rank: neighbouring ranks share a host while it has places."""
    found = [host for host, count in enumerate(places) for _ in range(count)]
    if len(found) < ranks:
        raise UsageError(
            f"--hosts: the job has {plural(ranks, 'worker')}, and the hosts have places for "
            f"{len(found)}; add hosts, or use fewer --stages"
        )
    return found[:ranks]


def job_name(stem: str) -> str:
    """Return a name that clusters accept, of at most 40 characters, made from a file's name."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")
