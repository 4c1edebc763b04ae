"""Workers and channels as a network: how far a sender may run ahead, and whether all can end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import RECEIVES, SENDS, Action, Edge, Payload, channel
from pipeworker.plan.columns import NOWHERE, Columns
from pipeworker.plan.schedule import Schedule

CHANNEL_CAPACITY = 4
"""Frames an activation or gradient channel holds before its sender waits. The transport keeps to
it."""
UNBOUNDED = frozenset({Payload.TARGET, Payload.SKIP, Payload.SKIP_GRADIENT, Payload.TIED})
"""What never makes its sender wait. Targets and skips are taken several stages, so as many
micro-batches, later: a bound below that would hold up every fill. Activations and gradients, which
are bounded, keep the stages together. (The transport stops at 512 frames of them, more than that
leaves under way.)"""


def check_channels(workers: Sequence[Columns]) -> None:
    """Each channel's receiver takes the micro-batches in the order they are sent."""
    sent: dict[Edge, list[int]] = {}
    received: dict[Edge, list[int]] = {}
    for columns in workers:
        for (kind, stage, peer), column in columns.items():
            if kind in SENDS:
                sent[channel(kind, stage, peer)] = column.microbatches
            elif kind in RECEIVES:
                received[channel(kind, stage, peer)] = column.microbatches
    for edge in sorted(sent.keys() | received.keys()):
        if sent.get(edge) != received.get(edge):
            raise ScheduleError(
                f"channel {edge}: sent in order {sent.get(edge)}, received in {received.get(edge)}"
            )


def check_progress(schedule: Schedule, workers: Sequence[Columns], capacity: int) -> None:
    """Run the network once, counting frames."""
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
    waiting = [-1] * len(room)  # the worker that waits at a channel: it has two ends
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
    """The send or receive of this number."""
    return [a for a in actions if a.kind in SENDS or a.kind in RECEIVES][number]
