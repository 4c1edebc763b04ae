"""How long the workers of a mini-batch waited for each other, and which delays began outside. Pure.

A worker waits for another one in five places: in a receive until the send begins; in a send while
the channel is full; in the reduction of a stage until the other replicas have begun their part;
behind its last action until its frames are received; and behind its answer until the last worker
has answered. The actions show how long it waited and not why, because each worker of a chain waits
for the next one.

No wait is longer by more than the delay that causes it. The two delays that the schedule does not
have are therefore measured where they begin, at the first stage: by how much ``data()`` delayed its
next backward, and how long after another worker it received its command.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pipeworker.plan.actions import INPUTS, RECEIVES, REPLICAS, SENDS, Action, Edge, Kind, edge_of
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import CHANNEL_CAPACITY, is_bounded
from pipeworker.trace.timeline import ActionSpan, Command, WorkerLife

_Begins = dict[tuple[Edge, int], float]
"""When the send, or the receive, of each frame began."""
_BEFORE = {Kind.SUM: Kind.SCATTER, Kind.GATHER: Kind.SUM}
"""By action, the one that the other replicas must have begun before it ends."""


@dataclass(frozen=True, slots=True)
class Waits:
    """The moments until which the workers of a mini-batch waited, and the first stages' delays.

    Attributes:
        ready: by replica and action, when the other worker was ready for it.
        taken: by rank, when the others had begun to receive all that the worker sent.
        late: by replica, the seconds by which ``data()`` delayed its first stage.
        started: by replica, when the worker of its first stage received the command.
    """

    ready: Mapping[int, Mapping[Action, float]]
    taken: Mapping[int, float]
    late: Mapping[int, float]
    started: Mapping[int, float]

    @staticmethod
    def of(lives: Sequence[WorkerLife], commands: Sequence[Command]) -> Waits:
        """Return the waits of a mini-batch, which all workers of all replicas have recorded."""
        replicas: dict[int, list[tuple[WorkerLife, Command]]] = defaultdict(list)
        for life, command in zip(lives, commands, strict=True):
            replicas[life.replica].append((life, command))
        ready: dict[int, dict[Action, float]] = {}
        taken: dict[int, float] = {}
        for replica, members in replicas.items():
            ready[replica], found = _between_stages(members)
            taken |= found
        begun = {
            (replica, action.kind, action.stage): begin
            for replica, members in replicas.items()
            for _, command in members
            for action, begin, _ in command.actions
            if action.kind in REPLICAS
        }
        for replica, kind, stage in begun:
            before = _BEFORE.get(kind)
            others = [begun.get((r, before, stage)) for r in replicas if before and r != replica]
            known = [begin for begin in others if begin is not None]
            if known:
                ready[replica][Action(kind, stage, 0)] = max(known)
        first = {
            replica: command
            for replica, members in replicas.items()
            for life, command in members
            if 0 in life.stages
        }
        late = {replica: _lateness(c.actions, ready[replica]) for replica, c in first.items()}
        return Waits(ready, taken, late, {replica: c.received for replica, c in first.items()})

    def within(self, life: WorkerLife, span: ActionSpan) -> float:
        """Return the seconds of an action of a worker in which it waited for another one."""
        action, begin, end = span
        ready = self.ready[life.replica].get(action, begin)
        return min(max(0.0, ready - begin), (end or begin) - begin)

    def behind(self, life: WorkerLife, command: Command, last: float) -> float:
        """Return the seconds that a worker waited behind its actions, until `last` at most."""
        answered = last if command.answered is None else command.answered
        _, begin, end = command.actions[-1]
        taken = min(answered, self.taken.get(life.rank, answered))
        return last - answered + max(0.0, taken - (end or begin))

    def delays(self, life: WorkerLife, command: Command) -> tuple[float, float]:
        """Return for how many seconds a worker may have waited for data(), and for a late command.

        For the worker of a first stage its own data() is no wait for another worker.
        """
        own = self.late[life.replica] if 0 in life.stages else 0.0
        start = max(0.0, self.started[life.replica] - command.received)
        return max(self.late.values()) - own, start


def _between_stages(
    members: Sequence[tuple[WorkerLife, Command]],
) -> tuple[dict[Action, float], dict[int, float]]:
    """Return :attr:`Waits.ready` of a replica, and :attr:`Waits.taken` of its workers."""
    sent, received = _Begins(), _Begins()
    for _, command in members:
        for action, begin, _ in command.actions:
            if action.kind in SENDS:
                sent[edge_of(action), action.microbatch] = begin
            elif action.kind in RECEIVES:
                received[edge_of(action), action.microbatch] = begin
    placement = Placement(tuple(life.stages for life, _ in members))
    ready: dict[Action, float] = {}
    taken: dict[int, float] = {}
    for life, command in members:
        order: dict[Edge, list[int]] = defaultdict(list)
        for action, begin, _ in command.actions:
            if action.kind in RECEIVES:
                ready[action] = sent.get((edge_of(action), action.microbatch), begin)
            elif action.kind in SENDS:
                edge = edge_of(action)
                at = received.get((edge, action.microbatch))
                if at is None:  # its stage is no worker's
                    continue
                taken[life.rank] = max(at, taken.get(life.rank, at))
                before = order[edge]
                before.append(action.microbatch)
                if len(before) > CHANNEL_CAPACITY and is_bounded(edge, placement):
                    ready[action] = received[edge, before[-1 - CHANNEL_CAPACITY]]
    return ready, taken


def _lateness(actions: Sequence[ActionSpan], ready: Mapping[Action, float]) -> float:
    """Return by how many seconds data() delayed the next backward of the worker that reads.

    Time for which the worker would have waited for the gradient without data() is no delay.
    """
    for place, (load, begin, end) in enumerate(actions):
        if load.kind is not Kind.LOAD:
            continue
        late = (end or begin) - begin
        for action, at, _ in islice(actions, place + 1, None):
            if action.kind in INPUTS:
                break
            if action.kind in RECEIVES:
                late = min(late, max(0.0, at - ready[action]))
        return late
    return 0.0
