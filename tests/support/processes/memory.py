"""The memory of processes, as Linux counts it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def shared_memory(pids: Iterable[int | str] = ("self",)) -> int:
    """Return the bytes of the links' shared memory that these processes have mapped."""
    pids = list(pids)
    with suppress(PermissionError):
        return _of_files(pids)
    return sum(_of_pages(pid) for pid in pids)


def _of_files(pids: Iterable[int | str]) -> int:
    """Count each mapped file once: quick, but requires root."""
    found: dict[int, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:pipeworker" in line:
                first, last = (part.lstrip("0") or "0" for part in line.split()[0].split("-"))
                with suppress(FileNotFoundError):  # unmapped since, by a worker that runs on
                    there = Path(f"/proc/{pid}/map_files/{first}-{last}").stat()
                    found[there.st_ino] = 512 * there.st_blocks
    return sum(found.values())


def _of_pages(pid: int | str) -> int:
    """Count the pages of a process; a page of several processes counts in proportion."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            ours = "memfd:pipeworker" in rest
        elif ours and name == "Pss:":
            total += 1024 * int(rest.split()[0])
    return total


def resident(pid: int) -> int:
    """Return the resident bytes of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def peak() -> int:
    """Return the peak of this process's resident bytes since the last call."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
