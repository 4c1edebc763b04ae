"""Real ssh servers on this machine, and a client that is configured for them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.processes.forked import Server
from support.processes.interpreter import NAMESPACE, SERVER
from support.processes.ports import reserve_port
from support.real_jobs.jobs import until

_SERVER = "/usr/sbin/sshd"


@dataclass
class Sshd:
    """Hosts that a client reaches by name.

    Attributes:
        path: a folder with an ``ssh`` that has a configuration of its own.
        reserved: holds the servers' ports.
    """

    folder: Path
    path: Path
    reserved: ExitStack
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add(
        self,
        *names: str,
        address: str = "127.0.0.1",
        before: Sequence[str] = (),
        forking: Server | None = None,
        namespace: str = "",
    ) -> None:
        """Start a server that these names reach.

        Args:
            names: names of the host.
            address: where the server listens.
            before: a command that runs it, as ``unshare --mount``.
            forking: the server that forks the agents of these hosts; None for interpreters.
            namespace: the network namespace of these hosts; by default that of this process.
        """
        port = reserve_port(self.reserved)
        number = len(self.processes)
        options = {
            "Port": port,
            "ListenAddress": address,
            "HostKey": self.folder / "host",
            "AuthorizedKeysFile": self.folder / "key.pub",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
        }
        if forking is not None:
            name = forking.address.decode().removeprefix("\0")
            own = [f"{NAMESPACE}={namespace}:{forking.pid}"] if namespace else []
            options["SetEnv"] = " ".join([f"{SERVER}={name}", *own])
        inside = ("ip", "netns", "exec", namespace) if namespace else ()
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        read = (self.folder / f"log-{number}").read_text
        line = [*inside, *before, _SERVER, "-D", "-e", "-f", "/dev/null", *words]
        with (self.folder / f"log-{number}").open("wb") as log:
            server = subprocess.Popen(line, stderr=log, cwd="/")
        self.processes.append(server)
        until(lambda: "Server listening" in read(), explain=read)
        with (self.folder / "config").open("a") as config:
            config.write(f"Host {' '.join(names)}\n  HostName {address}\n  Port {port}\n")

    def close(self) -> None:
        for server in self.processes:
            server.terminate()
            server.wait()


@contextmanager
def servers(folder: Path) -> Iterator[Sshd]:
    """Return an object that starts servers; skip the test without OpenSSH."""
    if shutil.which(_SERVER) is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's server is not installed")
    for name in ("host", "key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, capture_output=True)
    general = {
        "IdentityFile": folder / "key",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "LogLevel": "ERROR",
    }
    options = " ".join(f"-o {name}={value}" for name, value in general.items())
    client, config = folder / "bin" / "ssh", folder / "config"
    client.parent.mkdir()
    config.touch()
    real = shutil.which("ssh")
    client.write_text(f'#!/bin/sh\nexec {real} -F {config} {options} "$@"\n')
    client.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # for its privilege separation
    with ExitStack() as closing:
        made = Sshd(folder, client.parent, closing)
        closing.callback(made.close)
        yield made
