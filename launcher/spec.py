"""What is to run and where, whoever starts it. Pure.

A launcher renders a :class:`JobSpec` into a request of its own kind, which can be shown
(``--dry-run``) and compared, and then acts on that (as TorchX does).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeworker.errors import UsageError


@dataclass(frozen=True, slots=True)
class Host:
    """Where workers run.

    Attributes:
        name: as ssh or the cluster knows it.
        workers: how many.
        python: its interpreter; empty for the one that is used here.
    """

    name: str
    workers: int
    python: str = ""


@dataclass(frozen=True, slots=True)
class Carried:
    """The agent of a host, and the command whose pipes reach it; none where that is this host."""

    host: Host
    line: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job, as the user asked for it.

    Attributes:
        name: of the job, as clusters take it: small letters, digits, ``-``.
        job_file: absolute path.
        workers: of all replicas.
        words: the other options of ``pipeworker launch``, as they were said.
        arguments: words after ``--``.
        folder: where the command was said; absolute.
        run_dir: absolute; empty where the launcher chooses.
        nodes: hosts that a cluster is asked for.
        hosts: those that are known by name.
        environment: variables that processes on other hosts are given.
        settings: what a cluster is asked for besides (``--set NAME=VALUE``).
        replicas: among which the workers are divided.
        threads: of a worker.
    """

    name: str
    job_file: str
    workers: int
    words: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    folder: str = "/"
    run_dir: str = ""
    nodes: int = 1
    hosts: tuple[Host, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.workers:
            raise UsageError(f"--nodes {self.nodes}: must be 1 to the {self.workers} workers")

    @property
    def stages(self) -> int:
        """Of a replica."""
        return self.workers // self.replicas

    @property
    def workers_per_node(self) -> int:
        """Of the fullest one: workers are spread evenly, the first nodes have one more."""
        return -(-self.workers // self.nodes)

    @property
    def cores_per_node(self) -> int:
        """That its workers compute on."""
        return self.workers_per_node * self.threads

    def command(self, *before: str) -> tuple[str, ...]:
        """The words of a command that runs the job file, after those of a launcher."""
        after = ("--", *self.arguments) if self.arguments else ()
        return (*before, *self.words, self.job_file, *after)


def seats(room: Sequence[int], ranks: int) -> list[int]:
    """By rank, the number of its host: neighbours are on one for as long as there is room.

    Args:
        room: by host, how many workers it takes.

    Raises:
        UsageError: there is not enough of it.
    """
    found = [host for host, places in enumerate(room) for _ in range(places)]
    if len(found) < ranks:
        raise UsageError(f"there are {ranks} workers, and places for {len(found)} on the hosts")
    return found[:ranks]


def kept_by(hosts: Sequence[int], host: int) -> tuple[int, ...]:
    """The ranks whose copies a host keeps as well: those of the host before it, around.

    Args:
        hosts: by rank, the number of its host.
    """
    used = list(dict.fromkeys(hosts))
    before = used[used.index(host) - 1]
    return tuple(rank for rank, where in enumerate(hosts) if where == before)


class Request(Protocol):
    """What a launcher asks for; its text is what ``--dry-run`` prints."""

    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Condition:
    """How a job of a cluster is: ``absent``, ``waiting``, ``running``, ``done`` or ``failed``.

    Attributes:
        why: in the cluster's words.
        status: the exit status, once it has one.
    """

    state: str
    why: str = ""
    status: int = 0


def job_name(stem: str) -> str:
    """A name that clusters take, made from that of a file: at most 40 characters."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40].strip("-")
    return name if name[:1].isalpha() else f"job-{name}".strip("-")


def shell(words: tuple[str, ...]) -> str:
    """Words as a line for a shell."""
    return shlex.join(words)
