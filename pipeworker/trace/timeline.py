"""The timeline of a run: what its workers did and when, read from the rows they have recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from pipeworker.errors import ScheduleError, UnreadableFile
from pipeworker.plan.actions import Action, parse_actions
from pipeworker.record.bounded_file import load_json
from pipeworker.record.metrics.rows import read_lines
from pipeworker.record.rundir import RunDir
from pipeworker.trace.recorder import seconds

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
    """What a worker did because of one command of the coordinator.

    Attributes:
        step: the step of the command, or the last one before it.
        first: the number of the mini-batch's first micro-batch within the step.
        received, answered: when the command arrived, and when its answer was on its way; None
            if the worker died.
        spans: what is no action, such as the update, in order.
        actions: those of a mini-batch, in order; empty if they were not recorded.
    """

    step: int
    first: int
    received: float
    answered: float | None
    spans: tuple[Span, ...] = ()
    actions: tuple[ActionSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """A worker's process, from the time it was connected, and what it did.

    Attributes:
        rank, replica, stages: what the worker was.
        attempt: equal for all workers of a command that began or resumed the run.
        generation: how many generations of workers there have been, with this one.
        host: the name of its host.
        clock: equal for processes whose clocks show the same.
        now, time: a moment on its clock, and the same in seconds since 1970.
        commands: in order.
        samples: measurements of its clock, in order.
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


class _Start(msgspec.Struct):
    worker: int
    stages: str
    replica: int
    attempt: str
    generation: int
    host: str
    clock: str
    now: float
    time: float


class _Program(msgspec.Struct):
    program: int
    actions: str


class _Clock(msgspec.Struct):
    at: float
    offset: float
    error: float


class _Times(msgspec.Struct):
    step: int
    received: float | None = None
    answered: float | None = None
    spans: list[tuple[str, int, int]] = []
    first: int = 0
    program: int = 0
    began: float = 0.0
    times: list[int] = []


def read_timeline(run_dir: RunDir) -> tuple[WorkerLife, ...]:
    """Return the lives of a run's workers since it was last resumed, by rank and then in order.

    Raises:
        UnreadableFile: a file of the timeline is not what a worker writes.
    """
    lives: list[WorkerLife] = []
    try:
        names = sorted(path.name for path in run_dir.timeline.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise UnreadableFile(run_dir.timeline, error) from None
    ranks = sorted(int(found[1]) for name in names if (found := _FILE.fullmatch(name)))
    for rank in ranks:
        lives += _lives(run_dir.worker_timeline(rank))
    last = max(lives, key=lambda life: life.time, default=None)
    return tuple(life for life in lives if last and life.attempt == last.attempt)


def _lives(path: Path) -> Iterator[WorkerLife]:
    start: _Start | None = None
    commands: list[Command] = []
    samples: list[ClockSample] = []
    programs: dict[int, tuple[Action, ...]] = {}
    for number, line in enumerate(read_lines(path), 1):
        if not line.endswith(b"\n"):
            break  # it is being written, or its writer was killed
        try:
            row = load_json(line)
            if "worker" in row:
                if start is not None:
                    yield _life(start, commands, samples)
                start, commands, samples, programs = msgspec.convert(row, _Start), [], [], {}
            elif "actions" in row:
                program = msgspec.convert(row, _Program)
                programs[program.program] = tuple(parse_actions(program.actions))
            elif "offset" in row:
                clock = msgspec.convert(row, _Clock)
                samples.append(ClockSample(clock.at, clock.offset, clock.error))
            else:
                commands.append(_command(msgspec.convert(row, _Times), programs))
        except (ValueError, TypeError, RecursionError, KeyError, ScheduleError) as error:
            reason = f"line {number} is not what a worker records ({error!s:.200})"
            raise UnreadableFile(path, reason, "remove the line") from None
    if start is not None:
        yield _life(start, commands, samples)


def _life(start: _Start, commands: list[Command], samples: list[ClockSample]) -> WorkerLife:
    return WorkerLife(
        start.worker,
        start.replica,
        tuple(map(int, start.stages.split())),
        start.attempt,
        start.generation,
        start.host,
        start.clock,
        start.now,
        start.time,
        tuple(commands),
        tuple(samples),
    )


def _command(row: _Times, programs: dict[int, tuple[Action, ...]]) -> Command:
    received = row.began if row.received is None else row.received
    spans = tuple(Span(name, *seconds(received, [begin, took])) for name, begin, took in row.spans)
    actions: tuple[ActionSpan, ...] = ()
    if row.times:
        times = seconds(row.began, row.times)
        ends = [*times[1::2], *([None] if len(times) % 2 else [])]
        named = programs[row.program][: len(ends)]
        actions = tuple(map(ActionSpan, named, times[::2], ends))
    return Command(row.step, row.first, received, row.answered, spans, actions)
