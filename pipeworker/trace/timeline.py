"""The timeline of a run: what its workers did and when, read from the rows they have recorded."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeworker.errors import ScheduleError, UnreadableFile
from pipeworker.plan.actions import Action, parse_actions
from pipeworker.plan.placement import held_text
from pipeworker.record.files.bounded_file import load_json
from pipeworker.record.metrics.rows import read_lines
from pipeworker.record.rundir import RunDir
from pipeworker.trace.recorder import seconds

LAST = 200
"""Commands of each worker that are read if no steps are asked for."""
_STEP = re.compile(rb'\{"step": (\d{1,12})[,}]')
_TIMES = b'"times": '
_MOST_SECONDS = 1e15
_FILE = re.compile(r"worker-(\d{1,6})\.jsonl", re.ASCII)


class ActionSpan(NamedTuple):
    """The time of an action, in seconds; `end` is None for one that a worker died in."""

    action: Action
    begin: float
    end: float | None


class Span(NamedTuple):
    """The time of something else that a worker did, in seconds."""

    name: str
    begin: float
    end: float


class ClockSample(NamedTuple):
    """A measurement of a worker's clock, at a time that it showed.

    Attributes:
        offset: seconds by which it was behind the coordinator's.
        error: how much more or less it may have been.
    """

    at: float
    offset: float
    error: float


@dataclass(frozen=True, slots=True)
class Command:
    """The reaction of a worker to one command of the coordinator.

    Attributes:
        step: the step of the command, or the last one before it.
        first: the number of the mini-batch's first micro-batch within the step.
        received, answered: when the command arrived, and when its answer was on its way; None
            if the worker died.
        spans: what is no action, such as the update, in order.
        actions: those of a mini-batch, in order; empty if they were not recorded.
        memory: the bytes that the worker used behind each action; empty if they are not known.
        suspended: for how many seconds of it the worker's process was suspended.
    """

    step: int
    first: int
    received: float
    answered: float | None
    spans: tuple[Span, ...] = ()
    actions: tuple[ActionSpan, ...] = ()
    memory: tuple[int, ...] = ()
    suspended: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """A worker's process, from the time it was connected, and what it did.

    Attributes:
        rank, replica, stages: what the worker was.
        attempt: equal for all workers of a command that began or resumed the run.
        generation: how many generations of workers there have been, with this one.
        clock: equal for processes whose clocks show the same.
        now, time: a moment on its clock, and the same in seconds since 1970.
        samples: measurements of its clock, in order.
        began: when its first command arrived, which need not be among `commands`.
    """

    rank: int
    replica: int
    stages: tuple[int, ...]
    attempt: str
    generation: int
    host: str
    clock: str
    now: float
    time: float
    commands: tuple[Command, ...]
    samples: tuple[ClockSample, ...] = ()
    began: float = math.inf

    @property
    def name(self) -> str:
        """The worker's name for people: ``worker 3: stage 1 of replica 1``."""
        replica = f" of replica {self.replica}" if self.replica else ""
        return f"worker {self.rank}: {held_text(self.stages)}{replica}"


class _Start(msgspec.Struct, rename={"rank": "worker"}):
    rank: int
    replica: int
    stages: str
    attempt: str
    generation: int
    host: str
    clock: str
    now: float
    time: float


class _Program(msgspec.Struct):
    program: int
    actions: str


class _Times(msgspec.Struct):
    step: int
    received: float | None = None
    answered: float | None = None
    spans: list[tuple[str, int, int]] = []
    first: int = 0
    program: int = 0
    began: float = 0.0
    times: list[int] = []
    memory: list[int] = []
    suspended: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The records of a run since it was last resumed.

    Attributes:
        lives: by rank and then in order, with the commands that were asked for.
        recorded: all steps whose actions are recorded, ascending.
    """

    lives: tuple[WorkerLife, ...] = ()
    recorded: tuple[int, ...] = ()


@dataclass(slots=True)
class _Life:
    """The lines of use of one process of a worker; commands are not parsed."""

    start: _Start
    commands: deque[tuple[int, bytes]]
    programs: dict[int, tuple[Action, ...]] = field(default_factory=dict)
    samples: list[ClockSample] = field(default_factory=list)
    first: tuple[int, bytes] | None = None
    recorded: set[int] = field(default_factory=set)


def read_timeline(run_dir: RunDir, steps: range | None = None) -> Timeline:
    """Return what is recorded of a run: of some `steps`, or of the last commands of each worker.

    Raises:
        UnreadableFile: a file of the timeline is not what a worker writes.
        OSError: a file cannot be opened now.
    """
    try:
        names = sorted(path.name for path in run_dir.timeline.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return Timeline()
    except OSError as error:
        raise UnreadableFile(run_dir.timeline, error) from None
    ranks = sorted(int(found[1]) for name in names if (found := _FILE.fullmatch(name)))
    every: list[tuple[Path, _Life]] = []
    for rank in ranks:
        path = run_dir.worker_timeline(rank)
        every += [(path, life) for life in _lives(path, steps)]
    last = max((life.start for _, life in every), key=lambda start: start.time, default=None)
    of_last = [(p, life) for p, life in every if last and life.start.attempt == last.attempt]
    recorded = set[int]().union(*(life.recorded for _, life in of_last))
    return Timeline(tuple(_parsed(*pair) for pair in of_last), tuple(sorted(recorded)))


def _lives(path: Path, steps: range | None) -> Iterator[_Life]:
    """Yield the lives in a file; only what all rows need is parsed, for there may be many."""
    life: _Life | None = None
    for number, line in enumerate(read_lines(path), 1):
        if not line.endswith(b"\n"):
            break  # it is being written, or its writer was killed
        step = _STEP.match(line)
        if step and life:
            if _TIMES in line:
                life.recorded.add(int(step[1]))
            life.first = life.first or (number, line)
            if steps is None or int(step[1]) in steps:
                life.commands.append((number, line))
            continue
        with _readable(path, number):
            row = load_json(line)
            if "worker" in row:
                if life:
                    yield life
                kept = LAST if steps is None else None
                life = _Life(msgspec.convert(row, _Start), deque(maxlen=kept))
            elif life and "actions" in row:
                program = msgspec.convert(row, _Program)
                life.programs[program.program] = tuple(parse_actions(program.actions))
            elif life and "offset" in row:
                figures = [row[name] for name in ClockSample._fields]
                life.samples.append(msgspec.convert(figures, ClockSample))
                _check_finite(*life.samples[-1])
            else:
                raise ValueError("it has no known field")
    if life:
        yield life


@contextmanager
def _readable(path: Path, number: int) -> Iterator[None]:
    """Take an error for a line that no worker has written."""
    wrong = (ArithmeticError, ValueError, TypeError, LookupError, RecursionError, ScheduleError)
    try:
        yield
    except wrong as error:
        reason = f"line {number} is not what a worker records ({error!s:.200})"
        raise UnreadableFile(path, reason, "remove the line") from None


def _parsed(path: Path, life: _Life) -> WorkerLife:
    def command(number: int, line: bytes) -> Command:
        with _readable(path, number):
            return _command(msgspec.convert(load_json(line), _Times), life.programs)

    start, commands = life.start, tuple(command(*row) for row in life.commands)
    began = command(*life.first).received if life.first else math.inf
    with _readable(path, 1):
        stages = tuple(map(int, start.stages.split()))
        if path.name != f"worker-{start.rank}.jsonl":
            raise ValueError("it is of another worker")
        _check_finite(start.now, start.time)
        if not all(span.action.stage in stages for c in commands for span in c.actions):
            raise ValueError("the worker does not hold the stages of its actions")
    facts = msgspec.structs.asdict(start) | {"stages": stages}
    return WorkerLife(**facts, commands=commands, samples=tuple(life.samples), began=began)


def _check_finite(*numbers: float | None) -> None:
    if not all(number is None or abs(number) < _MOST_SECONDS for number in numbers):
        raise ValueError("a time is not a number of seconds")


def _command(row: _Times, programs: dict[int, tuple[Action, ...]]) -> Command:
    received = row.began if row.received is None else row.received
    _check_finite(received, row.answered, row.began, row.suspended)
    lasted = [*row.times[1::2], *(took for _, _, took in row.spans)]
    if min(lasted, default=0) < 0 or (row.answered is not None and row.answered < received):
        raise ValueError("something ends before it begins")
    spans = tuple(Span(name, *seconds(received, [begin, took])) for name, begin, took in row.spans)
    actions: tuple[ActionSpan, ...] = ()
    if row.times:
        times = seconds(row.began, row.times)
        ends = [*times[1::2], *([None] if len(times) % 2 else [])]
        named = programs[row.program][: len(ends)]
        actions = tuple(map(ActionSpan, named, times[::2], ends))
    memory = tuple(1024 * kib for kib in accumulate(row.memory[: len(actions)]))
    lost = max(0.0, row.suspended)
    return Command(row.step, row.first, received, row.answered, spans, actions, memory, lost)
