"""Rows as event files of TensorBoard: by its own library, of which this part needs no torch."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.record.metrics.rows import Row

_VERSION = "brain.Event:2"


def check() -> None:
    """That the library is there.

    Raises:
        UsageError: it is not, or cannot be imported.
    """
    try:
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except Exception as error:  # of protobuf too, which may be of another age
        name = error.name or "" if isinstance(error, ModuleNotFoundError) else ""
        if name.partition(".")[0] == "tensorboard":
            raise UsageError(
                "--tensorboard needs the tensorboard package: pip install pipeworker[tensorboard]"
            ) from None
        raise UsageError(f"--tensorboard: the package cannot be imported: {error}") from None


class Events:
    """Event files, one for each process that writes some; by no thread, so that who adds hears.

    Args:
        after: the last step that was recorded; what an earlier process wrote of later ones, which
            are run again, TensorBoard does not show.

    Raises:
        OSError: a file cannot be written; so does :meth:`add`.
    """

    def __init__(self, folder: Path, after: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder.mkdir(exist_ok=True)
        number = len(list(folder.iterdir()))  # names are in the order in which they are to be read
        name = f"events.out.tfevents.{int(time.time())}.{number:04}.{socket.gethostname()}"
        self._records: Any = RecordWriter((folder / name).open("xb"))
        self._write(file_version=_VERSION)
        if after:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=after + 1, session_log=start)

    def add(self, row: Row, group: str) -> None:
        """Write the figures of a row, each under its name in a group."""
        figures = [(name, value) for name, value in row.items() if name != "step"]
        value = self._summary.Value
        values = [value(tag=_tag(group, name), simple_value=figure) for name, figure in figures]
        self._write(step=row["step"], summary=self._summary(value=values))

    def close(self) -> None:
        self._records.close()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._records.flush()


def _tag(group: str, name: str) -> str:
    """What the format takes: it is UTF-8."""
    return f"{group}/{name}".encode(errors="backslashreplace").decode()
