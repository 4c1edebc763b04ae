"""Workers and channels as a network: how far a sender may run ahead, and whether all finish."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import RECEIVES, SENDS, Action, Edge, Payload, channel
from pipeworker.plan.columns import NOWHERE, Columns
from pipeworker.plan.schedule import Schedule

CHANNEL_CAPACITY = 4
"""Frames that a channel of activations or gradients holds before its sender waits. The transport
keeps to this number, so that what the checker proves holds when the schedule runs."""
UNBOUNDED = frozenset({Payload.TARGET, Payload.SKIP, Payload.SKIP_GRADIENT, Payload.TIED})
"""Payloads whose sender never waits. Targets and skips are received several stages later, so as
many micro-batches later: a lower bound would stall every fill. The bounded activations and
gradients keep the stages together. (The transport stops at 512 frames, which is more than can be in
flight then.)"""


def check_channels(workers: Sequence[Columns]) -> None:
    """Check that each channel's micro-batches are received in the order in which they are sent."""
    sent, received = (
        {
            channel(*end): column.microbatches
            for columns in workers
            for end, column in columns.items()
            if end[0] in kinds
        }
        for kinds in (SENDS, RECEIVES)
    )
    for edge in sorted(sent.keys() | received.keys()):
        if sent.get(edge) != received.get(edge):
            raise ScheduleError(
                f"channel {edge}: sent in order {sent.get(edge)}, received in {received.get(edge)}"
            )


def check_progress(schedule: Schedule, workers: Sequence[Columns], capacity: int) -> None:
    """Run the network once, counting frames, and name the action at which each worker is stuck."""
    numbers: dict[Edge, int] = {}
    programs: list[list[int]] = []  # by worker: n sends on channel n, -n receives
    for actions, columns in zip(schedule.workers, workers, strict=True):
        program = [0] * len(actions)
        for (kind, stage, peer), column in columns.items():
            if kind in SENDS or kind in RECEIVES:
                edge = channel(kind, stage, peer)
                number = numbers.setdefault(edge, len(numbers) + 1)
                code = number if kind in SENDS else -number
                for place in column.places:
                    program[place] = code
        programs.append([code for code in program if code])
    room = [0, *(NOWHERE if edge.payload in UNBOUNDED else capacity for edge in numbers)]
    frames = [0] * len(room)
    waiting = [-1] * len(room)  # by channel, the worker that waits at it: at most one of two ends
    at = [0] * len(programs)
    ready = deque(range(len(programs)))
    while ready:
        worker = ready.popleft()
        program, place = programs[worker], at[worker]
        end = len(program)
        while place < end:
            code = program[place]
            if code > 0:
                if not room[code]:
                    waiting[code] = worker
                    break
                room[code] -= 1
                frames[code] += 1
            else:
                code = -code
                if not frames[code]:
                    waiting[code] = worker
                    break
                frames[code] -= 1
                room[code] += 1
            place += 1
            if waiting[code] >= 0:
                ready.append(waiting[code])
                waiting[code] = -1
        at[worker] = place
    stuck = [
        f"worker {worker} at {_communication(schedule.workers[worker], at[worker])}"
        for worker, program in enumerate(programs)
        if at[worker] < len(program)
    ]
    if stuck:
        raise ScheduleError(
            f"schedule {schedule.name} deadlocks with {capacity} frames: {'; '.join(stuck)}"
        )


def _communication(actions: Sequence[Action], number: int) -> Action:
    """Return the send or receive of this number."""
    return [a for a in actions if a.kind in SENDS or a.kind in RECEIVES][number]
