"""Reads schedules from their text form: that of ``str(schedule)``, with comments and blank lines.

A job's own schedule (``--schedule FILE``) consists of *compute* actions alone::

    mine stages=2 microbatches=3
    0: 0F0 0F1 0B0 0F2 0B1 0B2      # one line for each worker
    1: 1F0 1B0 1F1 1B1 1F2 1B2

Sends, receives and the loading of data are placed by :mod:`pipeworker.plan.connect`. They may be in
the text, as ``plan.json`` of a run has them, if they are where ``connect`` places them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import COMPUTE, Action, Kind, parse_actions
from pipeworker.plan.connect import connect
from pipeworker.plan.figures import plural
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Pairs, Schedule

_PAIR = r"\d{1,9}>\d{1,9}"
_PAIRS = rf"{_PAIR}(?:,{_PAIR})*"
_HEAD = re.compile(
    r"(?P<name>\S+) +stages=(?P<stages>[1-9]\d{0,8}) +microbatches=(?P<microbatches>0|[1-9]\d{0,8})"
    r"(?: +placement=(?P<placement>\d{1,9}(?:[,/]\d{1,9})*))?(?: +replicas=(?P<replicas>\d{1,9}))?"
    rf"(?: +skips=(?P<skips>{_PAIRS}))?(?: +ties=(?P<ties>{_PAIRS}))?"
    r"(?: +frozen=(?P<frozen>\d{1,9}(?:,\d{1,9})*))?(?P<only> +forward-only)?",
    re.ASCII,
)
_LINE = re.compile(r"\s*(\d{1,9})\s*:(.*)", re.ASCII)
_WORD = re.compile(r"\S+")
_AS = "NAME stages=4 microbatches=8, and placement=0,3/1,2 if worker 0 holds stages 0 and 3"


def is_text(schedule: str) -> bool:
    """Return whether a value of ``--schedule`` is the text of a schedule, rather than a name."""
    return "\n" in schedule


def name_of(schedule: str) -> str:
    """Return the name of a schedule, whether `schedule` is that name or its text."""
    return schedule.split(maxsplit=1)[0] if is_text(schedule) else schedule


def parse(text: str) -> Schedule:
    """Read the text form of a schedule, which is not checked yet.

    Raises:
        ScheduleError: it is malformed; the message has the line and the column.
    """
    lines = _lines(text)
    number, head = next(lines, (1, ""))
    match = _HEAD.fullmatch(head.strip())
    if match is None:
        raise ScheduleError(f"line {number}: {head!r} is not a schedule's head; write {_AS}")
    replicas = int(match["replicas"] or 1)
    if replicas < 1 or int(match["microbatches"]) < (replicas == 1):
        raise ScheduleError(
            f"line {number}: {head!r} is not a schedule's head: only one of several replicas may "
            "have no micro-batch"
        )
    head_number = number
    workers: list[tuple[Action, ...]] = []
    for number, line in lines:
        found = _LINE.fullmatch(line)
        if found is None or int(found[1]) != len(workers):
            raise ScheduleError(
                f"line {number}: expected the line of worker {len(workers)}, found {line!r}; write "
                f"{len(workers)}: and its actions"
            )
        workers.append(_actions(found[2], number, found.start(2)))
    stages, microbatches = int(match["stages"]), int(match["microbatches"])
    held = match["placement"]
    # What the head claims may be of any size, and its lines are not.
    expected = stages if held is None else 1 + held.count("/")
    if len(workers) != expected:
        raise ScheduleError(
            f"line {number}: the head has {plural(expected, 'worker')}, but "
            f"{plural(len(workers), 'line')} follow{'s' * (len(workers) == 1)}; write one for each "
            "worker"
        )
    placement = _placement(held, stages, head_number).copies(replicas)
    if microbatches > (count := sum(map(len, workers))):
        raise ScheduleError(
            f"line {head_number}: the head has {plural(microbatches, 'micro-batch')}, but all "
            f"workers have {plural(count, 'action')} together; write those of every micro-batch"
        )
    return Schedule(
        match["name"],
        microbatches,
        placement,
        tuple(workers),
        _pairs(match["skips"]),
        _pairs(match["ties"]),
        match["only"] is not None,
        tuple(map(int, match["frozen"].split(","))) if match["frozen"] else (),
    )


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, without comments, and their numbers."""
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].rstrip()
        if content:
            yield number, content


def _actions(text: str, number: int, before: int) -> tuple[Action, ...]:
    """Read a worker's actions, which begin behind `before` characters of line `number`."""
    try:
        return parse_actions(text)
    except ScheduleError:
        for word in _WORD.finditer(text):
            try:
                parse_actions(word[0])
            except ScheduleError as error:
                column = before + word.start() + 1
                raise ScheduleError(f"line {number}, column {column}: {error}") from None
        raise


def _pairs(text: str | None) -> Pairs:
    ends = [pair.split(">") for pair in text.split(",")] if text else []
    return tuple((int(source), int(target)) for source, target in ends)


def _placement(text: str | None, stages: int, number: int) -> Placement:
    if text is None:
        return Placement.identity(stages)
    held = tuple(tuple(map(int, part.split(","))) for part in text.split("/"))
    ascending = all(list(some) == sorted(some) for some in held)
    every = sorted(s for some in held for s in some)
    if not ascending or len(every) != stages or every != list(range(stages)):
        raise ScheduleError(
            f"line {number}: placement {text} does not hold each of {stages} stages once, "
            "ascending on each worker"
        )
    return Placement(held)


def compute_order(schedule: Schedule) -> Schedule:
    """Return a schedule with its compute actions alone, for one replica, as a file names it.

    Raises:
        ScheduleError: it has no backward, actions of other stages than the worker's, or other
            actions that are not where `connect` places them.
    """
    if schedule.forward_only:
        raise ScheduleError("it is forward-only; leave that out, and write the backwards")
    for worker, (actions, held) in enumerate(
        zip(schedule.workers, schedule.placement.held, strict=True)
    ):
        if stray := next((action for action in actions if action.stage not in held), None):
            raise ScheduleError(
                f"worker {worker}: {stray} is of a stage it does not hold; it holds "
                f"{', '.join(map(str, held))}"
            )
    computed = tuple(
        tuple(action for action in actions if action.kind in COMPUTE)
        for actions in schedule.workers
    )
    if sum(map(len, computed)) < sum(map(len, schedule.workers)):
        _check_connections(schedule)
    return replace(
        schedule,
        placement=schedule.placement.copies(1),
        workers=computed,
        skips=(),
        ties=(),
        frozen=(),
    )


def _check_connections(schedule: Schedule) -> None:
    """Check that all actions which do not compute are where `connect` places them."""
    fetches = (*COMPUTE, Kind.FETCH)
    orders = [[a for a in actions if a.kind in fetches] for actions in schedule.workers]
    placed = connect(
        schedule.name,
        schedule.microbatches,
        schedule.placement,
        orders,
        schedule.skips,
        schedule.ties,
        schedule.frozen,
    )
    for worker, (given, wanted) in enumerate(zip(schedule.workers, placed.workers, strict=True)):
        if given == wanted:
            continue
        same = next(
            (i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b),
            min(len(given), len(wanted)),
        )
        found = given[same] if same < len(given) else "the end of the line"
        expected = wanted[same] if same < len(wanted) else "the end of the line"
        raise ScheduleError(
            f"worker {worker}: {found} stands where pipeworker places {expected}; leave out sends, "
            "receives and loads, which are added"
        )


def format_compute(schedule: Schedule, name: str) -> str:
    """Return the text of a schedule's compute actions under another name, as a file has it."""
    return f"{replace(compute_order(schedule), name=name)}\n"


def without(actions: tuple[Action, ...], microbatches: int) -> list[Action]:
    """Return the actions of the first micro-batches alone.

    If the whole order can run without deadlock, so can this one: each wait of the shorter order is
    implied by waits of the whole one.
    """
    return [action for action in actions if action.microbatch < microbatches]
