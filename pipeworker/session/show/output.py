"""What the job prints, read from the logs of its workers as they grow.

Workers know nothing of it: a log is a file that they append to, whatever becomes of who reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeworker.host.streams import OURS
from pipeworker.record.rundir import RunDir

_LONGEST = 1 << 12  # bytes of a line
_AT_ONCE = 1 << 13  # bytes of a log
_BEHIND = 1 << 16
_OURS = OURS.encode()
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)
"""What would move the cursor, change how the terminal looks, or in which order it shows a line."""


@dataclass(frozen=True, slots=True)
class Said:
    """Something a worker has printed.

    Attributes:
        whole: a line; else one that is drawn anew, as it looks now.
    """

    mark: str
    text: str
    whole: bool = True


class Cutter:
    """Cuts what a worker printed into lines.

    Args:
        ours: let through what pipeworker says there too.
    """

    def __init__(self, *, ours: bool = False) -> None:
        self._ours = ours
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete now, as a terminal would show them at their end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST:
            self._rest = self._rest[max(0, self._rest.rstrip(b"\r").rfind(b"\r")) :]
        while len(self._rest) > _LONGEST:
            lines.append(self._rest[:_LONGEST])
            self._rest = self._rest[_LONGEST:]
        return [text for line in lines for text in self._shown(line)]

    @property
    def drawn(self) -> str:
        """The line so far, where it is one that is drawn anew again and again, as tqdm's."""
        return "".join(self._shown(self._rest)) if b"\r" in self._rest else ""

    def end(self) -> list[str]:
        """The last line may have no end."""
        rest, self._rest = self._rest, b""
        return self._shown(rest) if rest else []

    def _shown(self, line: bytes) -> list[str]:
        theirs, mark, ours = line.partition(_OURS)
        visible = theirs.rstrip(b"\r").rpartition(b"\r")[2]
        found = [_plain(visible)] if visible or not mark else []
        return [*found, f"pipeworker: {_plain(ours)}"] if mark and self._ours else found


def visible(text: str) -> str:
    """What is left for a terminal: the characters of its lines, and tabs."""
    return _CONTROL.sub("", text)


def _plain(line: bytes) -> str:
    return visible(line.decode(errors="replace"))


class Log:
    """A worker's log, from now on: what is there already was shown by who ran the job before.

    Args:
        mark: what its lines are marked with.
        folder: of the run.
    """

    def __init__(self, path: Path, mark: str, *, ours: bool = False) -> None:
        self.path, self.mark = path, mark
        self._cutter = Cutter(ours=ours)
        self._at = self._seen = self._size()
        self._drawn = ""

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def more(self, *, early: bool = False) -> Iterator[Said]:
        """What has come since, but no more than a reader could follow.

        Args:
            early: leave out what had not yet come when somebody last asked so.
        """
        size = self._size()
        if early:
            size, self._seen = min(size, self._seen), size
        if size < self._at:  # somebody emptied it
            self._at = 0
        if size == self._at:
            return
        if size - self._at > _BEHIND:
            yield from self._skip(size - _AT_ONCE)
        for text in self._cutter.feed(self._read(size)):
            yield Said(self.mark, text)
        if (drawn := self._cutter.drawn) != self._drawn:
            self._drawn = drawn
            yield Said(self.mark, drawn, whole=False)

    def end(self) -> Iterator[Said]:
        """All that there is, and the line that has no end: who wrote it is gone."""
        for _ in range(_BEHIND // _AT_ONCE + 1):
            yield from self.more()
        for text in self._cutter.end():
            yield Said(self.mark, text)
        self._drawn = ""

    def _skip(self, to: int) -> Iterator[Said]:
        """Leave out what nobody could read; the log has it."""
        for text in self._cutter.end():
            yield Said(self.mark, text)
        began, self._at = self._at, to
        self._at += self._peek(_AT_ONCE).find(b"\n") + 1
        left = f"{(self._at - began) / 1024:.0f} KB that came at once are in {self.path}"
        yield Said(self.mark, f"... {left}")

    def _peek(self, most: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                return file.read(most)
        except OSError:
            return b""

    def _read(self, size: int) -> bytes:
        data = self._peek(min(_AT_ONCE, size - self._at))
        self._at += len(data)
        return data


class Output:
    """What the workers of a job print, of those whose output is shown.

    Args:
        shows: one of OUTPUTS.
        ours: with what pipeworker says in their logs.
    """

    def __init__(
        self, run_dir: RunDir, shows: str, stages: int, replicas: int = 1, *, ours: bool = False
    ) -> None:
        self._run_dir = run_dir
        self._shows = shows
        self._replicas = replicas
        self._ours = ours
        self._logs: dict[tuple[int, int], Log] = {}
        self.of(stages)

    def of(self, stages: int) -> None:
        """The job has so many workers a replica from now on."""
        which: Sequence[tuple[int, int]] = ()
        if self._shows == "stage":
            which = [(0, stage) for stage in dict.fromkeys((0, stages - 1))]
        elif self._shows == "all":
            which = [(r, stage) for r in range(self._replicas) for stage in range(stages)]
        for replica, stage in which:
            if (replica, stage) not in self._logs:
                several = self._replicas > 1
                path = self._run_dir.worker_log(stage, replica if several else None)
                of = f"replica {replica} " if several and self._shows == "all" else ""
                self._logs[replica, stage] = Log(path, f"[{of}stage {stage}]", ours=self._ours)

    def more(self, *, early: bool = False) -> Iterator[Said]:
        """What has come since it was last looked at.

        Args:
            early: a look later, for a job that ends itself as soon as it is run has what it printed
                taken out of its log, to be said as its last words.
        """
        for log in self._logs.values():
            yield from log.more(early=early)

    def end(self) -> Iterator[Said]:
        """All the rest: the workers are gone."""
        for log in self._logs.values():
            yield from log.end()
