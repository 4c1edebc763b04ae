"""Rows as a CSV file, for spreadsheets and data frames."""

from __future__ import annotations

import csv
from pathlib import Path

from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Row

_ANY = "backslashreplace"
"""A name may be none that is UTF-8."""


class Table:
    """What a file of rows holds, as CSV; a column for each name, the step first.

    A table that does not end where the rows do is written anew: of a run that goes on from an
    earlier step, or one whose process was killed while it wrote, or that has had none so far.

    Args:
        source: the file of rows.

    Raises:
        OSError: a file cannot be read or written; so do the methods.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self._path, self._source = path, source
        self._columns = _columns(path)
        if not self._columns or _last_step(path) != (rows.last(source) or {}).get("step"):
            self._write_anew()
        else:
            self._open()

    def add(self, row: Row) -> None:
        """Add a row, which is the last of the source by now."""
        if {*row} - {*self._columns}:
            self._file.close()
            self._write_anew()
        else:
            self._writer.writerow(row)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _open(self) -> None:
        self._file = self._path.open("a", encoding="utf-8", errors=_ANY, newline="")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")

    def _write_anew(self) -> None:
        self._columns = list(dict.fromkeys(key for row in rows.read(self._source) for key in row))
        temporary = self._path.with_name(f".{self._path.name}.partial")
        with temporary.open("w", encoding="utf-8", errors=_ANY, newline="") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            if self._columns:
                writer.writeheader()
            writer.writerows(rows.read(self._source))
        temporary.replace(self._path)
        self._open()


def _columns(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return next(csv.reader(file), [])
    except (FileNotFoundError, UnicodeDecodeError, csv.Error):
        return []


def _last_step(path: Path) -> int | None:
    """Of its last row, if that is whole."""
    lines = rows.last_lines(path)
    step = lines[-1].partition(b",")[0] if lines and lines[-1].endswith(b"\n") else b""
    return int(step) if step.isdigit() else None
