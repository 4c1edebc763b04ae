"""Shows, before anything runs, that a schedule can run and what it costs.

A schedule passes when it is *complete* (every micro-batch forward and backward once on every
stage), *ordered* (each action's needs are met by earlier actions; backwards ascend, so gradients
accumulate in micro-batch order; each channel is received in the order it is sent) and *free of
deadlock* when a channel holds at most `capacity` frames. Stages that block on reading an empty
channel and on writing a full one form a bounded Kahn network: whether it deadlocks does not depend
on timing, so one simulated run decides it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from pipeworker.errors import ScheduleError
from pipeworker.plan.schedule import (
    RECEIVES,
    SENDS,
    WITH_PEER,
    Action,
    Edge,
    Kind,
    Payload,
    Schedule,
    edge_of,
    format_actions,
)

CHANNEL_CAPACITY = 4
"""Frames an activation or gradient channel holds before its sender waits. The transport keeps to
it."""
UNBOUNDED = frozenset({Payload.TARGET, Payload.SKIP, Payload.SKIP_GRADIENT, Payload.TIED})
"""What never makes its sender wait. Targets and skips are taken several stages, so as many
micro-batches, later: a bound below that would hold up every fill. Activations and gradients, which
are bounded, keep the stages together. (The transport stops at 512 frames of them, more than that
leaves under way.)"""


@dataclass(frozen=True, slots=True)
class Costs:
    """Relative seconds of one micro-batch on one stage."""

    forward: float = 1.0
    backward: float = 2.0

    def of(self, kind: Kind) -> float:
        match kind:
            case Kind.FORWARD | Kind.RECOMPUTE:
                return self.forward
            case Kind.BACKWARD:
                return self.backward
        return 0.0


@dataclass(frozen=True, slots=True)
class Proof:
    """What the checker found.

    Attributes:
        live_activations: by stage, the most micro-batches whose activations are kept at once.
        live_inputs: by stage, the most micro-batches whose boundary input is kept at once.
        makespan: length of the step in the unit of the costs, with free communication.
        bubble: idle share of all stages over the step, 0..1.
    """

    live_activations: tuple[int, ...]
    live_inputs: tuple[int, ...]
    makespan: float
    bubble: float


def prove(
    schedule: Schedule, *, capacity: int = CHANNEL_CAPACITY, costs: Costs | None = None
) -> Proof:
    """Check `schedule` and return what it costs.

    Raises:
        ScheduleError: it is incomplete, out of order or deadlocks; the message names the stage,
            the action and the reason.
    """
    for source, target in schedule.skips:
        if not 0 <= source < target < len(schedule.stages):
            raise ScheduleError(f"skip {source}>{target} does not lead to a later stage")
    for source, target in schedule.ties:
        if source == target or (target, source) not in schedule.ties:
            raise ScheduleError(f"tie {source}>{target} has no {target}>{source}")
    live = [_check_stage(schedule, stage) for stage in range(len(schedule.stages))]
    _check_channels(schedule)
    makespan, busy = _run(schedule, capacity, costs or Costs())
    total = makespan * len(schedule.stages)
    return Proof(
        live_activations=tuple(activations for activations, _ in live),
        live_inputs=tuple(inputs for _, inputs in live),
        makespan=makespan,
        bubble=1 - busy / total if total else 0.0,
    )


def _check_stage(schedule: Schedule, stage: int) -> tuple[int, int]:
    """Completeness and order within a stage; returns (live activations, live inputs)."""
    last = len(schedule.stages) - 1
    actions = schedule.stages[stage]
    again = {a.microbatch for a in actions if a.kind is Kind.RECOMPUTE}
    seen: set[Action] = set()
    inputs: set[int] = set()
    activations: set[int] = set()
    most_inputs = most_activations = 0
    next_backward = 0

    sources = [source for source, target in schedule.skips if target == stage]
    targets = [target for source, target in schedule.skips if source == stage]
    tied = [target for source, target in schedule.ties if source == stage]

    def need(
        action: Action, kind: Kind, applies: bool = True, peers: Sequence[int] = (-1,)
    ) -> None:
        for peer in peers if applies else ():
            if Action(kind, action.microbatch, peer) not in seen:
                raise ScheduleError(f"stage {stage}: {action} comes before its {kind.value}")

    for action in actions:
        m = action.microbatch
        if not 0 <= m < schedule.microbatches:
            raise ScheduleError(f"stage {stage}: {action} is not one of the micro-batches")
        if action in seen:
            raise ScheduleError(f"stage {stage}: {action} appears twice")
        match action.kind:
            case Kind.FORWARD:
                need(action, Kind.RECEIVE_ACTIVATION, stage > 0)
                need(action, Kind.RECEIVE_TARGET, stage == last and last > 0)
                need(action, Kind.RECEIVE_SKIP, peers=sources)
                inputs.add(m)
                if m not in again:
                    activations.add(m)
            case Kind.RECOMPUTE:
                need(action, Kind.FORWARD)
                activations.add(m)
            case Kind.BACKWARD:
                need(action, Kind.FORWARD)
                need(action, Kind.RECOMPUTE, m in again)
                need(action, Kind.RECEIVE_GRADIENT, stage < last)
                need(action, Kind.RECEIVE_SKIP_GRADIENT, peers=targets)
                if m != next_backward:
                    raise ScheduleError(
                        f"stage {stage}: {action} is out of order; gradients accumulate in "
                        f"micro-batch order, so B{next_backward} comes first"
                    )
                next_backward += 1
                inputs.discard(m)
            case Kind.SEND_ACTIVATION | Kind.SEND_SKIP:
                need(action, Kind.FORWARD)
            case Kind.SEND_GRADIENT | Kind.SEND_SKIP_GRADIENT:
                need(action, Kind.BACKWARD)
            case Kind.SEND_TIED if next_backward < schedule.microbatches:
                raise ScheduleError(f"stage {stage}: {action} comes before the last backward")
            case Kind.LOAD if stage > 0:
                raise ScheduleError(f"stage {stage}: only the first stage reads data")
            case Kind.LOAD if m > 0:
                raise ScheduleError(f"stage {stage}: {action}: a step reads one mini-batch, as L0")
        most_activations = max(most_activations, len(activations))
        most_inputs = max(most_inputs, len(inputs))
        if action.kind is Kind.BACKWARD:
            activations.discard(m)
        seen.add(action)
    expected = {(Kind.FORWARD, -1), (Kind.BACKWARD, -1)}
    if stage > 0:
        expected |= {(Kind.RECEIVE_ACTIVATION, -1), (Kind.SEND_GRADIENT, -1)}
    if stage < last:
        expected |= {(Kind.SEND_ACTIVATION, -1), (Kind.RECEIVE_GRADIENT, -1)}
    if last > 0 and stage in (0, last):
        expected.add((Kind.SEND_TARGET if stage == 0 else Kind.RECEIVE_TARGET, -1))
    for peer in sources:
        expected |= {(Kind.RECEIVE_SKIP, peer), (Kind.SEND_SKIP_GRADIENT, peer)}
    for peer in targets:
        expected |= {(Kind.SEND_SKIP, peer), (Kind.RECEIVE_SKIP_GRADIENT, peer)}
    for m in range(schedule.microbatches):
        for kind, peer in sorted(expected, key=lambda what: (what[0].value, what[1])):
            if Action(kind, m, peer) not in seen:
                raise ScheduleError(f"stage {stage}: {Action(kind, m, peer)} is missing")
    ends = {Action(kind, 0, peer) for peer in tied for kind in (Kind.SEND_TIED, Kind.RECEIVE_TIED)}
    for action in sorted(ends - seen, key=str):
        raise ScheduleError(f"stage {stage}: {action} is missing")
    for action in seen:
        if action.kind in (Kind.SEND_TIED, Kind.RECEIVE_TIED):
            if action not in ends:
                raise ScheduleError(f"stage {stage}: {action} belongs to no tied weights")
        elif action.kind in WITH_PEER and (action.kind, action.peer) not in expected:
            raise ScheduleError(f"stage {stage}: {action} belongs to no skip connection")
        if action.kind in SENDS or action.kind in RECEIVES:
            edge = edge_of(action, stage, last + 1)
            if not (0 <= edge.source <= last and 0 <= edge.target <= last and last > 0):
                raise ScheduleError(f"stage {stage}: {action} has no stage at its other end")
    if stage == 0 and Action(Kind.LOAD, 0) not in seen:
        raise ScheduleError("stage 0: L0 is missing, so no next mini-batch would be read")
    return most_activations, most_inputs


def _check_channels(schedule: Schedule) -> None:
    """Each channel's receiver takes the micro-batches in the order they are sent."""
    count = len(schedule.stages)
    sent: dict[Edge, list[int]] = {}
    received: dict[Edge, list[int]] = {}
    for stage, actions in enumerate(schedule.stages):
        for action in actions:
            if action.kind in SENDS:
                edge = edge_of(action, stage, count)
                sent.setdefault(edge, []).append(action.microbatch)
            elif action.kind in RECEIVES:
                edge = edge_of(action, stage, count)
                received.setdefault(edge, []).append(action.microbatch)
    for edge in sorted(sent.keys() | received.keys()):
        if sent.get(edge) != received.get(edge):
            raise ScheduleError(
                f"channel {edge}: sent in order {sent.get(edge)}, received in {received.get(edge)}"
            )


def _run(schedule: Schedule, capacity: int, costs: Costs) -> tuple[float, float]:
    """Simulate with free communication; returns (makespan, busy seconds over all stages)."""
    count = len(schedule.stages)
    at = [0] * count
    clock = [0.0] * count
    busy = 0.0
    # A channel is the times its frames were sent, and the times its slots became free again.
    frames: dict[Edge, deque[float]] = {}
    slots: dict[Edge, deque[float]] = {}
    progress = True
    while progress:
        progress = False
        for stage, actions in enumerate(schedule.stages):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                kind = action.kind
                if kind in SENDS:
                    edge = edge_of(action, stage, count)
                    if SENDS[kind] not in UNBOUNDED:
                        free = slots.setdefault(edge, deque([0.0] * capacity))
                        if not free:
                            break
                        clock[stage] = max(clock[stage], free.popleft())
                    frames.setdefault(edge, deque()).append(clock[stage])
                elif kind in RECEIVES:
                    edge = edge_of(action, stage, count)
                    if not frames.get(edge):
                        break
                    clock[stage] = max(clock[stage], frames[edge].popleft())
                    slots.setdefault(edge, deque()).append(clock[stage])
                else:
                    clock[stage] += costs.of(kind)
                    busy += costs.of(kind)
                at[stage] += 1
                progress = True
    stuck = [s for s in range(count) if at[s] < len(schedule.stages[s])]
    if stuck:
        where = "; ".join(
            f"stage {s} at {format_actions(schedule.stages[s][at[s] : at[s] + 1])}" for s in stuck
        )
        raise ScheduleError(f"schedule {schedule.name} deadlocks with {capacity} frames: {where}")
    return max(clock), busy
