"""A timeline in Chrome's trace format, which Perfetto and ``chrome://tracing`` open. Pure.

A process is a worker, in each of its lives. Slices nest: a step has its actions, and what came
before them. A transfer is an asynchronous event from its send to its receive, and a flow binds the
two slices. Counters show the micro-batches that a worker holds, the bytes that it keeps of them for
their backward, and its memory. Recoveries are slices of a process of their own, and so is, for each
worker, the step that was planned. The format is that of Chromium's "Trace Event Format"; times are
microseconds from the first moment of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeworker.plan import simulate
from pipeworker.plan.actions import RECEIVES, SENDS, WEIGHTS, Edge, Kind, edge_of
from pipeworker.trace.mini_batches import recoveries
from pipeworker.trace.recorder import EVALUATION, SAVE
from pipeworker.trace.timeline import ActionSpan, Command, WorkerLife

Event = dict[str, Any]
_DRAWN: dict[Kind, Event] = {
    Kind.FORWARD: {"cat": "forward", "cname": "thread_state_running"},
    Kind.RECOMPUTE: {"cat": "recompute", "cname": "thread_state_runnable"},
    Kind.BACKWARD: {"cat": "backward", "cname": "rail_response"},
    Kind.BACKWARD_INPUT: {"cat": "backward of the input", "cname": "rail_response"},
    Kind.BACKWARD_WEIGHT: {"cat": "backward of the weights", "cname": "rail_animation"},
    Kind.LOAD: {"cat": "data", "cname": "rail_load"},
    Kind.FETCH: {"cat": "fetch"},
}
"""The category and the colour of actions that compute or read data."""
_RUN, _PLANNED = 0, 1_000_000
"""Processes of the trace that are no workers: the run, and the planned steps of worker 0, 1, ..."""
Key = tuple[int, int, int, int, Edge, int]
"""A frame: generation, replica, step, first micro-batch, channel, number."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The planned actions of a run.

    Attributes:
        spans: the simulated actions of a step, by worker of a replica.
        graphs: the bytes that a stage keeps of a micro-batch for its backward, by stage.
    """

    spans: Sequence[Sequence[simulate.Span]] = ()
    graphs: Mapping[int, int] = field(default_factory=dict)


def events(
    lives: Sequence[WorkerLife], steps: range | None = None, plan: Plan | None = None
) -> list[Event]:
    """Return the events of a timeline, in order of time; of some `steps`, or of all."""
    plan = plan or Plan()
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
        generation = f", generation {life.generation}" if life.generation > 1 else ""
        found += _named(pid, f"{life.name}{generation}", life.host)
        for command in commands:
            found += _slices(command, pid, zero)
            for span in command.actions:
                if span.action.kind in SENDS or span.action.kind in RECEIVES:
                    frames = sent if span.action.kind in SENDS else received
                    place = life.generation, life.replica, command.step, command.first
                    key = (*place, edge_of(span.action), span.action.microbatch)
                    frames[key] = span, pid
        found += _counters(commands, pid, zero, plan.graphs)
    found += _transfers(sent, received, zero)
    found += _recoveries(lives, zero, max(moments))
    found += _planned([commands for _, commands in chosen], plan, zero)
    return sorted(found, key=lambda event: (event.get("ts", -1.0), -event.get("dur", 0.0)))


def _recoveries(lives: Sequence[WorkerLife], first: float, last: float) -> Iterator[Event]:
    """Yield the times between generations of workers that overlap the trace."""
    found = [one for one in recoveries(lives) if first <= one[2] and one[1] <= last]
    if found:
        yield from _named(_RUN, "run", "recoveries")
    for (_, generation), begin, end in found:
        args = {"generation": generation}
        yield _slice(_RUN, "recovery", max(begin, first), end, first, args=args)


def _planned(every: Sequence[Sequence[Command]], plan: Plan, zero: float) -> Iterator[Event]:
    """Yield the planned step beside each mini-batch, from the time at which that began."""
    begins: dict[tuple[int, int], float] = {}
    for command in (command for commands in every for command in commands if command.actions):
        key, begin = (command.step, command.first), command.actions[0].begin
        begins[key] = min(begins.get(key, begin), begin)
    if not begins:
        return
    for worker, spans in enumerate(plan.spans):
        pid = _PLANNED + worker
        yield from _named(pid, f"planned: worker {worker}", "as planned")
        ends = [*sorted(begins.values())[1:], math.inf]
        until = dict(zip(sorted(begins.values()), ends, strict=True))
        for (step, first), begin in begins.items():
            for action, start, end in spans:
                if begin + end > until[begin]:
                    break  # the plan is slower than the run was: slices must not overlap
                args = {
                    "step": step,
                    "stage": action.stage,
                    "microbatch": first + action.microbatch,
                }
                drawn = _DRAWN.get(action.kind, {})
                times = begin + start, begin + end, zero
                yield _slice(pid, str(action), *times, args=args, **drawn)


def by_host(lives: Sequence[WorkerLife], found: Sequence[Event]) -> dict[str, list[Event]]:
    """Divide the events of lives by the host whose worker they are of."""
    names = _numbered(lives)
    hosts = {names[life.rank, life.generation]: life.host for life in lives}
    divided: dict[str, list[Event]] = {life.host: [] for life in lives}
    first = next(iter(divided), "")
    for event in found:
        divided[hosts.get(event["pid"], first)].append(event)
    return divided


def _numbered(lives: Sequence[WorkerLife]) -> dict[tuple[int, int], int]:
    """Return the numbers of the processes, by rank and generation."""
    keys = sorted({(life.rank, life.generation) for life in lives})
    return {key: number for number, key in enumerate(keys, 1)}


def _named(pid: int, name: str, label: str) -> Iterator[Event]:
    """Yield the name of a process, its label and its place among the others."""
    for kind, args in (
        ("process_name", {"name": name}),
        ("process_labels", {"labels": label}),
        ("process_sort_index", {"sort_index": pid}),
        ("thread_name", {"name": "actions"}),
    ):
        yield {"ph": "M", "pid": pid, "tid": 1, "name": kind, "args": args}


def _slices(command: Command, pid: int, zero: float) -> Iterator[Event]:
    ends = [span.end or span.begin for span in command.actions]
    end = max([command.received, command.answered or 0.0, *ends])
    step = {"step": command.step}
    is_after = any(span.name in (SAVE, EVALUATION) for span in command.spans)
    whole = f"{'after ' * is_after}step {command.step}"
    yield _slice(pid, whole, command.received, end, zero, args=step)
    for span in command.spans:
        yield _slice(pid, *span, zero)
    for action, begin, ended in command.actions:
        args = {**step, "stage": action.stage, "microbatch": command.first + action.microbatch}
        if ended is None:
            args["died"] = True
        times, drawn = (begin, end if ended is None else ended), _DRAWN.get(action.kind, {})
        yield _slice(pid, str(action), *times, zero, args=args, **drawn)


def _counters(
    commands: Iterable[Command], pid: int, zero: float, graphs: Mapping[int, int]
) -> Iterator[Event]:
    """Yield three counters: micro-batches, the bytes of their graphs, and the memory in use.

    A micro-batch counts from the begin of its forward to the end of its backward. A graph counts
    from the forward, or recompute, that makes it, with the bytes that the plan has for it.
    """

    def counter(name: str, at: float, unit: str, value: int) -> Event:
        args = {unit: value}
        return {"ph": "C", "pid": pid, "name": name, "ts": _at(at, zero), "args": args}

    for command in commands:
        count = held = 0
        again = {a[1:3] for a, _, _ in command.actions if a.kind is Kind.RECOMPUTE}
        for action, begin, end in command.actions:
            change, graph = 0, graphs.get(action.stage, 0)
            if action.kind is Kind.FORWARD:
                change, at = 1, begin
                held += 0 if action[1:3] in again else graph
            elif action.kind is Kind.RECOMPUTE:
                at = begin
                held += graph
            elif action.kind in WEIGHTS and end is not None:
                change, at = -1, end
                held -= graph
            else:
                continue
            count += change
            yield counter("live", at, "micro-batches", count)
            if graphs:
                yield counter("graphs, as planned", at, "bytes", held)
        for (_, begin, end), size in zip(command.actions, command.memory, strict=False):
            yield counter("memory", end or begin, "bytes", size)


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


def _slice(pid: int, name: str, begin: float, end: float, zero: float, **more: Any) -> Event:
    at = _at(begin, zero)
    times = {"ts": at, "dur": round(_at(end, zero) - at, 3)}
    return {"pid": pid, "tid": 1, "ph": "X", "name": name, **times, **more}
