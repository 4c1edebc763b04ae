"""Files of JSON objects, one a line, each with its `step`: written, read, the last and the best."""

from __future__ import annotations

import errno
import json
import math
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_LONGEST = 1 << 16  # bytes of a row


class Rows:
    """A file opened once; a row is there whole or not at all.

    That of a process which was killed while it wrote it goes. What the disk does not take is held,
    and tried again with the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: deque[bytes] = deque()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        end = os.pread(self._file, _LONGEST, max(0, size - _LONGEST))
        if not end.endswith(b"\n"):
            os.ftruncate(self._file, size - len(end) + end.rfind(b"\n") + 1)

    def add(self, row: Row) -> None:
        """Write a row, behind those that are held.

        Raises:
            OSError: the disk is full, or the file is not there any more.
        """
        self._held.append((json.dumps(row) + "\n").encode())
        self.flush()

    def flush(self) -> None:
        """Write what is held.

        Raises:
            OSError: as :meth:`add`.
        """
        while self._held:
            found = os.fstat(self._file)
            if not found.st_nlink:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            if os.write(self._file, self._held[0]) < len(self._held[0]):
                os.ftruncate(self._file, found.st_size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._held.popleft()

    def sync(self) -> None:
        """All rows are on disk when this returns.

        Raises:
            OSError: as :meth:`add`.
        """
        self.flush()
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Iterator[Row]:
    """All whole rows; none where there is no file.

    Raises:
        OSError: it cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            if row := _row(line):
                yield row


def last(path: Path) -> Row | None:
    """The last whole row; None where there is none.

    Raises:
        OSError: the file cannot be read.
    """
    for line in reversed(last_lines(path)):
        if row := _row(line):
            return row
    return None


def last_lines(path: Path) -> list[bytes]:
    """Of a file, some of the last; each whole, but for the last one perhaps.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return []
    with file:
        start = max(0, file.seek(0, os.SEEK_END) - _LONGEST)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)
    return lines[1:] if start else lines


def best(path: Path) -> Row | None:
    """The row with the least loss, of equal ones the last; None where no loss is finite.

    Raises:
        OSError: the file cannot be read.
    """
    found: Row | None = None
    for row in read(path):
        loss = row.get("loss")
        if (
            isinstance(loss, (int, float))
            and -math.inf < loss < math.inf  # a number may be too long for a float
            and (found is None or loss <= found["loss"])
        ):
            found = row
    return found


def _row(line: bytes) -> Row | None:
    """What a line says, if it is a whole row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
