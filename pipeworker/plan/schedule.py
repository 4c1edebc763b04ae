"""Schedules as data: for each worker, the tuple of actions that it runs in a step.

:mod:`pipeworker.plan.check` checks these very tuples, and workers execute them. The text form has a
line per worker::

    gpipe stages=2 microbatches=2
    0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0<G0 0B0 0<G1 0B1
    1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1B0 1>G0 1B1 1>G1

The actions are explained in :mod:`pipeworker.plan.actions`. A *forward-only* schedule is the pass
of one micro-batch, which evaluation repeats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipeworker.plan import frozen
from pipeworker.plan.actions import (
    SENDS,
    Action,
    Edge,
    Kind,
    Payload,
    channel,
    format_actions,
)
from pipeworker.plan.placement import Placement

Pairs = tuple[tuple[int, int], ...]
CHANNEL_CAPACITY = 4
"""Frames that a channel of activations or gradients holds before its sender waits. The transport
keeps to this number, so that what the checker proves holds when the schedule runs."""
GRADIENTS_AHEAD = 6
"""Receives of gradients that are posted ahead: more than a channel holds, so that several are
posted in one go."""
UNBOUNDED = frozenset({Payload.TARGET, Payload.SKIP, Payload.SKIP_GRADIENT, Payload.TIED})
"""Payloads whose sender never waits. Targets and skips are received several stages later, so as
many micro-batches later: a lower bound would stall every fill. The bounded activations and
gradients keep the stages together. (The transport stops at 512 frames, which is more than can be in
flight then.)"""


def is_bounded(edge: Edge, placement: Placement) -> bool:
    """Return whether a channel holds at most CHANNEL_CAPACITY frames.

    Channels of activations and gradients between neighbouring workers do. From the last worker back
    to the first (:meth:`Placement.looped`) a round of micro-batches may wait for the first worker
    to finish the stage before: a lower bound would stall every round.
    """
    owners = placement.owners
    return edge.payload not in UNBOUNDED and abs(owners[edge.source] - owners[edge.target]) == 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every worker of a replica for one step, or of a pass without backward.

    Replicas with the same number of micro-batches run the same schedule. A replica without
    micro-batches only takes part in adding up gradients.

    Attributes:
        skips: the pairs of stages (source, target) that skip connections lead between.
        ties: the pairs of stages that exchange gradients of tied weights, in both directions.
        frozen: the stages that have nothing to train, ascending.
    """

    name: str
    microbatches: int
    placement: Placement
    workers: tuple[tuple[Action, ...], ...]
    skips: Pairs = ()
    ties: Pairs = ()
    forward_only: bool = False
    frozen: tuple[int, ...] = ()

    @property
    def front(self) -> int:
        """The number of stages at the front of the network that have no backward."""
        return frozen.front(self.frozen, self.placement.stages)

    def __str__(self) -> str:
        head = f"{self.name} stages={self.placement.stages} microbatches={self.microbatches}"
        if self.placement.held != Placement.identity(self.placement.stages).held:
            head += f" placement={self.placement}"
        if self.placement.replicas > 1:
            head += f" replicas={self.placement.replicas}"
        for label, ends in (("skips", self.skips), ("ties", self.ties)):
            if ends:
                head += f" {label}=" + ",".join(f"{source}>{target}" for source, target in ends)
        if self.frozen:
            head += f" frozen={','.join(map(str, self.frozen))}"
        if self.forward_only:
            head += " forward-only"
        lines = (f"{worker}: {format_actions(acts)}" for worker, acts in enumerate(self.workers))
        return "\n".join([head, *lines])


End = tuple[Kind, int]
"""A send or receive of a stage: its kind, and the stage at the other end where actions name it."""


class StageEnds(NamedTuple):
    """The sends and receives of a stage around its forward and backward."""

    before_forward: list[End]
    after_forward: list[End]
    before_backward: list[End]
    after_backward: list[End]

    @staticmethod
    def of(placement: Placement, stage: int, skips: Pairs, front: int) -> StageEnds:
        """Return the ends of a stage; stages of one worker pass tensors in memory.

        The first `front` stages have no backward, and are sent no gradients.
        """
        owners, last = placement.owners, placement.stages - 1

        def is_remote(other: int) -> bool:
            return 0 <= other <= last and owners[other] != owners[stage]

        before, after = is_remote(stage - 1), is_remote(stage + 1)
        sources = [source for source, target in skips if target == stage and is_remote(source)]
        targets = [target for source, target in skips if source == stage and is_remote(target)]
        return StageEnds(
            [
                *([(Kind.RECEIVE_ACTIVATION, -1)] if before else []),
                *([(Kind.RECEIVE_TARGET, 0)] if stage == last and is_remote(0) else []),
                *((Kind.RECEIVE_SKIP, peer) for peer in sources),
            ],
            [
                *([(Kind.SEND_ACTIVATION, -1)] if after else []),
                *([(Kind.SEND_TARGET, last)] if stage == 0 and is_remote(last) else []),
                *((Kind.SEND_SKIP, peer) for peer in targets),
            ],
            [
                *([(Kind.RECEIVE_GRADIENT, -1)] if after and stage >= front else []),
                *((Kind.RECEIVE_SKIP_GRADIENT, peer) for peer in targets if stage >= front),
            ],
            [
                *([(Kind.SEND_GRADIENT, -1)] if before and stage > front else []),
                *((Kind.SEND_SKIP_GRADIENT, peer) for peer in sources if peer >= front),
            ],
        )


def edges(schedule: Schedule) -> tuple[Edge, ...]:
    """Return every channel of a schedule, sorted so that all workers connect in one order."""
    used = {
        (action.kind, action.stage, action.peer)
        for actions in schedule.workers
        for action in actions
        if action.kind in SENDS
    }
    return tuple(sorted({channel(*end) for end in used}))


def replica_edges(placement: Placement, *, scatters_data: bool = False) -> tuple[Edge, ...]:
    """Return every channel between replicas, sorted: from each to each other, for each stage.

    With `scatters_data` replica 0 reads the data, and sends the other replicas their parts.
    """
    numbers = range(placement.replicas)
    found = [
        Edge.between(stage, origin, goal)
        for stage in range(placement.stages)
        for origin in numbers
        for goal in numbers
        if origin != goal
    ]
    found += [Edge(0, 0, Payload.DATA, 0, goal) for goal in numbers if goal and scatters_data]
    return tuple(sorted(found))
