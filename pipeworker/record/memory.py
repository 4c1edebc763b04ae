"""A worker's part of a checkpoint in memory: three files without a name, until they are on disk.

Whoever inherits the descriptors has the memory, whatever becomes of the worker that filled it.
Imports no torch: what writes it to disk need not be the worker.
"""

from __future__ import annotations

import mmap
import os
import re
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeworker.errors import RecordError
from pipeworker.wire.messages.checkpoint import File

_CHUNK = 1 << 18
_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes that this process may take without others being pushed out, as far as that is known."""
    free = 0
    with suppress(OSError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", _MEMINFO.read_text())
        free = 1024 * int(found[1]) if found else 0
    with suppress(OSError, ValueError):  # a container's limit; "max" is none
        most, now = ((_GROUP / f"memory.{name}").read_text() for name in ("max", "current"))
        free = min(free, int(most) - int(now))
    return free


class Memory:
    """Room for the files of one part, in the order in which the manifest names them.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self) -> None:
        self.handles: list[int] = []
        try:
            for _ in range(3):
                self.handles.append(os.memfd_create("pipeworker", os.MFD_CLOEXEC))
        except OSError:
            self.close()
            raise

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """Where this process finds the files, to read them."""
        model, optimizer, state = (Path(f"/proc/self/fd/{handle}") for handle in self.handles)
        return model, optimizer, state

    def room(self, number: int, size: int) -> mmap.mmap:
        """Make a file so large, and map it.

        Raises:
            OSError: there is not that much memory.
        """
        os.ftruncate(self.handles[number], size)
        return mmap.mmap(self.handles[number], size)

    @property
    def size(self) -> int:
        """Bytes that it has."""
        return sum(os.fstat(handle).st_size for handle in self.handles)

    def put(self, number: int, data: bytes) -> None:
        """Fill a file.

        Raises:
            OSError: as :meth:`room`.
        """
        os.ftruncate(self.handles[number], len(data))
        os.pwrite(self.handles[number], data, 0)

    def close(self) -> None:
        while self.handles:
            os.close(self.handles.pop())


def write(handles: Sequence[int], folder: Path, names: Sequence[str]) -> tuple[File, ...]:
    """Write a part to disk, where it is when this returns.

    Raises:
        RecordError: a file cannot be written.
    """
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for handle, name in zip(handles, names, strict=True):
            path = folder / name
            found.append(_write(handle, path))
        return tuple(found)
    except OSError as error:
        raise RecordError(path, error) from None


def _write(handle: int, path: Path) -> File:
    """Through a buffer that stays in the cache: a mapping would cost a fault a page."""
    buffer = memoryview(bytearray(_CHUNK))
    checksum = written = 0
    with path.open("wb", buffering=0) as file:
        while count := os.preadv(handle, [buffer], written):
            checksum = zlib.crc32(buffer[:count], checksum)
            done = 0
            while done < count:
                done += file.write(buffer[done:count])
            written += count
        os.fsync(file.fileno())
    return File(path.name, written, checksum)
