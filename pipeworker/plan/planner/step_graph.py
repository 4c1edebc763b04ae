"""A schedule's step as a graph of waits, which gives its duration for many costs quickly.

A node is an action. It waits for the action before it on its worker, and a receive or a send also
for its channel: a receive for its frame, and a send for the receive that frees a slot. The graph
depends on the schedule alone, so the planner compiles it once and evaluates it for hundreds of
balances. :func:`pipeworker.plan.simulate.simulate` computes the same durations, bit for bit.

The longest path through the graph is the duration. A path that was the longest for some costs is
still a path for others, so it gives a lower bound of their duration without an evaluation.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import COMPUTE, RECEIVES, SENDS, Edge, Kind, Payload, channel
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Schedule, is_bounded


class Counts(NamedTuple):
    """The number of times that a path contains each kind of work of a stage.

    The recompute of micro-batch 0 is counted for itself, because a stage in the mode
    ``except_first`` does not run it.
    """

    forward: int = 0
    recompute_first: int = 0
    recompute: int = 0
    backward: int = 0
    backward_input: int = 0
    backward_weight: int = 0


_KINDS = (
    Kind.FORWARD,
    None,
    Kind.RECOMPUTE,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)
"""The kinds of work, as in :class:`Counts`."""
KINDS = len(_KINDS)
COMMON = (Payload.ACTIVATION, Payload.GRADIENT, Payload.TARGET)
"""Payloads whose channels do not depend on the balance."""
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


@dataclass(frozen=True, slots=True)
class Path:
    """A path through a step: the work of each stage, the transfers of each channel.

    Attributes:
        handled: the sends and receives of the channels that every balance has.
    """

    stages: tuple[Counts, ...]
    transfers: tuple[tuple[Edge, int], ...]
    handled: int = 0


class StepGraph:
    """The graph of a schedule's step.

    Costs are given for each stage and kind of :class:`Counts`, stage by stage, and then twice for a
    send or a receive: of channels that every balance has, and of others.
    """

    def __init__(self, schedule: Schedule, *, handles: bool = True) -> None:
        """Compile the graph; unless it `handles`, a send or a receive takes no time itself."""
        self._stages, self._handles = schedule.placement.stages, handles
        self._edges: list[Edge] = []
        # By node, in an order in which each comes after those that it waits for; node 0 is the
        # begin of the step.
        self._previous: list[int] = []
        self._awaited: list[int] = []
        self._edge: list[int] = []
        self._work: list[int] = []
        self._ends: list[int] = []
        self._compile(schedule)

    def __len__(self) -> int:
        return len(self._work)

    def longest(
        self, works: Sequence[float], transfers: Mapping[Edge, float]
    ) -> tuple[float, Path]:
        """Return the duration of the step, and a path that is as long.

        Args:
            works: seconds of each work, and twice of a send or a receive.
            transfers: seconds by channel; a channel that is not there takes none.
        """
        edges = [0.0] * (1 + len(self._edges))
        if transfers:
            edges[1:] = [transfers.get(edge, 0.0) for edge in self._edges]
        times = self._times(works, edges)
        node = max(self._ends, key=times.__getitem__)
        duration = times[node]
        done: list[int] = []
        crossed: list[int] = []
        while node:
            at = node - 1
            done.append(self._work[at])
            node, other = self._previous[at], self._awaited[at]
            if times[other] + edges[self._edge[at]] > times[node]:
                crossed.append(self._edge[at])
                node = other
        count = Counter(done)
        counted = [
            Counts(*[count[s * KINDS + n] for n in range(KINDS)]) for s in range(self._stages)
        ]
        edges_of = Counter(self._edges[edge - 1] for edge in crossed if edge)
        handled = count[self._stages * KINDS]
        return duration, Path(tuple(counted), tuple(sorted(edges_of.items())), handled)

    def _times(self, works: Sequence[float], edges: Sequence[float]) -> list[float]:
        """Return the end of each node; this loop is what a search spends its time in."""
        times = [0.0]
        add = times.append
        for previous, awaited, edge, work in zip(
            self._previous, self._awaited, self._edge, self._work, strict=True
        ):
            now = times[previous]
            if awaited:
                arrival = times[awaited] + edges[edge]
                if arrival > now:
                    now = arrival
            add(now + works[work])
        return times

    def _compile(self, schedule: Schedule) -> None:
        handled = self._stages * KINDS
        channels: dict[Edge, _Channel] = {}
        known: dict[tuple[Kind, int, int], _Channel] = {}
        at, last = [0] * len(schedule.workers), [0] * len(schedule.workers)
        ready = deque(range(len(schedule.workers)))
        while ready:
            worker = ready.popleft()
            actions = schedule.workers[worker]
            while at[worker] < len(actions):
                kind, stage, m, peer = actions[at[worker]]
                if kind in COMPUTE:
                    work = (
                        stage * KINDS + _NUMBER[None if kind is Kind.RECOMPUTE and not m else kind]
                    )
                    last[worker] = self._add(last[worker], 0, 0, work)
                elif kind in SENDS or kind in RECEIVES:
                    end = kind, stage, peer
                    if end not in known:
                        edge = channel(*end)
                        if edge not in channels:
                            self._edges.append(edge)
                            work = handled + (edge.payload not in COMMON)
                            bounded = is_bounded(edge, schedule.placement)
                            made = _Channel(len(self._edges), work, bounded=bounded)
                            channels[edge] = made
                        known[end] = channels[edge]
                    through = known[end]
                    node = self._pass(last[worker], through, sends=kind in SENDS)
                    if node < 0:
                        through.waiting = worker
                        break
                    last[worker] = node
                    if through.waiting >= 0:
                        ready.append(through.waiting)
                        through.waiting = -1
                at[worker] += 1
        if any(place < len(acts) for place, acts in zip(at, schedule.workers, strict=True)):
            raise ScheduleError(
                f"schedule {schedule.name} deadlocks with {CHANNEL_CAPACITY} frames"
            )
        self._ends = last

    def _pass(self, node: int, through: _Channel, *, sends: bool) -> int:
        """Add the node of a send or receive; return it, or -1 if its channel makes it wait."""
        handled = through.handled
        if sends:
            if through.slots is not None:
                if not through.slots:
                    return -1
                slot = through.slots.popleft()
                if slot or self._handles:
                    node = self._add(node, slot, 0, handled)
            elif self._handles:
                node = self._add(node, 0, 0, handled)
            through.frames.append(node)
            return node
        if not through.frames:
            return -1
        node = self._add(node, through.frames.popleft(), through.number, handled)
        if through.slots is not None:
            through.slots.append(node)
        return node

    def _add(self, previous: int, awaited: int, edge: int, work: int) -> int:
        self._previous.append(previous)
        self._awaited.append(awaited)
        self._edge.append(edge)
        self._work.append(work)
        return len(self._work)


class _Channel:
    """A channel: the nodes that sent its frames, and those that freed its slots."""

    __slots__ = ("frames", "handled", "number", "slots", "waiting")

    def __init__(self, number: int, handled: int, *, bounded: bool) -> None:
        self.number, self.handled = number, handled
        self.frames: deque[int] = deque()
        self.slots: deque[int] | None = deque([0] * CHANNEL_CAPACITY) if bounded else None
        self.waiting = -1
