"""The limits of this process's cgroups, of version 1 and 2, and what is free under them.

A limit of a cgroup applies to all cgroups below it, so the least on the path from the root to this
process's own cgroup counts. Each function takes the `root` of the file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_UNBOUNDED = 1 << 60
"""Bytes; a version-1 memory cgroup without a limit reports a number above this."""
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
_USES = ("memory.current", "memory.usage_in_bytes")


def core_quota(root: Path = _ROOT) -> float | None:
    """Return the number of cores that the cgroups allow; None for all."""
    found = []
    for folder in _cgroups("cpu", root):
        kept = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
        share, *period = (_read(folder / "cpu.max") or kept).split() or [""]
        found += [int(share) / int(*period)] if share.isdigit() else []
    return min(found, default=None)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that the cgroups allow; None for all."""
    return min((limit for _, limit in _memory_limits(root)), default=None)


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes that processes can use before memory is short; 0 if they are not known.

    Of the page cache of a cgroup, the part that was not used lately counts as available: the kernel
    takes it back first.
    """
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"))
    free = 1024 * int(found[1]) if found else 0
    for folder, limit in _memory_limits(root):
        used = next((int(text) for name in _USES if (text := _read(folder / name))), 0)
        # Version 1 counts the cgroups below in fields of their own.
        cache = re.findall(r"^(?:total_)?inactive_file (\d+)", _read(folder / "memory.stat"), re.M)
        free = min(free, limit - used + max(map(int, cache), default=0))
    return max(0, free)


def memory_kills(root: Path = _ROOT) -> int:
    """Return how many processes of this host the kernel has killed because memory was short."""
    found = re.search(r"^oom_kill (\d+)$", _read(root / "proc/vmstat"), re.M)
    return int(found[1]) if found else 0


def available_tasks(root: Path = _ROOT) -> int | None:
    """Return how many more processes and threads the cgroups allow; None for any number."""
    found = []
    for folder in _cgroups("pids", root):
        if (limit := _read(folder / "pids.max")).isdigit():
            found.append(max(0, int(limit) - int(_read(folder / "pids.current"))))
    return min(found, default=None)


def _memory_limits(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the cgroups that limit memory, each with its limit in bytes."""
    for folder in _cgroups("memory", root):
        numbers = [int(text) for name in _LIMITS if (text := _read(folder / name)).isdigit()]
        if (limit := min(numbers, default=_UNBOUNDED)) < _UNBOUNDED:
            yield folder, limit


def _cgroups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that may have limits of a controller."""
    own = {}  # paths by controller of version 1; version 2's is ""
    for line in filter(None, _read(root / "proc/self/cgroup").split("\n")):
        _, controllers, name = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), Path(name)))
    # Any mount of the host is listed: its source may be empty, and a path has any bytes but spaces.
    for line in filter(None, _read(root / "proc/self/mountinfo").split("\n")):
        mount, _, system = line.partition(" - ")
        _, _, _, mounted, point, *_ = mount.split(" ")
        kind, _, options = system.split(" ")[:3]
        if kind == "cgroup2":
            path = own.get("")
        elif kind == "cgroup" and controller in options.split(","):
            path = own.get(controller)
        else:
            continue
        if path is None:
            continue
        # A container may not see the folder of its own cgroup: then the mount's is the nearest.
        inside = path.relative_to(mounted) if path.is_relative_to(mounted) else Path()
        for folder in (inside, *inside.parents):
            yield root / point.strip("/") / folder


def _read(path: Path) -> str:
    """Return the text of a file without the space around it; "" if there is none."""
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return ""
