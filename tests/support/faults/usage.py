"""The resources of processes, and the check that they do not grow."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from support.processes.memory import resident


class Usage(NamedTuple):
    """The resources of a process: bytes of memory, descriptors and threads."""

    memory: float
    descriptors: float
    threads: float


def usage(pid: int) -> Usage:
    descriptors, threads = (
        len(list(Path(f"/proc/{pid}", what).iterdir())) for what in ("fd", "task")
    )
    return Usage(resident(pid), descriptors, threads)


def check_flat(name: str, rows: Sequence[Usage], share: float, more: float) -> None:
    """Check that a process uses no more in the last quarter of its samples than in the second.

    Its memory may grow to this share, and by so many bytes.
    """
    quarter = max(1, len(rows) // 4)
    early, late = (
        Usage(*map(statistics.median, zip(*some, strict=True)))
        for some in (rows[quarter : 2 * quarter], rows[-quarter:])
    )
    print(f"{name}, {len(rows)} faults: ", end="")
    print(f"{early.memory / 2**20:.1f} -> {late.memory / 2**20:.1f} MB", end=", ")
    print(f"{early.descriptors:g} -> {late.descriptors:g} descriptors", end=", ")
    print(f"{early.threads:g} -> {late.threads:g} threads")
    assert late.memory <= share * early.memory + more, name
    assert late.descriptors <= early.descriptors + 2, name
    assert late.threads <= early.threads, name
