"""Rows of a run: files of JSON objects, one a line, each with its ``step``."""

from __future__ import annotations

import errno
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pipeworker.errors import UnreadableFile
from pipeworker.record.files.atomic_file import named, no_link
from pipeworker.record.files.bounded_file import load_json, open_bounded

Row = dict[str, Any]
BLOCK_BYTES = 1 << 16
MAX_ROW_BYTES = 64 << 20
_ROW = dict[str, int | float | str | bool | None]


class Rows:
    """A file of rows that is open for writing; a row appears whole or not at all.

    Opening the file removes a row that a killed process left incomplete. A row that a full disk
    does not take is kept, and written again with the next one.

    Args:
        path: the file.
        later: whether the first row opens it.
    """

    def __init__(self, path: Path, *, later: bool = False) -> None:
        self._path = path
        self._pending: deque[bytes] = deque()
        self._file = -1
        if not later:
            self.open()

    def open(self) -> None:
        """Open the file. Idempotent.

        Raises:
            OSError: it cannot be opened.
        """
        if self._file >= 0:
            return
        file = no_link(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            end = next(reversed_lines(self._path), b"\n")
            if not end.endswith(b"\n"):
                os.ftruncate(file, os.fstat(file).st_size - len(end))
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def add(self, row: Row) -> None:
        """Write a row, behind the rows that are pending.

        Raises:
            OSError: the disk is full, or the file was removed; the row is pending then. Or the row
                is longer than readers accept, and is not written.
        """
        self.append(row)
        self.flush()

    def append(self, row: Row) -> None:
        """Make a row pending.

        Raises:
            OSError: the row is longer than readers accept.
        """
        line = (json.dumps(row) + "\n").encode()
        if len(line) >= MAX_ROW_BYTES:
            text = f"the row of step {row['step']} has {len(line)} bytes; record fewer metrics"
            raise OSError(errno.EFBIG, text, str(self._path))
        self._pending.append(line)

    def flush(self) -> None:
        """Write the rows that are pending; raises as :meth:`add`."""
        while self._pending:
            self.open()
            found = os.fstat(self._file)
            if not found.st_nlink:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._path))
            with named(self._path):
                written = os.write(self._file, self._pending[0])
            if written < len(self._pending[0]):
                os.ftruncate(self._file, found.st_size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            self._pending.popleft()

    def withdraw(self, step: int) -> None:
        """Remove the last row if it is of `step`.

        Raises:
            OSError: the file cannot be read or written.
        """
        if self._pending:
            line = self._pending[-1]
            if (row := parse(line)) and row["step"] == step:
                self._pending.pop()
            return
        line = next(reversed_lines(self._path), b"")
        if (row := parse(line)) and row["step"] == step:
            os.ftruncate(self._file, os.fstat(self._file).st_size - len(line))

    def sync(self) -> None:
        """Flush the rows that are written, but not the pending ones, to disk.

        Another thread may add rows meanwhile.
        """
        if self._file >= 0:
            with named(self._path):
                os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def read(path: Path) -> Iterator[Row]:
    """Yield all whole rows of a file; none if there is no file; raises as :func:`read_lines`."""
    try:
        yield from filter(None, map(parse, read_lines(path)))
    except FileNotFoundError:
        return


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; the last one may be incomplete.

    Raises:
        OSError: the file cannot be opened.
        UnreadableFile: it is not a regular file, or a line is too long for a row.
    """
    with open_bounded(path, None) as file:
        while line := file.readline(MAX_ROW_BYTES):
            _check_length(path, line)
            yield line


def _check_length(path: Path, line: bytes) -> None:
    if len(line) >= MAX_ROW_BYTES:
        reason = f"a line has more than {MAX_ROW_BYTES} bytes, which no row has"
        raise UnreadableFile(path, reason, "remove the line")


def last(path: Path) -> Row | None:
    """Return the last whole row of a file; None if there is none; raises as :func:`read_lines`."""
    return next(reversed_rows(path), None)


def reversed_rows(path: Path) -> Iterator[Row]:
    """Yield all whole rows of a file, the last one first; raises as :func:`read_lines`."""
    return filter(None, map(parse, reversed_lines(path)))


def reversed_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first, which may be incomplete; none if no file.

    Raises:
        UnreadableFile: as :func:`read_lines`.
    """
    try:
        file = open_bounded(path, None)
    except FileNotFoundError:
        return
    with file:
        block, start, rest = BLOCK_BYTES, file.seek(0, os.SEEK_END), b""
        while start:
            end, start = start, max(0, start - block)
            file.seek(start)
            rest, *lines = (file.read(end - start) + rest).splitlines(keepends=True) or [b""]
            _check_length(path, rest)
            yield from reversed(lines)
            block *= 2  # a line of any length is read in linear time
        if rest:
            yield rest


def parse(line: bytes) -> Row | None:
    """Return the row in a line; None if the line is not a whole row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = msgspec.convert(load_json(line), _ROW)
    except (ValueError, RecursionError):
        return None
    return row if type(row.get("step")) is int else None
