"""The recorder of a worker: what it did and when, as rows of the run's ``timeline/``.

A row has the times of one mini-batch: of each action, and of what happened before it since the
coordinator's command arrived. Times are those of a clock that all processes of a host have in
common. They are written behind the answer to the coordinator, while the worker waits anyway.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from pipeworker.errors import UnreadableFile
from pipeworker.plan.actions import Action, format_actions
from pipeworker.record.metrics.rows import Row, Rows
from pipeworker.trace.ring import MiniBatchTimes, Ring

UPDATE, SNAPSHOT, SAVE, EVALUATION = "update", "snapshot", "save", "evaluation"
_LEAST_SUSPENDED = 0.5
"""Seconds: a process of a busy host may be late by less."""
_NONE = -1
"""The step before the first command."""
_ALWAYS = (SAVE, EVALUATION)
"""Spans that are recorded even if their step is not: they are few, and long."""


def clock_identity() -> str:
    """Return a text that is equal for processes whose clocks show the same."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    try:
        offsets = Path("/proc/self/timens_offsets").read_text().split()
    except OSError:  # a kernel without namespaces for clocks
        offsets = []
    return "/".join([boot, *offsets])


def start_row(rank: int, replica: int, stages: Sequence[int], attempt: str, generation: int) -> Row:
    """Return the first row of a worker's process, which began just now.

    `attempt` is equal for all workers of a command that begins or resumes the run.
    """
    return {
        "worker": rank,
        "attempt": attempt,
        "replica": replica,
        "stages": " ".join(map(str, stages)),
        "generation": generation,
        "host": socket.gethostname(),
        "clock": clock_identity(),
        "now": perf_counter(),
        "time": time.time(),
    }


def microseconds(base: float, times: Sequence[float]) -> list[int]:
    """Return times in seconds as differences: of the first one from `base`, of each from the last.

    The sum of the first n differences is the n-th time in microseconds, without an error that adds
    up.
    """
    whole = np.rint((np.asarray(times) - base) * 1e6).astype(np.int64)
    return list(map(int, np.diff(whole, prepend=0)))


def seconds(base: float, differences: Sequence[int]) -> list[float]:
    """Return the times of which :func:`microseconds` has made differences."""
    return [float(at) for at in base + np.cumsum(differences) / 1e6]


def row_of(times: MiniBatchTimes) -> Row:
    """Return the row of a mini-batch; memory is in KiB, as differences from action to action."""
    found: Row = {
        "step": times.step,
        "first": times.first,
        "program": times.program,
        "began": round(times.began, 6),
        "times": microseconds(round(times.began, 6), times.times),
    }
    if times.memory:
        whole = np.asarray(times.memory) >> 10
        found["memory"] = list(map(int, np.diff(whole, prepend=0)))
    return found


def record_unfinished(ring: Ring) -> None:
    """Record the mini-batch in which a worker has died, if there is one, for the worker."""
    times = ring.unfinished()
    if times is None or not ring.path:
        return
    with suppress(OSError, UnreadableFile):  # no job depends on the timeline
        rows = Rows(Path(ring.path))
        try:
            rows.add(row_of(times) | {"lost": True})
        finally:
            rows.close()


def record_unfinished_in(path: Path) -> None:
    """Record what a worker without an agent has not finished, and remove the file of its ring.

    The worker has ended; if there is no such file, nothing is done.
    """
    with suppress(OSError, UnreadableFile, ValueError):
        ring = Ring.in_file(path)
        ring.path = str(path.with_suffix(".jsonl"))  # wherever the file says
        record_unfinished(ring)
        ring.close()
        path.unlink()


@dataclass(slots=True)
class _Command:
    """The reaction of a worker to one command of the coordinator."""

    received: float
    step: int = 0
    recorded: bool = False
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    times: MiniBatchTimes | None = None
    suspended: float = 0.0

    def row(self, answered: float, suspended: float) -> Row:
        """Return the row of this command, which was answered at a time.

        `suspended` is for how long the process has been suspended so far; what it has when the
        command arrives is not the command's.
        """
        base = round(self.received, 6)
        found: Row = {"step": self.step, "received": base}
        if self.spans:
            found["spans"] = [
                [name, *microseconds(base, (begin, end))] for name, begin, end in self.spans
            ]
        if self.times is not None and self.recorded:
            found |= row_of(self.times)
        if suspended - self.suspended > _LEAST_SUSPENDED:
            found["suspended"] = round(suspended - self.suspended, 3)
        return found | {"answered": round(answered, 6)}


class Recorder:
    """Records what a worker does because of the coordinator's commands.

    Args:
        path: the file, which may have rows of an earlier process.
        start: the first row of this process: what is known of the worker.
        note: called with why nothing more is recorded, if the file cannot be written.
        clock: returns a measurement of the clock that is to be recorded, if there is one.
        suspended: returns for how many seconds the process has been suspended so far.
    """

    def __init__(
        self,
        path: Path,
        start: Row,
        note: Callable[[str], None],
        clock: Callable[[], tuple[float, float, float] | None] = lambda: None,
        suspended: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._path, self._start, self._note, self._clock = path, start, note, clock
        self._suspended = suspended
        self._rows: Rows | None = None
        self._command = _Command(perf_counter(), _NONE, recorded=True)
        self._after_recorded = self._is_broken = False

    def receive(self, step: int, *, recorded: bool) -> None:
        """Note that a command of a step has arrived; `recorded`: the times of its actions are."""
        self._after_recorded = self._command.recorded
        self._command = _Command(perf_counter(), step, recorded, suspended=self._suspended())

    def receive_more(self) -> None:
        """Note that a command has arrived that belongs to the step of the last one."""
        self.receive(self._command.step, recorded=self._command.recorded)

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Note when something began and ended that is no action."""
        began = perf_counter()
        yield
        self._command.spans.append((name, began, perf_counter()))

    def use(self, program: int, actions: Sequence[Action]) -> None:
        """Write the actions of a program, which rows refer to by its number."""
        self._add({"program": program, "actions": format_actions(actions)})

    def run(self, times: MiniBatchTimes) -> None:
        """Note when the actions of a mini-batch began and ended."""
        self._command.times = times

    def write(self) -> None:
        """Write what is to be recorded of the command, which was answered just now.

        A command after one that is recorded has a row, because it shows how long the worker waited,
        and so has the first one, which shows when the worker began.
        """
        command = self._command
        if command.step == _NONE:
            return
        lasting = any(name in _ALWAYS for name, _, _ in command.spans)
        if command.recorded or self._after_recorded or lasting:
            self._add(command.row(perf_counter(), self._suspended()))
            if sample := self._clock():
                names = ("at", "offset", "error")
                self._add({n: round(x, 6) for n, x in zip(names, sample, strict=True)})

    def _add(self, row: Row) -> None:
        if self._is_broken:
            return
        try:
            if self._rows is None:
                self._path.parent.mkdir(exist_ok=True)
                self._rows = Rows(self._path)
                self._rows.add(self._start)
            self._rows.add(row)
        except (OSError, UnreadableFile) as error:
            self._is_broken = True
            self._note(f"the timeline is not recorded any more: {error}")

    def close(self) -> None:
        """Close the file."""
        if self._rows is not None:
            self._rows.close()
            self._rows = None
