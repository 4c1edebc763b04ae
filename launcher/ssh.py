"""Hosts that are reached by ssh: OpenSSH's client carries the pipes of their agents.

Ports, users, keys and jumps are a matter of its own configuration. What an agent must know beyond
its command, the job's token above all, comes over its standard input.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.spec import Carried, Host, JobSpec, shell
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.host.spawn import command

_CLIENT = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_CALLER = "SSH_CONNECTION"
"""What sshd says of the connection; it begins with the address that it came from."""
_UNPACK = (
    "import sys, tarfile; "
    "tarfile.open(fileobj=sys.stdin.buffer, mode='r|').extractall(filter='data')"
)
_LEFT_OUT = {".git", ".venv", "__pycache__", "runs"}


@dataclass(frozen=True, slots=True)
class Request:
    """The commands, by host: those that send the job's folder, and those that carry agents."""

    carried: tuple[Carried, ...]
    sends: tuple[tuple[str, ...], ...] = ()
    folder: str = ""

    def text(self) -> str:
        lines = [f"# {self.folder} | {shell(send)}" for send in self.sends]
        return "\n".join([*lines, *(shell(carried.line) for carried in self.carried)]) + "\n"


def render(spec: JobSpec, *, sync: bool = False) -> Request:
    """The agents of a job's hosts, as commands.

    Args:
        sync: the folder of the job file is sent first.
    """
    folder = str(Path(spec.job_file).parent)
    sends = [_send(host, folder, spec.folder) for host in spec.hosts] if sync else []
    return Request(tuple(_carried(spec, host) for host in spec.hosts), tuple(sends), folder)


def _carried(spec: JobSpec, host: Host) -> Carried:
    module, run = "pipeworker.host.forkserver", str(Path(spec.run_dir) / "run.json")
    agent = command(module, host.python, spec.job_file, run, _CALLER)
    environment = [f"{name}={value}" for name, value in sorted(spec.environment.items())]
    line = f"cd {shell((spec.folder,))} && exec {shell(('env', *environment, *agent))}"
    return Carried(host, (*_CLIENT, host.name, line))


def _send(host: Host, folder: str, here: str) -> tuple[str, ...]:
    make = shell(("mkdir", "-p", folder, here))
    unpack = shell((host.python or sys.executable, "-c", _UNPACK))
    return (*_CLIENT, host.name, f"{make} && cd {shell((folder,))} && {unpack}")


def send(request: Request) -> None:
    """Send the job's folder to all hosts.

    What is not sent: ``runs``, ``.git``, ``.venv`` and compiled files.

    Raises:
        PipeworkerError: a host does not take it.
    """
    folder = Path(request.folder)
    for line in request.sends:
        with tempfile.TemporaryFile() as said:
            try:
                child = subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said
                )
            except OSError as error:
                raise PipeworkerError(f"cannot start {line[0]}: {error.strerror}") from None
            with (
                child,
                suppress(BrokenPipeError),  # what it did not like is in its last words
                tarfile.open(fileobj=child.stdin, mode="w|") as archive,
            ):
                for path in _files(folder):
                    archive.add(path, str(path.relative_to(folder)), recursive=False)
            if child.returncode:
                said.seek(0)
                words = said.read().decode(errors="replace").strip().splitlines()
                why = words[-1] if words else f"status {child.returncode}"
                host = line[len(_CLIENT)]
                raise PipeworkerError(f"host {host} does not take {folder}: {why}")


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        yield from (Path(root) / name for name in sorted(files))


def hosts_of(text: str) -> tuple[Host, ...]:
    """Read ``a:2,b:2``: hosts, each with the number of its workers; one where none is said.

    Raises:
        UsageError: it is not that.
    """
    return _distinct([_host(part.strip(), f"--hosts {text}") for part in text.split(",")])


def hosts_in(path: Path) -> tuple[Host, ...]:
    """Read a file: a host a line, the number of its workers, and its interpreter if that differs.

    Raises:
        UsageError: it is not that, or cannot be read.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--hosts-file {path}: {why}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hosts-file {path}, line {number}"
        if len(words) > 3:
            raise UsageError(f"{where}: must be a host, its workers and its interpreter")
        name, count, python = (*words, *("1", "")[len(words) - 1 :])[:3]
        hosts.append(_host(f"{name}:{count}", where, python))
    if not hosts:
        raise UsageError(f"--hosts-file {path}: there is no host in it")
    return _distinct(hosts)


def _host(text: str, where: str, python: str = "") -> Host:
    name, colon, count = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, count = text, "1"
    if not name or name.startswith("-") or any(c.isspace() for c in name):
        raise UsageError(f"{where}: {text!r} is no host: must be as a:2, a name and its workers")
    if not (count.isascii() and count.isdigit() and 0 < int(count) < 1 << 16):
        raise UsageError(f"{where}: {count!r} is no number of workers")
    return Host(name.strip("[]"), int(count), python)


def _distinct(hosts: list[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"host {name} is there twice: say all its workers at once")
    return tuple(hosts)
