"""A reader of the records of a run, in the order of its steps, while they are written. No torch.

The files of the run directory are read, so that nothing is lost or repeated when processes of the
job are replaced. A reader's position in them is a file as well: a run that is resumed continues
behind it, although the rows behind its checkpoint are removed and written again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeworker.record.checkpoint.folder import step_of
from pipeworker.record.files.atomic_file import no_link
from pipeworker.record.files.bounded_file import read_json
from pipeworker.record.files.located import located
from pipeworker.record.metrics import rows
from pipeworker.record.rundir import RunDir

STEP, EVALUATION, CHECKPOINT = KINDS = ("on_step", "on_evaluation", "on_checkpoint")
"""The kinds of records, by the names of the functions of a job that are called with them."""
MAX_READ_BYTES = 4 << 20
"""Bytes of rows that are read at once."""
_LENGTH = 255
"""Characters of the places of all kinds."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row of metrics or of an evaluation pass, or the path of a complete checkpoint."""

    kind: str
    step: int
    value: Any


@dataclass(frozen=True, slots=True)
class Place:
    """A place among records: those of earlier steps are before it, and `count` ones of `step`."""

    step: int
    count: int = 0

    @property
    def last(self) -> int:
        """The last step of which a record may be before the place."""
        return self.step if self.count else self.step - 1

    def after(self, step: int) -> Place:
        """Return the place behind one more record, which is of `step`."""
        return Place(step, self.count + 1 if step == self.step else 1)


class PlaceFile:
    """The file that keeps a reader's place in the records of each kind.

    A kind that it does not have begins behind `before`, the step that the run is resumed from.

    Raises:
        OSError, UnreadableFile: the file is not usable.
    """

    def __init__(self, path: Path, kinds: Collection[str], before: int) -> None:
        found: dict[str, Any] = {}
        if path.exists():
            reason = "it does not have the records that hooks were called with"
            found = read_json(path, dict[str, tuple[int, int]], reason, "remove it")
        first = Place(before + 1 if before else 0)
        self.places = {k: Place(*found[k]) if k in found else first for k in {*found, *kinds}}
        self._file = no_link(path, os.O_RDWR | os.O_CREAT)
        self._write()

    def advance(self, record: Record) -> None:
        """Record that the reader is done with a record."""
        self.places[record.kind] = self.places[record.kind].after(record.step)
        self._write()

    def _write(self) -> None:
        # In place, and of one length: the end of the process does not divide a write.
        data = json.dumps({kind: (p.step, p.count) for kind, p in sorted(self.places.items())})
        os.pwrite(self._file, f"{data:<{_LENGTH}}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._file)


@dataclass(slots=True)
class _Tail:
    """The rows behind a place that have been appended to a file."""

    kind: str
    path: Path
    begin: Place
    last: int = field(init=False)  # the step of the last row that was read
    _file: int = -1
    _at: int = 0
    _seen: int = 0  # rows of the step of `begin`

    def __post_init__(self) -> None:
        self.last = self.begin.last

    def read(self) -> Iterator[Record]:
        """Yield the next whole rows, a few megabytes at most."""
        if self._file < 0:
            try:
                self._file = no_link(self.path, os.O_RDONLY)
            except FileNotFoundError:
                return
            self._at = self._offset()
        data = os.pread(self._file, MAX_READ_BYTES, self._at)
        end = data.rfind(b"\n") + 1
        while data and not end and len(data) < rows.MAX_ROW_BYTES:  # a long row, or half of one
            more = os.pread(self._file, MAX_READ_BYTES, self._at + len(data))
            if not more:
                return
            data += more
            end = data.rfind(b"\n") + 1
        self._at += end
        for line in data[:end].splitlines(keepends=True):
            if (row := rows.parse(line)) is None:
                continue
            step: int = row["step"]
            self.last = max(self.last, step)
            if step == self.begin.step:
                self._seen += 1
            if step > self.begin.step or (
                step == self.begin.step and self._seen > self.begin.count
            ):
                yield Record(self.kind, step, row)

    def _offset(self) -> int:
        """Return where the first row is that may be behind the place."""
        at = os.fstat(self._file).st_size
        for line in rows.reversed_lines(self.path):
            row = rows.parse(line)
            if row is not None and row["step"] < self.begin.step:
                break
            at -= len(line)
        return max(0, at)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


@dataclass(slots=True)
class RunFeed:
    """The records of the given kinds, each once, behind the places of a reader."""

    run_dir: RunDir
    kinds: Collection[str]
    places: PlaceFile
    _tails: dict[str, _Tail] = field(init=False)
    _saved: int = field(init=False)
    _held: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        paths = {STEP: self.run_dir.metrics, EVALUATION: self.run_dir.evaluation}
        begin = self.places.places
        self._tails = {k: _Tail(k, paths[k], begin[k]) for k in paths if k in self.kinds}
        self._saved = begin.get(CHECKPOINT, Place(0)).last

    def new(self, *, final: bool = False) -> list[Record]:
        """Return records that were made since the last call: those of a step behind its row.

        Nothing more will be recorded if this is the `final` reading, and it returns nothing.
        """
        while True:
            # The rows of steps first: what belongs to a step before the last of these is there.
            found = [record for tail in self._tails.values() for record in tail.read()]
            found += self._checkpoints() if CHECKPOINT in self.kinds else ()
            waiting = [*self._held, *found]
            waiting.sort(key=lambda record: (record.step, KINDS.index(record.kind)))
            limit = self._tails[STEP].last if STEP in self._tails else math.inf
            count = sum(record.step <= limit for record in waiting)
            if final and not found:
                count = len(waiting)
            due, self._held = waiting[:count], waiting[count:]
            if due or not (final and found):
                return due

    def _checkpoints(self) -> Iterator[Record]:
        for path in self.run_dir.checkpoints.paths():
            step = step_of(path)
            if step > self._saved:
                self._saved = step
                yield Record(CHECKPOINT, step, Path(located(path)))

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
