"""List scheduling: an order of actions made by playing a step, one decision after the other.

A worker that is free chooses, of its actions whose inputs are there and for whose results there is
room, the one that a :class:`Rule` prefers: an input gradient, on which all workers in front wait; a
forward; and in the gaps the gradients of weights, oldest first. It looks ahead: if a better action
is known to become possible within a share of the time that the chosen one takes, it waits.

Gradients of weights so run in micro-batch order on each stage, as
:func:`pipeworker.plan.check.check` demands. The checker proves the result like any other order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pipeworker.plan.actions import Action, Edge, Kind, Payload
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import CHANNEL_CAPACITY, is_bounded
from pipeworker.plan.simulate import Costs


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule by which a worker prefers one action that is ready to another.

    Attributes:
        forward_first: prefer forwards to input gradients.
        ahead: how many times as many forwards as under 1F1B may run before their backwards.
        patience: the share of an action's duration for which the worker waits for a better one.
    """

    forward_first: bool
    ahead: float
    patience: float


RULES = tuple(
    Rule(first, ahead, patience)
    for first in (False, True)
    for ahead in (1.5, inf, 1.0)
    for patience in (0.0, 0.5)
)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that an order may use.

    Attributes:
        bytes: by worker, what is left for micro-batches; infinite without a limit.
        held: by stage, what a micro-batch holds from its forward to the end of its backward.
    """

    bytes: Sequence[float]
    held: Sequence[int]


class Play:
    """A step while its order is made; `again` says which stages recompute their micro-batches.

    Attributes:
        orders: the compute actions of each worker so far, without recomputes.
        end: when the last of them ends, without what a full channel makes a sender wait.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        costs: Costs,
        again: Sequence[bool],
        room: Room,
        rule: Rule,
    ) -> None:
        stages, workers = placement.stages, placement.workers
        self.orders: list[list[Action]] = [[] for _ in range(workers)]
        self._placement, self._rule, self._room = placement, rule, room
        self._costs, self._again = costs, again
        self._free = [0.0] * workers
        self._used = [0.0] * workers
        # By stage: when each micro-batch's input and gradient arrive, and how many have run.
        self._inputs: list[list[float]] = [[] for _ in range(stages)]
        self._inputs[0] = [0.0] * microbatches
        self._gradients: list[list[float]] = [[] for _ in range(stages)]
        self._forwards, self._backwards = [0] * stages, [0] * stages
        self._deferred: list[deque[int]] = [deque() for _ in range(stages)]
        self._most = [
            rule.ahead * (stages - min(held)) if stages > workers else rule.ahead * (workers - w)
            for w, held in enumerate(placement.held)
        ]
        self.end = 0.0
        self._wakes: list[tuple[float, int]] = [(0.0, worker) for worker in range(workers)]
        self._left = stages * microbatches * 3
        self._down = [self._edge(s, s + 1, Payload.ACTIVATION) for s in range(stages - 1)]
        self._up = [self._edge(s + 1, s, Payload.GRADIENT) for s in range(stages - 1)]

    def _edge(self, source: int, target: int, payload: Payload) -> tuple[float, bool]:
        """Return the seconds of a transfer, and whether its channel holds few frames."""
        owners, edge = self._placement.owners, Edge(source, target, payload)
        if owners[source] == owners[target]:
            return 0.0, False
        seconds = self._costs.transfers.get(edge, 0.0) + 2 * self._costs.handling
        return seconds, is_bounded(edge, self._placement)

    def run(self) -> bool:
        """Play the step; return whether every action has run: the rule may get stuck."""
        while self._wakes and self._left:
            now, worker = heappop(self._wakes)
            if self._free[worker] <= now:
                self._choose(worker, now)
        return not self._left

    def _choose(self, worker: int, now: float) -> None:
        """Begin the best action of a worker, unless it is better to wait."""
        found: list[tuple[float, int, Action, float]] = []  # begin, preference
        for stage in self._placement.held[worker]:
            for rank, action, begin in self._possible(worker, stage):
                found.append((max(now, begin), rank, action, self._duration(action)))
        if not found:
            return
        # Those that can begin now come first; of equal ones the oldest micro-batch: an order that
        # keeps several open holds more memory.
        begin, rank, action, duration = min(
            found, key=lambda one: (one[0], one[1], one[2].microbatch, -one[2].stage)
        )
        if begin > now:
            heappush(self._wakes, (begin, worker))
            return
        limit = now + self._rule.patience * duration
        better = [other for other in found if other[1] < rank and other[0] < limit]
        if better:
            heappush(self._wakes, (min(other[0] for other in better), worker))
            return
        self._begin(worker, action, now, duration)

    def _possible(self, worker: int, stage: int) -> list[tuple[int, Action, float]]:
        """Return a stage's next actions: their rank, and when they could begin."""
        found: list[tuple[int, Action, float]] = []
        f, b = self._forwards[stage], self._backwards[stage]
        rule = self._rule
        if b < len(self._gradients[stage]) and self._may_send(
            self._up, stage - 1, b, self._backwards
        ):
            action = Action(Kind.BACKWARD_INPUT, stage, b)
            found.append((int(rule.forward_first), action, self._gradients[stage][b]))
        if (
            f < len(self._inputs[stage])
            and self._has_room(worker, stage)
            and self._may_send(self._down, stage, f, self._forwards, 1)
        ):
            rank = int(not rule.forward_first)
            found.append((rank, Action(Kind.FORWARD, stage, f), self._inputs[stage][f]))
        if self._deferred[stage]:
            action = Action(Kind.BACKWARD_WEIGHT, stage, self._deferred[stage][0])
            found.append((2, action, 0.0))
        return found

    def _may_send(
        self,
        edges: Sequence[tuple[float, bool]],
        cut: int,
        m: int,
        received: Sequence[int],
        offset: int = 0,
    ) -> bool:
        """Return whether the channel at a cut has room for the result for micro-batch `m`."""
        if not 0 <= cut < len(edges) or not edges[cut][1]:
            return True
        return m - received[cut + offset] < CHANNEL_CAPACITY

    def _has_room(self, worker: int, stage: int) -> bool:
        """Return whether a worker may hold another micro-batch of a stage.

        A worker with several stages keeps room for the later ones, which must run before anything
        is released.
        """
        held = self._placement.held[worker]
        open_ones = sum(self._forwards[s] - self._backwards[s] for s in held)
        behind = [s for s in held if s > stage]
        idle = [s for s in behind if self._forwards[s] == self._backwards[s]]
        if open_ones and open_ones + len(idle) >= self._most[worker]:
            return False
        needed = self._room.held[stage] + sum(self._room.held[s] for s in idle)
        return self._used[worker] + needed <= self._room.bytes[worker]

    def _duration(self, action: Action) -> float:
        duration = self._costs.of(action.kind, action.stage)
        if self._again[action.stage] and action.kind is Kind.BACKWARD_INPUT:
            duration += self._costs.forward[action.stage]
        return duration

    def _begin(self, worker: int, action: Action, now: float, duration: float) -> None:
        kind, stage, m, _ = action
        end = now + duration
        self._free[worker] = end
        self.end = max(self.end, end)
        self._left -= 1
        self.orders[worker].append(action)
        heappush(self._wakes, (end, worker))
        if kind is Kind.FORWARD:
            self._forwards[stage] += 1
            self._used[worker] += self._room.held[stage]
            if stage + 1 < self._placement.stages:
                self._deliver(self._inputs, stage + 1, end + self._down[stage][0])
            else:
                self._deliver(self._gradients, stage, end)
            self._wake(stage - 1, now)  # its channel has room again
        elif kind is Kind.BACKWARD_WEIGHT:
            self._deferred[stage].popleft()
            self._used[worker] -= self._room.held[stage]
        else:
            self._backwards[stage] += 1
            if stage:
                self._deliver(self._gradients, stage - 1, end + self._up[stage - 1][0])
            self._wake(stage + 1, now)
            self._deferred[stage].append(m)

    def _deliver(self, arrivals: list[list[float]], stage: int, time: float) -> None:
        """Note when the next value of a stage arrives, and wake its worker then."""
        arrivals[stage].append(time)
        heappush(self._wakes, (time, self._placement.owners[stage]))

    def _wake(self, stage: int, now: float) -> None:
        if 0 <= stage < self._placement.stages:
            worker = self._placement.owners[stage]
            heappush(self._wakes, (max(now, self._free[worker]), worker))
