"""A job under observation: its output with times, and its processes."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pipeworker.record.rundir import RunDir
from support.faults.failpoints import VARIABLE, Failpoints
from support.processes import interpreter
from support.real_jobs.jobs import Jobs, Process, Record, processes_of, role_of, until

_TESTS = Path(__file__).parents[2]
_STEP = re.compile(r"step (\d+)(?:/\d+)?  loss")


@dataclass(frozen=True)
class Line:
    """A line of the launcher's output; `when` is by the monotonic clock."""

    when: float
    text: str

    @property
    def step(self) -> int:
        """The step that the line reports; 0 if it reports none."""
        found = _STEP.match(self.text)
        return int(found[1]) if found else 0


@dataclass
class ObservedJob:
    """One run, which several launchers in turn may start and resume."""

    jobs: Jobs
    source: str
    words: tuple[str, ...]
    lines: list[Line] = field(default_factory=list)
    path: Path = field(init=False)
    process: Process = field(init=False)
    failpoints: Failpoints = field(init=False)
    _readers: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        folder = self.jobs.folder / "failpoints"
        folder.mkdir()
        self.failpoints = Failpoints(folder)

    def start(self, *words: str) -> None:
        self.path = self._start(*self.words, *words)

    def resume(self, *words: str) -> None:
        """Resume the run after its launcher has ended."""
        self._start("--resume", "--run-dir", str(self.path), *words)

    def _start(self, *words: str) -> Path:
        ours = [str(Path(__file__).with_name("preload")), str(_TESTS)]
        env = {
            **os.environ,
            VARIABLE: str(self.failpoints.folder),
            interpreter.PRELOAD: "support.faults.failpoints",
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
        """Wait until no process of the job is left; return the launcher's exit status."""
        status = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
        until(lambda: not processes_of(self.jobs.folder), seconds)
        return status

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> Any:
        """Poll until `condition` is true while the job runs; return its value."""
        number = len(self.lines)

        def tried() -> Any:
            ended = self.process.poll()
            value = condition()
            assert value or ended is None, f"the launcher has exited with {ended}"
            return value

        try:
            return until(tried, seconds)
        except AssertionError as error:
            texts = [line.text for line in self.lines[number:] if not line.step]
            raise AssertionError("\n".join([f"{error}; at step {self.step}", *texts])) from None

    def find_line(self, number: int, *parts: str) -> Line | None:
        """Return the first line from index `number` on that contains all parts, or None."""
        for line in self.lines[number:]:
            if all(part in line.text for part in parts):
                return line
        return None

    def wait_for_line(self, number: int, *parts: str) -> Line:
        """Wait for the first line from index `number` on that contains all parts; return it."""
        found: Line = self.until(lambda: self.find_line(number, *parts))
        return found

    @property
    def step(self) -> int:
        """The last completed step."""
        return next((line.step for line in reversed(self.lines) if line.step), 0)

    def last_step(self, line: Line) -> Line:
        """Return the line of the last step before a line."""
        before = self.lines[: self.lines.index(line)]
        return next(one for one in reversed(before) if one.step)

    def next_step(self, line: Line) -> Line:
        """Wait for the first step after a line, and return its line."""
        number = self.lines.index(line)
        done: Line = self.until(
            lambda: next((one for one in self.lines[number:] if one.step), None)
        )
        return done

    @property
    def plan(self) -> dict[str, Any]:
        """The last plan; empty before there is one."""
        path = self.path / "plan.json"
        loaded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return loaded

    @property
    def saved(self) -> int:
        """The step of the last checkpoint."""
        return RunDir(self.path).checkpoints.last_step()

    @property
    def pids(self) -> dict[str, int]:
        """The processes: launcher, coordinator, agent, hooks if any, and workers as ``stage 1``.

        Those that read data are called ``reader 123`` by their pids.

        Workers of replicas after the first are ``stage 1 of replica 2``.
        """
        found = {}
        for stage in self.plan["stages"]:
            replica = f" of replica {stage['replica']}" if stage.get("replica") else ""
            found[f"stage {stage['stage']}{replica}"] = stage["pid"]
        workers = {*found.values()}
        found["launcher"] = self.process.pid
        for pid, line in processes_of(self.jobs.folder).items():
            if pid in workers or _group(pid) != pid:
                continue
            role = role_of(line)
            if role == "reader":
                found[f"reader {pid}"] = pid
            elif role not in ("", "watcher"):  # which ends with its agent
                found[role] = pid
        return found

    def leftovers(self) -> list[str]:
        """Return processes that no longer belong to the job, and unfinished checkpoints."""
        pids = self.pids
        readers = [name for name in pids if name.startswith("reader")]
        if len(readers) > sum(stage["stage"] == 0 for stage in self.plan["stages"]):
            return readers
        own = {0, *pids.values()}
        found = processes_of(self.jobs.folder).items()
        processes = [
            f"{pid}: {line}"
            for pid, line in found
            if not {pid, _group(pid)} & own and role_of(line) != "watcher"
        ]
        return [*processes, *map(str, RunDir(self.path).checkpoints.path.glob(".*"))]

    @property
    def run(self) -> Record:
        """The run as it is on disk."""
        return Record(self.path)


def _group(pid: int) -> int:
    """Return the process group, which has the number of the process that started it."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
