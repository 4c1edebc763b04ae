"""A job in the middle of its training, whose processes a test may end."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.real_jobs.jobs import Process, Record, pids_of, processes_of, until

ENDLESS = ("--stages", "3", "--microbatches", "4", "--steps", "1000000")
SECONDS = 60.0
"""The time limit for a job to be gone, on a busy host."""


@dataclass
class Live:
    """A job in the middle of its training."""

    process: Process
    path: Path
    folder: Path
    shared: set[Path]

    @property
    def summary(self) -> dict[str, Any]:
        return Record(self.path).summary

    def pid(self, process: str) -> int:
        """Return the pid of the launcher, the coordinator, the agent, or ``stage 1``."""
        if process == "launcher":
            return self.process.pid
        stages: list[int] = [stage["pid"] for stage in Record(self.path).plan["stages"]]
        if process.startswith("stage "):
            return stages[int(process.split()[1])]
        (pid,) = {*pids_of(self.folder, process)} - {*stages}
        return pid

    def end(self) -> tuple[int, str]:
        """Wait until nothing of the job is left; return its exit status and standard error."""
        _, stderr = self.process.communicate(timeout=SECONDS)
        self.check_gone()
        assert self.process.returncode is not None
        return self.process.returncode, stderr

    def check_gone(self) -> None:
        """Check that no process, file, shared memory or port of the job is left."""
        until(lambda: not processes_of(self.folder), SECONDS)
        assert not left_in(self.folder / "tmp")
        until(lambda: set(Path("/dev/shm").iterdir()) <= self.shared)
        log = (self.path / "logs" / "coordinator.log").read_text()
        address = urlsplit(log.partition("bound to ")[2].split()[0])
        assert address.port
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address.hostname, address.port), timeout=5)
        assert not list(self.path.rglob("*.partial"))


def left_in(temporary: Path) -> list[Path]:
    """Return the temporary files, without the cache that torch makes for all programs of a user."""
    return [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
