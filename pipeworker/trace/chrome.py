"""A timeline in Chrome's trace format, which Perfetto and ``chrome://tracing`` open. Pure.

A process is a worker, in each of its lives. Slices nest: a step has its actions, and what came
before them. A transfer is an asynchronous event from its send to its receive, and a flow binds the
two slices. A counter shows the micro-batches that a worker holds. The format is that of Chromium's
"Trace Event Format"; times are microseconds from the first moment of the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipeworker.plan.actions import RECEIVES, SENDS, WEIGHTS, Edge, Kind, edge_of
from pipeworker.trace.timeline import ActionSpan, Command, WorkerLife

Event = dict[str, Any]
_NAMES = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward of the input",
    Kind.BACKWARD_WEIGHT: "backward of the weights",
    Kind.LOAD: "data",
    Kind.FETCH: "fetch",
}
_COLORS = {
    "forward": "thread_state_running",
    "recompute": "thread_state_runnable",
    "backward": "rail_response",
    "backward of the input": "rail_response",
    "backward of the weights": "rail_animation",
    "data": "rail_load",
}
Key = tuple[int, int, int, int, Edge, int]
"""A frame: generation, replica, step, first micro-batch, channel, number."""


def events(lives: Sequence[WorkerLife], steps: range | None = None) -> list[Event]:
    """Return the events of a timeline, in order of time; of some `steps`, or of all."""
    chosen = [
        (life, [c for c in life.commands if steps is None or c.step in steps]) for life in lives
    ]
    moments = [command.received for _, commands in chosen for command in commands]
    if not moments:
        return []
    zero = min(moments)
    found: list[Event] = []
    sent: dict[Key, tuple[ActionSpan, int]] = {}
    received: dict[Key, tuple[ActionSpan, int]] = {}
    names = _numbered(lives)
    for life, commands in chosen:
        pid = names[life.rank, life.generation]
        found += _process(life, pid)
        for command in commands:
            found += _slices(command, pid, zero)
            for span in command.actions:
                if span.action.kind in SENDS or span.action.kind in RECEIVES:
                    frames = sent if span.action.kind in SENDS else received
                    place = life.generation, life.replica, command.step, command.first
                    key = (*place, edge_of(span.action), span.action.microbatch)
                    frames[key] = span, pid
        found += _live(commands, pid, zero)
    found += _transfers(sent, received, zero)
    return sorted(found, key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))


def by_host(lives: Sequence[WorkerLife], found: Sequence[Event]) -> dict[str, list[Event]]:
    """Divide the events of lives by the host whose worker they are of."""
    names = _numbered(lives)
    hosts = {names[life.rank, life.generation]: life.host for life in lives}
    divided: dict[str, list[Event]] = {life.host: [] for life in lives}
    for event in found:
        divided[hosts[event["pid"]]].append(event)
    return divided


def _numbered(lives: Sequence[WorkerLife]) -> dict[tuple[int, int], int]:
    """Return the numbers of the processes, by rank and generation."""
    keys = sorted({(life.rank, life.generation) for life in lives})
    return {key: number for number, key in enumerate(keys, 1)}


def _process(life: WorkerLife, pid: int) -> Iterator[Event]:
    stages = f"stage{'s' * (len(life.stages) > 1)} {', '.join(map(str, life.stages))}"
    name = f"worker {life.rank}: {stages}"
    if life.replica:
        name += f" of replica {life.replica}"
    if life.generation > 1:
        name += f", generation {life.generation}"
    for kind, args in (
        ("process_name", {"name": name}),
        ("process_labels", {"labels": life.host}),
        ("process_sort_index", {"sort_index": pid}),
    ):
        yield {"ph": "M", "pid": pid, "tid": 1, "name": kind, "args": args}
    yield {"ph": "M", "pid": pid, "tid": 1, "name": "thread_name", "args": {"name": "actions"}}


def _slices(command: Command, pid: int, zero: float) -> Iterator[Event]:
    ends = [span.end or span.begin for span in command.actions]
    end = max([command.received, command.answered or 0.0, *ends])
    where = {"pid": pid, "tid": 1}
    step = {"step": command.step}
    whole = f"step {command.step}" if command.actions else f"after step {command.step}"
    yield {**where, "ph": "X", "name": whole, **_times(command.received, end, zero), "args": step}
    for span in command.spans:
        yield {**where, "ph": "X", "name": span.name, **_times(span.begin, span.end, zero)}
    for action, begin, ended in command.actions:
        name = _NAMES.get(action.kind, "")
        args = {**step, "stage": action.stage, "microbatch": command.first + action.microbatch}
        if ended is None:
            args["died"] = True
        event = {**where, "ph": "X", "name": str(action), "args": args}
        event |= _times(begin, end if ended is None else ended, zero)
        if name:
            event["cat"] = name
            if name in _COLORS:
                event["cname"] = _COLORS[name]
        yield event


def _live(commands: Iterable[Command], pid: int, zero: float) -> Iterator[Event]:
    """Yield how many micro-batches have begun their forward and not ended their backward."""
    for command in commands:
        count = 0
        for action, begin, end in command.actions:
            change = 0
            if action.kind is Kind.FORWARD:
                change, at = 1, begin
            elif action.kind in WEIGHTS and end is not None:
                change, at = -1, end
            if change:
                count += change
                args = {"micro-batches": count}
                yield {"ph": "C", "pid": pid, "name": "live", "ts": _at(at, zero), "args": args}


def _transfers(
    sent: dict[Key, tuple[ActionSpan, int]],
    received: dict[Key, tuple[ActionSpan, int]],
    zero: float,
) -> Iterator[Event]:
    for number, (key, (source, pid)) in enumerate(sent.items(), 1):
        if key not in received:
            continue
        target, other = received[key]
        if target.end is None or source.end is None:
            continue
        *_, edge, microbatch = key
        name = str(edge)
        event = {"cat": "transfer", "name": name, "id": number, "pid": pid, "tid": 1}
        args = {"microbatch": microbatch}
        yield {**event, "ph": "b", "ts": _at(source.begin, zero), "args": args}
        yield {**event, "ph": "e", "ts": _at(max(target.end, source.begin), zero)}
        flow = {"cat": "transfer", "name": name, "id": number, "tid": 1}
        yield {**flow, "ph": "s", "pid": pid, "ts": _at(source.begin, zero)}
        waits = max(source.begin, target.begin)  # a moment within the receive
        yield {**flow, "ph": "f", "bp": "e", "pid": other, "ts": _at(waits, zero)}


def _at(moment: float, zero: float) -> float:
    return round((moment - zero) * 1e6, 3)


def _times(begin: float, end: float, zero: float) -> Event:
    at = _at(begin, zero)
    return {"ts": at, "dur": round(_at(end, zero) - at, 3)}
