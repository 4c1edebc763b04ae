"""A job that faults are done to: what it says and when, who belongs to it, what they hold."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from pipeworker.record.rundir import RunDir
from support import interpreter
from support.jobs import Jobs, Process, Run, processes_of, until
from support.memory import resident
from support.traps import VARIABLE, Traps

_TESTS = Path(__file__).parents[1]
_STEP = re.compile(r"step (\d+)(?:/\d+)?  loss")


@dataclass(frozen=True)
class Line:
    """What the launcher has said; `when` by the monotonic clock."""

    when: float
    text: str

    @property
    def step(self) -> int:
        """That is done, if it says so; else 0."""
        found = _STEP.match(self.text)
        return int(found[1]) if found else 0


@dataclass
class Besieged:
    """One run, begun and gone on with by as many launchers as it takes."""

    jobs: Jobs
    source: str
    words: tuple[str, ...]
    lines: list[Line] = field(default_factory=list)
    path: Path = field(init=False)
    process: Process = field(init=False)
    traps: Traps = field(init=False)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = self.jobs.folder / "traps"
        folder.mkdir()
        self.traps = Traps(folder)

    def start(self, *words: str) -> None:
        self.path = self._start(*self.words, *words)

    def resume(self, *words: str) -> None:
        """Go on with the run, whose launcher is gone."""
        self._start("--resume", "--run-dir", str(self.path), *words)

    def _start(self, *words: str) -> Path:
        ours = [str(_TESTS / "support" / "preload"), str(_TESTS)]
        env = {
            **os.environ,
            VARIABLE: str(self.traps.folder),
            interpreter.PRELOAD: "support.traps",
            "PYTHONPATH": os.pathsep.join([*ours, os.environ.get("PYTHONPATH", "")]),
        }
        every = ("--log-every", "1")
        self.process, path = self.jobs.start(*every, *words, source=self.source, env=env)
        self._readers = []
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            reader = threading.Thread(target=self._read, args=(stream,), daemon=True)
            reader.start()
            self._readers.append(reader)
        return path

    def _read(self, stream: IO[str]) -> None:
        for text in stream:
            self.lines.append(Line(time.monotonic(), text.rstrip()))

    def end(self, seconds: float = 60.0) -> int:
        """Wait until nothing of the job is left; returns the launcher's status."""
        status = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
        until(lambda: not processes_of(self.jobs.folder), seconds)
        return status

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Poll until `condition` is true, of a job that goes on; returns its value."""
        number = len(self.lines)

        def tried() -> Any:
            ended = self.process.poll()
            value = condition()
            assert value or ended is None, f"it is over, with {ended}"
            return value

        try:
            return until(tried, seconds)
        except AssertionError as error:
            said = [line.text for line in self.lines[number:] if not line.step]
            raise AssertionError("\n".join([f"{error}; at step {self.step}", *said])) from None

    def since(self, number: int, *parts: str) -> Line | None:
        """The first line from this one on that has all of these."""
        for line in self.lines[number:]:
            if all(part in line.text for part in parts):
                return line
        return None

    def said(self, number: int, *parts: str) -> Line:
        """Wait for :meth:`since`."""
        found: Line = self.until(lambda: self.since(number, *parts))
        return found

    @property
    def step(self) -> int:
        """The last one that is done."""
        return next((line.step for line in reversed(self.lines) if line.step), 0)

    def last_step(self, line: Line) -> Line:
        """The last one that was done before a line."""
        before = self.lines[: self.lines.index(line)]
        return next(one for one in reversed(before) if one.step)

    def next_step(self, line: Line) -> Line:
        """The first one that is done behind a line."""
        number = self.lines.index(line)
        done: Line = self.until(
            lambda: next((one for one in self.lines[number:] if one.step), None)
        )
        return done

    @property
    def plan(self) -> dict[str, Any]:
        """The last one; empty before there is one."""
        path = self.path / "plan.json"
        loaded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return loaded

    @property
    def saved(self) -> int:
        """The step of the last checkpoint."""
        return RunDir(self.path).last_saved()

    @property
    def pids(self) -> dict[str, int]:
        """Of the launcher, the coordinator, the fork server, and ``stage 1`` as it was planned."""
        found = {f"stage {stage['stage']}": stage["pid"] for stage in self.plan["stages"]}
        workers = {*found.values()}
        found["launcher"] = self.process.pid
        for pid, line in processes_of(self.jobs.folder).items():
            if pid in workers or _group(pid) != pid:
                continue
            line = line.partition("support.server")[0]  # whose own has the names of all
            if line.startswith("coordinator\n") or "coordinator.service" in line:
                found["coordinator"] = pid
            elif line.startswith("forkserver\n") or "host.forkserver" in line:
                found["fork server"] = pid
        return found

    def strays(self) -> list[str]:
        """Processes of the job's folder that do not belong to it as it is now; unfinished files."""
        own = {0, *self.pids.values()}
        found = processes_of(self.jobs.folder).items()
        processes = [f"{pid}: {line}" for pid, line in found if not {pid, _group(pid)} & own]
        return [*processes, *map(str, RunDir(self.path).checkpoints.glob(".*"))]

    @property
    def run(self) -> Run:
        """What it has left behind."""
        return Run(self.process.returncode or 0, "", "", self.path)


def _group(pid: int) -> int:
    """Of processes: it is named by the one that began it, as each that belongs to a job does."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


class Held(NamedTuple):
    """What a process holds."""

    memory: int
    descriptors: int
    threads: int


def held(pid: int) -> Held:
    descriptors, threads = (
        len(list(Path(f"/proc/{pid}", what).iterdir())) for what in ("fd", "task")
    )
    return Held(resident(pid), descriptors, threads)
