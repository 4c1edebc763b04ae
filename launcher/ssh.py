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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.spec import Carried, Host, JobSpec, shell
from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.host.spawn import command

_CLIENT = ("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_CALLER = "SSH_CONNECTION"
"""What sshd says of the connection; it begins with the address that it came from."""
_UNPACK = (
    "import itertools, os, sys, tarfile; "
    "sent = tarfile.open(fileobj=sys.stdin.buffer, mode='r|'); "
    "shared = os.path.lexists(sent.next().name); "
    "rest = itertools.islice(sent, 1, None); "
    "link = lambda name: os.path.islink(name) and os.unlink(name); "
    "anew = lambda one, to: link(one.name) or tarfile.tar_filter(one, to); "
    "shared or sent.extractall(members=rest, filter=anew)"
)
"""The first file is a mark: where it is there already the folder is the one it comes from."""
_MARK = ".pipeworker-"
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
    """Send the job's folder to all hosts; one that shares it is left as it is.

    What is not sent: ``runs``, ``.git``, ``.venv`` and compiled files; pipes and sockets.

    Raises:
        PipeworkerError: a host does not take it, or some of it cannot be read.
    """
    folder = Path(request.folder)
    for line in request.sends:
        files = [*_files(folder)]
        with tempfile.TemporaryFile() as said, _mark(folder) as mark:
            try:
                child = subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=said
                )
            except OSError as error:
                raise PipeworkerError(f"cannot start {line[0]}: {error.strerror}") from None
            with (
                suppress(BrokenPipeError),  # what it did not like is in its last words
                child,
                tarfile.open(fileobj=child.stdin, mode="w|") as archive,
            ):
                for path in (mark, *files):
                    _add(archive, path, folder)
            if child.returncode:
                said.seek(0)
                words = said.read().decode(errors="replace").strip().splitlines()
                why = words[-1] if words else f"status {child.returncode}"
                host = line[len(_CLIENT)]
                raise PipeworkerError(f"host {host} does not take {folder}: {why}")


@contextmanager
def _mark(folder: Path) -> Iterator[Path]:
    """A file that is there while the folder is sent.

    Whoever has it as well shares the folder, and must not unpack over what is still read.
    """
    try:
        handle, name = tempfile.mkstemp(prefix=_MARK, dir=folder)
    except OSError as error:
        raise PipeworkerError(
            f"--sync makes a file in {folder}, to see which hosts share it: {error.strerror}"
        ) from None
    os.close(handle)
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def _add(archive: tarfile.TarFile, path: Path, folder: Path) -> None:
    try:
        archive.add(path, str(path.relative_to(folder)), recursive=False)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise PipeworkerError(f"--sync cannot send {path}: {error.strerror or error}") from None


def _files(folder: Path) -> Iterator[Path]:
    """Files and links, to folders as well."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        for path in (Path(root, name) for name in sorted([*folders, *files])):
            if path.is_symlink() or (path.is_file() and not path.name.startswith(_MARK)):
                yield path


def hosts_of(text: str) -> tuple[Host, ...]:
    """Read ``a:2,b:2``: hosts, each with the number of its workers; one where none is said.

    Raises:
        UsageError: it is not that.
    """
    found = []
    for part in map(str.strip, text.split(",")):
        name, colon, count = part.rpartition(":")
        if not colon or part.endswith("]"):
            name, count = part, "1"
        found.append(_host(name, count, f"--hosts {text}"))
    return _distinct(found)


def hosts_in(path: Path) -> tuple[Host, ...]:
    """Read a file: a host a line, the number of its workers, and its interpreter if that differs.

    Raises:
        UsageError: it is not that, or cannot be read.
    """
    try:
        lines = path.read_text("utf-8-sig").splitlines()
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
        hosts.append(_host(name, count, where, python))
    if not hosts:
        raise UsageError(f"--hosts-file {path}: there is no host in it")
    return _distinct(hosts)


def _host(name: str, count: str, where: str, python: str = "") -> Host:
    plain = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if not plain or plain.startswith("-") or any(c.isspace() for c in plain):
        raise UsageError(f"{where}: {name!r} is no host: must be as a:2, a name and its workers")
    if plain == name and ":" in name:
        raise UsageError(
            f"{where}: {name!r} is no host: an address of IPv6 must be in brackets, as [::1]; the "
            "number of workers stands behind a colon, as a:2, and in a file behind a space"
        )
    if not (count.isascii() and count.isdigit() and 0 < int(count) < 1 << 16):
        raise UsageError(f"{where}: {count!r} is no number of workers")
    return Host(plain, int(count), python)


def _distinct(hosts: list[Host]) -> tuple[Host, ...]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"host {name} is there twice: say all its workers at once")
    return tuple(hosts)
