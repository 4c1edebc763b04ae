"""What processes hold, as the system counts it (Linux)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def shared_memory(pids: Iterable[int | str] = ("self",)) -> int:
    """Bytes of the links' shared memory that these processes have mapped and that is there."""
    pids = list(pids)
    with suppress(PermissionError):
        return _of_files(pids)
    return sum(_of_pages(pid) for pid in pids)


def _of_files(pids: Iterable[int | str]) -> int:
    """By what is behind the mappings, once each: quick, and for root alone."""
    found: dict[int, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:pipeworker" in line:
                first, last = (part.lstrip("0") or "0" for part in line.split()[0].split("-"))
                there = Path(f"/proc/{pid}/map_files/{first}-{last}").stat()
                found[there.st_ino] = 512 * there.st_blocks
    return sum(found.values())


def _of_pages(pid: int | str) -> int:
    """By the pages of a process: what several have mapped counts by shares."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            ours = "memfd:pipeworker" in rest
        elif ours and name == "Pss:":
            total += 1024 * int(rest.split()[0])
    return total


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def peak() -> int:
    """The most bytes of memory that this process has held since it was last asked."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
