"""A reader of the text form of schedules."""

from __future__ import annotations

import re

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import parse_actions
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Pairs, Schedule

_PAIR = r"\d{1,9}>\d{1,9}"
_PAIRS = rf"{_PAIR}(?:,{_PAIR})*"
_HEAD = re.compile(
    r"(?P<name>\S+) stages=(?P<stages>[1-9]\d{0,8}) microbatches=(?P<microbatches>0|[1-9]\d{0,8})"
    r"(?: placement=(?P<placement>\d{1,9}(?:[,/]\d{1,9})*))?(?: replicas=(?P<replicas>\d{1,9}))?"
    rf"(?: skips=(?P<skips>{_PAIRS}))?(?: ties=(?P<ties>{_PAIRS}))?(?P<only> forward-only)?",
    re.ASCII,
)


def _pairs(text: str | None) -> Pairs:
    ends = [pair.split(">") for pair in text.split(",")] if text else []
    return tuple((int(source), int(target)) for source, target in ends)


def _placement(text: str | None, stages: int) -> Placement:
    if text is None:
        return Placement.identity(stages)
    held = tuple(tuple(map(int, part.split(","))) for part in text.split("/"))
    ascending = all(list(some) == sorted(some) for some in held)
    if not ascending or sorted(s for some in held for s in some) != list(range(stages)):
        raise ScheduleError(
            f"placement {text} does not hold each of {stages} stages once, ascending on each worker"
        )
    return Placement(held)


def parse(text: str) -> Schedule:
    """Read the text form of a schedule; raise ScheduleError if it is malformed."""
    head, _, body = text.strip().partition("\n")
    match = _HEAD.fullmatch(head.strip())
    if match is None:
        raise ScheduleError(f"{head!r} is not a schedule's head: NAME stages=K microbatches=M")
    replicas = int(match["replicas"] or 1)
    if replicas < 1 or int(match["microbatches"]) < (replicas == 1):
        raise ScheduleError(
            f"{head!r} is not a schedule's head: only one of several replicas may have "
            "no micro-batch"
        )
    placement = _placement(match["placement"], int(match["stages"])).copies(replicas)
    workers = []
    for worker, line in enumerate(line for line in body.splitlines() if line.strip()):
        label, _, actions = line.partition(":")
        if label.strip() != str(worker):
            raise ScheduleError(f"expected the line of worker {worker}, found {line!r}")
        workers.append(parse_actions(actions))
    if len(workers) != placement.workers:
        raise ScheduleError(
            f"the head has {placement.workers} workers, but {len(workers)} lines follow"
        )
    return Schedule(
        match["name"],
        int(match["microbatches"]),
        placement,
        tuple(workers),
        _pairs(match["skips"]),
        _pairs(match["ties"]),
        match["only"] is not None,
    )
