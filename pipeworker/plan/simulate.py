"""The simulator: the duration of a step, and why its workers are idle, from costs by stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import RECEIVES, SENDS, Action, Edge, Kind, channel
from pipeworker.plan.deadlock import waits_of
from pipeworker.plan.schedule import CHANNEL_CAPACITY, Schedule, is_bounded

FULL = "full"
"""A cause of idle time, besides the payload that a worker waits for: its channel is full."""
HANDLING = "handling"
"""A cause of idle time: the worker itself sends or receives, and its device waits."""
END = "end"
"""A cause of idle time: another worker has not finished the step yet."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of one micro-batch by stage, and of transfers, in any unit.

    A recompute costs as much as a forward. The second part of a split backward costs what the first
    (`backward_input`) leaves of `backward`. A transfer costs what `transfers` has for its channel,
    and is free without. A send or a receive takes its worker `handling`, besides what it waits for.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    transfers: Mapping[Edge, float] = field(default_factory=dict)
    handling: float = 0.0

    @staticmethod
    def even(stages: int, forward: float = 1.0, backward: float = 2.0) -> Costs:
        """Return equal costs for every stage, free transfers and a backward of two equal parts."""
        return Costs((forward,) * stages, (backward,) * stages, (backward / 2,) * stages)

    def of(self, kind: Kind, stage: int) -> float:
        """Return the cost of an action; 0 if it does not compute."""
        match kind:
            case Kind.FORWARD | Kind.RECOMPUTE:
                return self.forward[stage]
            case Kind.BACKWARD:
                return self.backward[stage]
            case Kind.BACKWARD_INPUT:
                return self.backward_input[stage]
            case Kind.BACKWARD_WEIGHT:
                return self.backward[stage] - self.backward_input[stage]
        return 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a step, in the unit of the costs.

    Attributes:
        makespan: duration of the step.
        busy: time of computing, by stage.
        idle: time of waiting, by worker and by cause: a payload, FULL, HANDLING or END.
    """

    makespan: float
    busy: tuple[float, ...]
    idle: tuple[Mapping[str, float], ...]

    @property
    def bubble(self) -> float:
        """The idle share of all workers over the step, 0..1."""
        total = self.makespan * len(self.idle)
        return 1 - sum(self.busy) / total if total else 0.0


class Span(NamedTuple):
    """The time that an action took in a simulated step, in the unit of the costs."""

    action: Action
    start: float
    end: float


def timeline(
    schedule: Schedule, costs: Costs | None = None, *, capacity: int = CHANNEL_CAPACITY
) -> tuple[tuple[Span, ...], ...]:
    """Return when each worker computes in the step that :func:`simulate` simulates, by worker.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    spans: list[list[Span]] = [[] for _ in schedule.workers]
    simulate(schedule, costs, capacity=capacity, spans=spans)
    return tuple(map(tuple, spans))


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    capacity: int = CHANNEL_CAPACITY,
    spans: Sequence[list[Span]] | None = None,
) -> Timing:
    """Simulate a step of a schedule whose channels are received in the order of their sends.

    Without costs, a forward takes 1 and a backward 2. To `spans`, a list for each worker, it adds
    the time of each action that costs any.

    Raises:
        ScheduleError: it deadlocks; the message names the first action that cannot run, its worker,
            and what it waits for.
    """
    stages = schedule.placement.stages
    costs = costs or Costs.even(stages)
    count, handling = len(schedule.workers), costs.handling
    at, clock = [0] * count, [0.0] * count
    busy = [0.0] * stages
    idle: list[dict[str, float]] = [{} for _ in range(count)]
    channels: dict[Edge, _Channel] = {}
    known: dict[tuple[Kind, int, int], _Act] = {}
    ready = deque(range(count))
    while ready:
        worker = ready.popleft()
        actions, waits = schedule.workers[worker], idle[worker]
        place, now = at[worker], clock[worker]
        while place < len(actions):
            kind, stage, _, peer = actions[place]
            act = known.get((kind, stage, peer))
            if act is None:
                through: _Channel | None = None
                if kind in SENDS or kind in RECEIVES:
                    edge = channel(kind, stage, peer)
                    bound = capacity if is_bounded(edge, schedule.placement) else None
                    through = channels.setdefault(edge, _Channel(edge, bound, costs))
                cost = costs.of(kind, stage)
                if kind is Kind.BACKWARD and stage in schedule.frozen:  # it has no weight part
                    cost = costs.backward_input[stage]
                act = _Act(cost, kind in SENDS, through)
                known[kind, stage, peer] = act
            through = act.channel
            if through is None:
                if spans is not None and act.cost:
                    spans[worker].append(Span(actions[place], now, now + act.cost))
                now += act.cost
                busy[stage] += act.cost
            else:
                times = through.slots if act.sends else through.frames
                if not times:
                    through.waiting = worker
                    break
                then = times.popleft()
                if then > now:
                    cause = FULL if act.sends else through.payload
                    waits[cause] = waits.get(cause, 0.0) + then - now
                    now = then
                if handling:
                    waits[HANDLING] = waits.get(HANDLING, 0.0) + handling
                    now += handling
                if act.sends:
                    through.frames.append(now + through.transfer)
                    if through.unbounded:
                        times.append(0.0)
                elif not through.unbounded:
                    through.slots.append(now)
                if through.waiting >= 0:
                    ready.append(through.waiting)
                    through.waiting = -1
            place += 1
        at[worker], clock[worker] = place, now
    if any(place < len(acts) for acts, place in zip(schedule.workers, at, strict=True)):
        raise ScheduleError(
            f"schedule {schedule.name} deadlocks with {capacity} frames: "
            f"{'; '.join(waits_of(schedule, at, clock, capacity))}"
        )
    makespan = max(clock)
    for worker, now in enumerate(clock):
        if now < makespan:
            idle[worker][END] = makespan - now
    return Timing(makespan, tuple(busy), tuple(idle))


class _Channel:
    """A channel: the times at which its frames arrive, and at which its slots became free."""

    __slots__ = ("frames", "payload", "slots", "transfer", "unbounded", "waiting")

    def __init__(self, edge: Edge, capacity: int | None, costs: Costs) -> None:
        self.payload = edge.payload.value
        self.unbounded = capacity is None
        self.transfer = costs.transfers.get(edge, 0.0)
        self.frames: deque[float] = deque()
        self.slots: deque[float] = deque([0.0] * (1 if capacity is None else capacity))
        self.waiting = -1  # the worker that waits at it


class _Act(NamedTuple):
    """The cost and the channel that all actions of one kind, stage and peer share."""

    cost: float
    sends: bool
    channel: _Channel | None
