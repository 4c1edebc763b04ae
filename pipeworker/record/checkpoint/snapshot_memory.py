"""The memory of a worker's snapshot: unnamed files, until they are written to disk.

A process that inherits the descriptors has the memory, even after the end of the worker that filled
it. Imports no torch: the process that writes the memory to disk needs none.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeworker.errors import RecordError
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.record.checkpoint.frozen_weights import frozen_name, link_same
from pipeworker.record.files.atomic_file import open_file
from pipeworker.record.files.located import located

Chunk = memoryview
"""Bytes of a file, valid until the next ones are requested."""
MEMORY = Path("/proc/self/fd")
"""The folder in which this process can read the files of memory."""
_CHUNK = 1 << 18
_NICENESS = 10


class LacksMemory(OSError):
    """The memory that a snapshot needs and does not get."""

    def __init__(self, error: OSError | None = None) -> None:
        reason = f": {error.strerror}" if error else ""
        super().__init__(errno.ENOMEM, f"too little memory is available{reason}")


class SnapshotMemory:
    """Four files in memory, in the order of a worker's files; that of frozen weights may be empty.

    Raises:
        OSError: there are no descriptors left, or a filter of system calls refuses such files.
    """

    def __init__(self) -> None:
        self.handles: list[int] = []
        try:
            for _ in range(4):
                self.handles.append(os.memfd_create("pipeworker", os.MFD_CLOEXEC))
        except OSError as error:
            self.close()
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
            text = f"memfd_create: {error.strerror}; allow this system call in the sandbox's filter"
            raise OSError(error.errno, text) from None

    @property
    def paths(self) -> list[Path]:
        """The paths by which this process can read the files, without an empty last one."""
        count = 3 + bool(os.fstat(self.handles[3]).st_size)
        return [MEMORY / str(handle) for handle in self.handles[:count]]

    @property
    def plain_last(self) -> list[int]:
        """The descriptors, that of the plain values behind those of the tensors."""
        model, optimizer, plain, frozen = self.handles
        return [model, optimizer, frozen, plain]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(os.fstat(handle).st_size for handle in self.handles)

    def allocate(self, number: int, size: int) -> mmap.mmap:
        """Resize a file to `size` bytes, and map it.

        Raises:
            LacksMemory: there is not enough memory.
        """
        try:
            os.ftruncate(self.handles[number], size)
            return mmap.mmap(self.handles[number], size)
        except OSError as error:
            raise LacksMemory(error) from None

    def write(self, number: int, data: bytes) -> None:
        """Replace the content of a file.

        Raises:
            LacksMemory: there is not enough memory.
        """
        try:
            os.ftruncate(self.handles[number], len(data))
            os.pwrite(self.handles[number], data, 0)
        except OSError as error:
            raise LacksMemory(error) from None

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        while self.handles:
            os.close(self.handles.pop())


@dataclass(frozen=True, slots=True)
class FileContent:
    """A file to write.

    Attributes:
        chunks: returns its bytes in order.
        shared: whether it may become a second name of a file of the checkpoint before.
    """

    name: str
    chunks: Callable[[], Iterable[Chunk]]
    shared: bool = False


def write_files(
    handles: Sequence[int], folder: Path, names: Sequence[str]
) -> tuple[CheckpointFile, ...]:
    """Write the files of a snapshot in memory into a folder; see :func:`write_contents`."""
    *others, frozen = [partial(_chunks, handle) for handle in handles]
    files = [FileContent(name, chunks) for name, chunks in zip(names, others, strict=True)]
    if os.fstat(handles[-1]).st_size:
        files.append(FileContent(frozen_name(names[0]), frozen, shared=True))
    return write_contents(files, folder)


def write_contents(files: Sequence[FileContent], folder: Path) -> tuple[CheckpointFile, ...]:
    """Write files; they are on disk when this returns.

    Raises:
        RecordError: a file cannot be written.
    """
    path = folder
    try:
        for made in (folder.parent, folder):  # not the run directory: it may have been moved
            made.mkdir(exist_ok=True)
        found = []
        for file in files:
            path = folder / file.name
            linked = None
            if file.shared:  # never write into a file that an earlier checkpoint has too
                path.unlink(missing_ok=True)
                linked = link_same(file.chunks(), path)
            found.append(linked or _write_file(file.chunks(), path))
        return tuple(found)
    except OSError as error:
        raise RecordError(located(path), error) from None


def _chunks(handle: int) -> Iterator[Chunk]:
    """Read through a buffer that stays in the cache: a mapping would cost a fault a page."""
    buffer = memoryview(bytearray(_CHUNK))
    start = 0
    while count := os.preadv(handle, [buffer], start):
        yield buffer[:count]
        start += count


def _write_file(chunks: Iterable[Chunk], path: Path) -> CheckpointFile:
    checksum = written = 0
    with open_file(path, "wb", buffering=0) as file:
        for chunk in chunks:
            checksum = zlib.crc32(chunk, checksum)
            done = 0
            while done < len(chunk):
                done += file.write(chunk[done:])
            written += len(chunk)
        os.fsync(file.fileno())
    return CheckpointFile(path.name, written, checksum)


def main() -> int:
    """Run the process that writes checkpoints while its worker trains, until its input ends.

    Standard input and output are pipes to the worker. A request is a line with a JSON array
    ``[folder, [descriptor, ...], [name, ...]]``, where the process has inherited the descriptors.
    The answer is a line ``[[[name, bytes, checksum], ...], error]``. If the worker is killed, the
    process ends without an answer, also in the middle of a file: no process would use the file.
    """
    threading.Thread(target=_exit_with_worker, daemon=True).start()
    os.nice(_NICENESS)  # steps come first
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # sent to the whole job
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        folder, handles, names = json.loads(line)
        try:
            files = write_files(handles, Path(folder), names)
            answer = [[[file.name, file.bytes, file.crc32] for file in files], ""]
        except RecordError as error:
            answer = [[], str(error)]
        with suppress(BrokenPipeError):  # the worker was killed, so the input ends as well
            os.write(1, json.dumps(answer).encode() + b"\n")
    return 0


def _exit_with_worker() -> None:
    """End this process once no process can read its standard output."""
    output = select.poll()
    output.register(1, 0)  # reports nothing else
    output.poll()
    os._exit(0)
