"""The figures of a run in other formats, beside ``metrics.jsonl`` and ``evaluation.jsonl``."""

from __future__ import annotations

from pathlib import Path

from pipeworker.record.metrics import rows
from pipeworker.record.metrics.rows import Row
from pipeworker.record.metrics.table import Table
from pipeworker.record.metrics.tensorboard import Events


class Extras:
    """What was asked for besides, each file opened once.

    Args:
        sources: files of rows; the first one is that of the steps.
        csv: a table beside each of them.
        events: the folder for TensorBoard's files, if they were asked for.

    Raises:
        OSError: a file cannot be read or written; so does :meth:`add`.
    """

    def __init__(self, *sources: Path, csv: bool, events: Path | None) -> None:
        self._csv = csv
        self._steps = sources[0]
        self._tables: dict[Path, Table] = {}
        self._events: Events | None = None
        if csv:
            for source in filter(Path.exists, sources):
                self._tables[source] = _table(source)
        if events:
            self._events = Events(events, (rows.last(sources[0]) or {}).get("step", 0))

    def add(self, source: Path, row: Row) -> None:
        """Write a row, which is the last of its source by now."""
        if self._csv:
            if source in self._tables:
                self._tables[source].add(row)
            else:
                self._tables[source] = _table(source)
        if self._events:
            self._events.add(row, "train" if source == self._steps else source.stem)

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        if self._events:
            self._events.close()


def _table(source: Path) -> Table:
    return Table(source.with_suffix(".csv"), source)
