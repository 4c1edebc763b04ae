"""The figures of a run in other formats, beside ``metrics.jsonl`` and ``evaluation.jsonl``."""

from __future__ import annotations

import csv
import socket
import time
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.record.files.atomic_file import open_file, temporary_path
from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Row

_VERSION = "brain.Event:2"
_ANY = "backslashreplace"
"""A name may not be valid UTF-8."""


class ExtraFormats:
    """The requested formats of a run's rows, each file opened once.

    The first of the `sources`, files of rows, has those of steps. The folder `events` is for
    TensorBoard's files.

    Raises:
        OSError: a file cannot be read or written; so may :meth:`add`.
    """

    def __init__(self, *sources: Path, csv: bool, events: Path | None) -> None:
        self._csv = csv
        self._steps = sources[0]
        self._tables = {source: CsvTable(source) for source in sources if csv and source.exists()}
        self._events: TensorBoardEvents | None = None
        if events:
            self._events = TensorBoardEvents(events, (rows.last(sources[0]) or {}).get("step", 0))

    def add(self, source: Path, row: Row) -> None:
        """Write a row that is now the last one of `source`."""
        if self._csv:
            if source in self._tables:
                self._tables[source].add(row)
            else:
                self._tables[source] = CsvTable(source)
        if self._events:
            self._events.add(row, "train" if source == self._steps else source.stem)

    def withdraw(self, source: Path, step: int) -> None:
        """Remove the row of a step, which `source` does not have any more, where that is possible.

        TensorBoard ignores the figures of a step at which a later record has a process start.
        """
        if source in self._tables:
            self._tables[source].rewrite()
        if self._events:
            self._events.begin(step)

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        if self._events:
            self._events.close()


class CsvTable:
    """The rows of a file as CSV, for spreadsheets and data frames: a column for each name.

    A table whose last step is not that of the rows is written anew: the run may have resumed from
    an earlier step, its process may have been killed, or there was no table so far.

    Raises:
        OSError: a file cannot be read or written; so may every method.
    """

    def __init__(self, source: Path) -> None:
        self._path, self._source = source.with_suffix(".csv"), source
        columns = _columns(self._path)
        if not columns or _last_step(self._path) != (rows.last(source) or {}).get("step"):
            columns = self._write_all()
        self._open(columns)

    def add(self, row: Row) -> None:
        """Add a row that is now the last one of the source."""
        if {*row} - {*self._columns}:
            self.rewrite()
        else:
            self._writer.writerow(row)
            self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _open(self, columns: list[str]) -> None:
        self._file = open_file(self._path, "a", encoding="utf-8", errors=_ANY, newline="")
        self._columns = columns
        self._writer = csv.DictWriter(self._file, columns, lineterminator="\n")

    def rewrite(self) -> None:
        """Write the table anew, because the source has changed; if that fails, try again."""
        before = self._file
        self._open(self._write_all())
        before.close()

    def _write_all(self) -> list[str]:
        """Write the file from the source; return its columns."""
        columns = list(dict.fromkeys(key for row in rows.read(self._source) for key in row))
        with temporary_path(self._path) as temporary:
            with temporary.open("x", encoding="utf-8", errors=_ANY, newline="") as file:
                writer = csv.DictWriter(file, columns, lineterminator="\n")
                if columns:
                    writer.writeheader()
                writer.writerows(rows.read(self._source))
            temporary.replace(self._path)
        return columns


def _columns(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return next(csv.reader(file), [])
    except (FileNotFoundError, UnicodeDecodeError, csv.Error):
        return []


def _last_step(path: Path) -> int | None:
    """Return the step of a table's last row; None if the row is incomplete."""
    line = next(rows.reversed_lines(path), b"")
    step = line.partition(b",")[0] if line.endswith(b"\n") else b""
    return int(step) if step.isdigit() else None


def check_tensorboard() -> None:
    """Check that TensorBoard's library can be imported.

    Raises:
        UsageError: it is not installed, or cannot be imported.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except Exception as error:  # of protobuf too, whose version may not match
        name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if name.partition(".")[0] == "tensorboard":
            raise UsageError(
                "--tensorboard: its package is missing; pip install tensorboard"
            ) from None
        raise UsageError(f"--tensorboard: the package cannot be imported: {error}") from None


class TensorBoardEvents:
    """Event files of TensorBoard, written by its own library: one for each process.

    No thread writes them, so that the caller gets the errors. This part of the library needs no
    torch. TensorBoard does not show what an earlier process wrote of steps `after` the last
    recorded one, which are run again.

    Raises:
        OSError: a file cannot be written; so may :meth:`add`.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        number = len(list(folder.iterdir()))  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{int(time.time())}.{number:04}.{socket.gethostname()}"
        self._records: Any = RecordWriter((folder / name).open("xb"))
        self._write(file_version=_VERSION)
        self._session: Any = event_pb2.SessionLog
        self.begin(after + 1)

    def begin(self, step: int) -> None:
        """Write that what was written before of this step, and of later ones, does not count."""
        self._write(step=step, session_log=self._session(status=self._session.START))

    def add(self, row: Row, group: str) -> None:
        """Write the figures of a row, each under its name in `group`."""
        values = [
            # A tag must be UTF-8.
            self._summary.Value(
                tag=f"{group}/{name}".encode(errors=_ANY).decode(), simple_value=figure
            )
            for name, figure in row.items()
            if name != "step"
        ]
        self._write(step=row["step"], summary=self._summary(value=values))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()
