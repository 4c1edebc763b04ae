"""A cgroup with a limit, for the processes of a job."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_TOP = Path("/sys/fs/cgroup")
_FILES = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max", "pids.max")}
_SECONDS = 10.0


class Cgroup:
    """A cgroup of its own; its limit and its processes can be set."""

    def __init__(self, folder: Path, limit: Path) -> None:
        self._folder, self._limit = folder, limit

    def limit(self, most: int) -> None:
        self._limit.write_text(str(most))

    def add(self, pids: Iterable[int]) -> None:
        """Move processes here; what they have used so far stays charged elsewhere."""
        for pid in pids:
            (self._folder / "cgroup.procs").write_text(str(pid))

    def pids(self) -> list[int]:
        return [int(line) for line in (self._folder / "cgroup.procs").read_text().split()]

    def close(self) -> None:
        deadline = time.monotonic() + _SECONDS
        while self._folder.exists():
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)
            with suppress(OSError):  # it has processes that are about to end
                self._folder.rmdir()
            assert time.monotonic() < deadline, self.pids()


@contextmanager
def cgroup(controller: str) -> Iterator[Cgroup]:
    """Make a cgroup of a controller, below the root; skip the test where none can be made."""
    new, old = _FILES[controller]
    name = f"pipeworker-{uuid.uuid4().hex[:8]}"
    version_1 = (_TOP / controller).is_dir()
    folder = (_TOP / controller if version_1 else _TOP) / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    made = Cgroup(folder, folder / (old if version_1 else new))
    try:
        if not made._limit.exists():
            pytest.skip(f"cgroups have no controller {controller}")
        yield made
    finally:
        made.close()
