"""The protocol of an engine: a way to start the processes of a job.

A *cluster* is handed a request, and runs the job on hosts of its own choice. A *carrier* reaches
hosts from this one: the launcher runs here, and commands carry the lines of the hosts' agents.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar, Protocol

from launcher.spec import Host, JobSpec, RemoteAgent
from pipeworker.errors import PipeworkerError
from pipeworker.host.lifetime import command
from pipeworker.record.rundir import default_path

CLIENT_SECONDS = 60.0
"""How long a client of a cluster may take to answer."""
_LOGGED = re.compile(r"^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ .*\n?", re.MULTILINE)
"""A line of kubectl's log; its message for the user comes after these lines."""


class SubmittedJob(Protocol):
    """A job that a cluster has accepted."""

    def follow(self) -> int:
        """Show the job's output until it ends, or how to do so; return its exit status."""

    def cancel(self) -> str:
        """Ask the job to save a checkpoint and to end; return what follows, for the user."""


class Engine(ABC):
    """A way to start the processes of a job."""

    @abstractmethod
    def render(self, spec: JobSpec) -> str:
        """Return what ``--dry-run`` prints: all that the engine asks for. Pure.

        Raises:
            UsageError: the job cannot be run so.
        """

    def new_run_dir(self, spec: JobSpec) -> str:
        """Return the path of a run directory for a job that does not specify one."""
        return str(default_path(Path(spec.job_file)).absolute())


class Cluster(Engine):
    """An engine that runs the job on hosts of its own choice."""

    shares_files: ClassVar[bool] = True
    """Whether these hosts see this one's files."""

    @abstractmethod
    def submit(self, spec: JobSpec) -> SubmittedJob:
        """Hand over what is rendered.

        Raises:
            PipeworkerError: the cluster rejects it or does not answer.
        """


class Carrier(Engine):
    """An engine whose hosts the launcher reaches from this one."""

    def render(self, spec: JobSpec) -> str:
        """Return the commands of the hosts' agents, a line for a shell each."""
        return "".join(f"{shlex.join(agent.command)}\n" for agent in self.agents(spec))

    @abstractmethod
    def agents(self, spec: JobSpec) -> tuple[RemoteAgent, ...]:
        """Return the agents of the job's hosts, and how their lines travel.

        Raises:
            UsageError: the hosts have too few places for the job's workers, or too many.
        """

    def prepare(self, spec: JobSpec) -> None:
        """Prepare the hosts, if the job asks for that, before its run directory exists.

        Raises:
            PipeworkerError: a host cannot be prepared.
        """
        return

    def connected(self, spec: JobSpec) -> AbstractContextManager[None]:
        """Hold inside the context what the commands of :meth:`agents` need.

        Raises:
            PipeworkerError: the cluster does not give it.
        """
        return nullcontext()


class Local(Carrier):
    """The engine of a job on this host alone."""

    def agents(self, spec: JobSpec) -> tuple[RemoteAgent, ...]:
        return (RemoteAgent(Host("", spec.workers)),)


def run_client(words: Sequence[str], text: str, *, label: str, cluster: str) -> str:
    """Return the output of a cluster's client program; errors name it by `label`.

    Secrets belong into `text`, its standard input: other users see its command line.

    Raises:
        OSError: it cannot be started.
        PipeworkerError: it fails, or the cluster does not answer in time.
    """
    try:
        ran = subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            errors="surrogateescape",  # a path, or a message of the site's own, has any bytes
            timeout=CLIENT_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        message = f"{label}: {cluster} has not answered for {CLIENT_SECONDS:g} s"
        raise PipeworkerError(message) from None
    if ran.returncode:
        message = _LOGGED.sub("", ran.stderr).strip() or ran.stderr.strip()
        reason = message.removeprefix(f"{label}: ")
        raise PipeworkerError(f"{label}: {reason or f'exit status {ran.returncode}'}")
    return ran.stdout


def agent_command(spec: JobSpec, variable: str, python: str = "") -> list[str]:
    """Return the command of an agent; `variable` of its environment begins with our address."""
    run = str(Path(spec.run_dir) / "run.json")
    return command("pipeworker.host.agent", python, spec.job_file, run, variable)
