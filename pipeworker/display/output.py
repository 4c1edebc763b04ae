"""The output of a job, read from the growing logs of its workers.

Workers do not know about the display: they append to their logs, even if no process reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeworker.display.text import sanitize
from pipeworker.host.streams import LOG_PREFIX
from pipeworker.plan.placement import Placement
from pipeworker.record.files.located import located
from pipeworker.record.rundir import RunDir

_MAX_LINE_BYTES = 1 << 12
_READ_BYTES = 1 << 13
_MAX_BACKLOG_BYTES = 1 << 16
_LOG_PREFIX = LOG_PREFIX.encode()
_HOOKS = -1
"""In place of a rank: the process of the job's hooks."""


@dataclass(frozen=True, slots=True)
class Printed:
    """Sanitized text that the worker `mark` has printed; not `whole` if the line is redrawn."""

    mark: str
    text: str
    whole: bool = True


class LineSplitter:
    """Splits a worker's output into lines; `ours` keeps those that pipeworker itself logs."""

    def __init__(self, *, ours: bool = False) -> None:
        self._ours = ours
        self._rest = b""
        self._in_ours = False  # the rest of a line of pipeworker's, whose beginning was cut off

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes, as a terminal would finally show them."""
        texts = []
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            texts += self._texts(line)
            self._in_ours = False
        if len(self._rest) > _MAX_LINE_BYTES:
            self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        while len(self._rest) > _MAX_LINE_BYTES:
            piece, self._rest = self._rest[:_MAX_LINE_BYTES], self._rest[_MAX_LINE_BYTES:]
            texts += self._texts(piece)
            self._in_ours |= _LOG_PREFIX in piece
        return texts

    @property
    def redrawn(self) -> str:
        """The unfinished line, if it is one that is redrawn again and again, as tqdm's is."""
        return "".join(self._texts(self._rest)) if b"\r" in self._rest else ""

    def flush(self) -> list[str]:
        """Return the last line, which may lack its end."""
        texts = self._texts(self._rest) if self._rest else []
        self._rest, self._in_ours = b"", False
        return texts

    def _texts(self, line: bytes) -> list[str]:
        line = _LOG_PREFIX + line if self._in_ours else line
        theirs, mark, ours = line.partition(_LOG_PREFIX)
        final = theirs.rstrip(b"\r").rpartition(b"\r")[2]
        found = [_text(final)] if final or not mark else []
        return [*found, f"pipeworker: {_text(ours)}"] if mark and self._ours else found


def _text(line: bytes) -> str:
    return sanitize(line.decode(errors="replace"))


class LogReader:
    """Follows a worker's log from its present end: an earlier start of the job showed the rest."""

    def __init__(self, path: Path, mark: str, *, ours: bool = False) -> None:
        self.path, self.mark = path, mark
        self._splitter = LineSplitter(ours=ours)
        self._at = self._last_size = self._size()
        self._redrawn = ""

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, *, delayed: bool = False) -> Iterator[Printed]:
        """Yield what was appended since the last read, but no more than a person could follow.

        `delayed` leaves out what was appended since the last delayed read.
        """
        size = self._size()
        if size < self._at:  # another process truncated the log
            self._at = 0
        if delayed:
            size, self._last_size = min(size, self._last_size), size
        if size <= self._at:
            return
        if size - self._at > _MAX_BACKLOG_BYTES:
            yield from self._skip(size - _READ_BYTES)
        data = self._peek(min(_READ_BYTES, size - self._at))
        self._at += len(data)
        for text in self._splitter.feed(data):
            yield Printed(self.mark, text)
        if (redrawn := self._splitter.redrawn) != self._redrawn:
            self._redrawn = redrawn
            yield Printed(self.mark, redrawn, whole=False)

    def flush(self) -> Iterator[Printed]:
        """Yield everything up to the end, and the line without an end: its worker has ended."""
        for _ in range(_MAX_BACKLOG_BYTES // _READ_BYTES + 1):
            yield from self.read()
        for text in self._splitter.flush():
            yield Printed(self.mark, text)
        self._redrawn = ""

    def _skip(self, to: int) -> Iterator[Printed]:
        """Skip what came too quickly to be read; the log has it."""
        for text in self._splitter.flush():
            yield Printed(self.mark, text)
        began, self._at = self._at, to
        self._at += self._peek(_READ_BYTES).find(b"\n") + 1
        skipped = f"{(self._at - began) / 1024:.0f} KB came too quickly to be shown: see"
        yield Printed(self.mark, f"... {skipped} {located(self.path)}")

    def _peek(self, most: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                return file.read(most)
        except OSError:
            return b""


class WorkerOutput:
    """The output of the workers that `shown`, one of OUTPUTS, selects, and of the job's hooks."""

    def __init__(
        self, run_dir: RunDir, shown: str, placement: Placement, *, ours: bool = False
    ) -> None:
        self._run_dir = run_dir
        self._shown = shown
        self._ours = ours
        self._logs: dict[int, LogReader] = {}  # by rank
        if shown != "none":
            self._logs[_HOOKS] = LogReader(run_dir.hooks_log, "[hooks]", ours=ours)
        self.follow(placement)

    def follow(self, placement: Placement) -> None:
        """Follow the workers of a placement from now on, besides those followed before."""
        named, ranks = placement, {*range(placement.ranks)}
        if self._shown != "all":
            named, ends = placement.copies(1), (0, placement.stages - 1)
            ranks = {placement.rank_of(stage) for stage in ends if self._shown == "stage"}
        for rank in sorted(ranks):
            mark = f"[{named.names(rank)}]"
            if rank not in self._logs:
                self._logs[rank] = LogReader(self._run_dir.worker_log(rank), mark, ours=self._ours)
            self._logs[rank].mark = mark

    def read(self, *, delayed: bool = False) -> Iterator[Printed]:
        """Yield what the workers printed since the last read, or `delayed` by one read.

        A job file that ends the job as soon as it is run has its output taken out of the log, to be
        reported as the verdict.
        """
        for log in self._logs.values():
            yield from log.read(delayed=delayed)

    def flush(self) -> Iterator[Printed]:
        """Yield everything that is left: the workers have ended."""
        for log in self._logs.values():
            yield from log.flush()
