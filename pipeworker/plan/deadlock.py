"""Explains a deadlock: which action a worker cannot run, and which one of a peer it waits for."""

from __future__ import annotations

from collections.abc import Sequence

from pipeworker.plan.actions import COMPUTE, RECEIVES, SENDS, Action, edge_of
from pipeworker.plan.schedule import Schedule

_SENDERS = {payload: kind for kind, payload in SENDS.items()}
_RECEIVERS = {payload: kind for kind, payload in RECEIVES.items()}


def waits_of(
    schedule: Schedule, at: Sequence[int], clock: Sequence[float], capacity: int
) -> list[str]:
    """Describe the circle of workers that wait for each other, from the first that got stuck.

    Args:
        schedule: one that deadlocks.
        at: the place of the action at which each worker is stuck; behind its last one if it is not.
        clock: the time at which each worker stopped.
        capacity: frames that a channel holds.

    Returns:
        A sentence for each worker of the circle, and for those that lead to it.
    """
    stuck = [w for w, place in enumerate(at) if place < len(schedule.workers[w])]
    worker = min(stuck, key=lambda w: (clock[w], w))
    seen: dict[int, str] = {}
    while worker not in seen:
        seen[worker], other = _wait(schedule, worker, at[worker], capacity)
        if other < 0 or at[other] >= len(schedule.workers[other]):
            break
        worker = other
    return [*seen.values()]


def _wait(schedule: Schedule, worker: int, place: int, capacity: int) -> tuple[str, int]:
    """Return what a worker waits for, and the worker that would have to do it; -1 if none can."""
    actions = schedule.workers[worker]
    action, edge = actions[place], edge_of(actions[place])
    owners = schedule.placement.owners
    if action.kind in RECEIVES:
        blocked = next((a for a in actions[place:] if a.kind in COMPUTE), action)
        peer = -1 if action.peer < 0 else edge.target
        wanted = Action(_SENDERS[edge.payload], edge.source, action.microbatch, peer)
        text = f"worker {worker} cannot run {blocked}: it waits for"
    else:
        end = (action.kind, action.stage, action.peer)
        sent = [a.microbatch for a in actions[:place] if (a.kind, a.stage, a.peer) == end]
        peer = -1 if action.peer < 0 else edge.source
        earlier = sent[len(sent) - capacity] if 0 < capacity <= len(sent) else action.microbatch
        wanted = Action(_RECEIVERS[edge.payload], edge.target, earlier, peer)
        text = f"worker {worker} cannot send {action}, because {capacity} frames wait for"
    other = owners[wanted.stage] if 0 <= wanted.stage < len(owners) else -1
    theirs = schedule.workers[other] if other >= 0 else ()
    if wanted not in theirs:
        return f"{text} {wanted}, which no worker runs", -1
    there = theirs.index(wanted)
    around = theirs[there:] if wanted.kind in RECEIVES else theirs[there::-1]
    shown = next((a for a in around if a.kind in COMPUTE), wanted)
    return f"{text} {shown} of worker {other}", other
