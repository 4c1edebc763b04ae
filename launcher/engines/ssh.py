"""Hosts that ssh reaches: OpenSSH's client, configured by the user, carries their agents' pipes.

The agent's command line holds no secret: the job's token travels over its standard input.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from launcher.engines.engine import Carrier, agent_command
from launcher.spec import Host, JobSpec, RemoteAgent, assign_ranks
from pipeworker.errors import PipeworkerError, UsageError

CLIENT = (
    *("ssh", "-T", "-o", "BatchMode=yes"),
    *("-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes"),  # they are for logins
    *("-o", "ConnectTimeout=10"),
)
_CALLER = "SSH_CONNECTION"
"""The variable in which sshd describes the connection; the client's address comes first."""
_UNPACK = (
    "import itertools, os, sys, tarfile; "
    "sent = tarfile.open(fileobj=sys.stdin.buffer, mode='r|'); "
    "shared = os.path.lexists(sent.next().name); "
    "here = os.path.realpath('.'); "
    "folder = lambda name: os.path.realpath(os.path.dirname(name)); "
    "inside = lambda name: os.path.commonpath([here, folder(name)]) == here; "
    "error = '{} would be written to {}; remove the link on that host'; "
    "refuse = lambda name: sys.exit(error.format(name, folder(name))); "
    "link = lambda name: os.path.islink(name) and os.unlink(name); "
    "files = itertools.islice(sent, 1, None); "
    "files = (one for one in files if inside(one.name) or refuse(one.name)); "
    "rest = (link(one.name) or one for one in files); "
    "how = {'filter': 'tar'} if hasattr(tarfile, 'tar_filter') else {}; "
    "shared or sent.extractall(members=rest, **how)"
)
"""The first file is a marker. A host that already has it shares the folder, and unpacks nothing.

A link of the host's is removed before a file of its name is written. A file that a link of the
host's would lead out of the folder is refused, also by Python before 3.10.12 and 3.11.4, whose
tarfile has no filters.
"""
_MARKER = ".pipeworker-"
_EXCLUDED = {".git", ".venv", "__pycache__", "runs"}


class Ssh(Carrier):
    """The hosts that ``--hosts`` names."""

    def render(self, spec: JobSpec) -> str:
        """Return the commands that prepare the hosts, and those that start their agents."""
        folder = Path(spec.job_file).parent
        sends = (f"# {folder} | {shlex.join(line)}\n" for line in receivers(spec))
        return "".join(sends) + super().render(spec)

    def agents(self, spec: JobSpec) -> tuple[RemoteAgent, ...]:
        assign_ranks([host.workers for host in spec.hosts], spec.workers)
        return tuple(_agent(spec, host) for host in spec.hosts)

    def prepare(self, spec: JobSpec) -> None:
        send(Path(spec.job_file).parent, receivers(spec))


def _agent(spec: JobSpec, host: Host) -> RemoteAgent:
    given = dict(spec.environment)
    if spec.launcher_address:
        given[_CALLER] = spec.launcher_address
    environment = [f"{name}={value}" for name, value in sorted(given.items())]
    agent = ["env", *environment, *agent_command(spec, _CALLER, host.python)]
    line = f"cd {shlex.quote(spec.folder)} && exec {shlex.join(agent)}"
    remedy = "share its folder, or send it with --sync"
    return RemoteAgent(host, (*CLIENT, host.name, line), remedy)


def receivers(spec: JobSpec) -> list[tuple[str, ...]]:
    """Return the command of each host that receives the job file's folder as an archive."""
    folder = str(Path(spec.job_file).parent)
    begin = f"{shlex.join(['mkdir', '-p', folder, spec.folder])} && cd {shlex.quote(folder)}"
    found: list[tuple[str, ...]] = []
    for host in spec.hosts if spec.sync else ():
        unpack = shlex.join([host.python or sys.executable, "-c", _UNPACK])
        found.append((*CLIENT, host.name, f"{begin} && {unpack}"))
    return found


def send(folder: Path, receivers: Sequence[Sequence[str]]) -> None:
    """Send the job's folder to all hosts; a host that shares it keeps it unchanged."""
    for line in receivers:
        files = [*_files(folder)]
        with tempfile.TemporaryFile() as errors, _marker(folder) as marker:
            try:
                child = subprocess.Popen(
                    line, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors
                )
            except OSError as error:
                raise PipeworkerError(f"cannot start {line[0]}: {error.strerror}") from None
            with (
                suppress(BrokenPipeError),  # its standard error has the reason
                child,
                tarfile.open(fileobj=child.stdin, mode="w|") as archive,
            ):
                for path in (marker, *files):
                    _add(archive, path, folder)
            if child.returncode:
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip()
                reason = text.rpartition("\n")[2] or f"exit status {child.returncode}"
                host = line[len(CLIENT)]
                raise PipeworkerError(f"host {host}: it does not accept {folder}: {reason}")


@contextmanager
def _marker(folder: Path) -> Iterator[Path]:
    """Make a file that hosts that share the folder see: they must not unpack what they read."""
    try:
        handle, name = tempfile.mkstemp(prefix=_MARKER, dir=folder)
    except OSError as error:
        raise PipeworkerError(
            f"--sync: cannot make a file in {folder}, which shows the hosts that share it: "
            f"{error.strerror}"
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
        raise PipeworkerError(f"--sync: cannot send {path}: {error.strerror or error}") from None


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, and its links, those to folders included."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(set(folders) - _EXCLUDED)
        for path in (Path(root, name) for name in sorted([*folders, *files])):
            if path.is_symlink() or (path.is_file() and not path.name.startswith(_MARKER)):
                yield path


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Parse ``a:2,b:2``: hosts, each with its number of workers; the default is one."""
    found = []
    for part in map(str.strip, text.split(",")):
        name, colon, count = part.rpartition(":")
        if not colon or part.endswith("]"):
            name, count = part, "1"
        found.append(_host(name, count, f"--hosts {shlex.quote(text)}"))
    return _distinct(found)


def read_hosts(path: Path) -> tuple[Host, ...]:
    """Read a file with a host a line: its name and, optionally, its workers and interpreter."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(
            f"--hosts-file {path}: {reason}; give a text file with a host a line"
        ) from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"--hosts-file {path}, line {number}"
        if len(words) > 3:
            raise UsageError(
                f"{where}: {words[3]!r} is unexpected; write a host, workers, a python"
            )
        name, count, python = (*words, *("1", "")[len(words) - 1 :])[:3]
        hosts.append(_host(name, count, where, python))
    if not hosts:
        raise UsageError(f"--hosts-file {path}: the file names no host; add a host a line")
    return _distinct(hosts)


def _host(name: str, count: str, where: str, python: str = "") -> Host:
    plain = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    if not plain or plain.startswith("-") or any(c.isspace() for c in plain):
        raise UsageError(f"{where}: {name!r} is not a host; specify a name and its workers, as a:2")
    if plain == name and ":" in name:
        raise UsageError(
            f"{where}: {name!r} is not a host; put an IPv6 address in brackets, as [::1], and the "
            "number of workers after a colon, as a:2, or in a file after a space"
        )
    if not (count.isascii() and count.isdigit() and len(count) < 6 and 0 < int(count) < 1 << 16):
        raise UsageError(f"{where}: {count!r} is not a number of workers; specify 1 to 65535")
    return Host(plain, int(count), python)


def _distinct(hosts: list[Host]) -> tuple[Host, ...]:
    for name, count in Counter(host.name for host in hosts).items():
        if count > 1:
            raise UsageError(f"host {name}: named twice; name it once, with all its workers")
    return tuple(hosts)
