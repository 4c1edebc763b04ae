"""Recorded steps, repeated by simulation: each action as long as it took, transfers free."""

from __future__ import annotations

import statistics
from pathlib import Path

from launches import SKIPPED_STEPS

from pipeworker.plan.actions import Kind
from pipeworker.record.rundir import RunDir
from pipeworker.trace.mini_batches import MiniBatch, mini_batches
from pipeworker.trace.timeline import read_timeline

_NEEDS = {Kind.FORWARD: -1, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 0}
"""The stage of which an action needs the one of its direction, relative to its own."""


def replayed(path: Path) -> float:
    """Return the median of the duration of a run's repeated steps relative to the real ones.

    It is 1 where a step took only what the schedule costs with these actions; the rest is the cost
    of transfers and of the runtime. For a run on one host, of layers without skips.
    """
    batches = mini_batches(read_timeline(RunDir(path)).lives)
    return statistics.median(_share(one) for one in batches if one.step > SKIPPED_STEPS)


def _share(batch: MiniBatch) -> float:
    """Return the same of one step."""
    workers = [
        [span for span in command.actions if span.action.kind in _NEEDS]
        for command in batch.commands
    ]
    last = max(span.action.stage for spans in workers for span in spans)
    at, clocks = [0] * len(workers), [0.0] * len(workers)
    ends: dict[tuple[bool, int, int], float] = {}  # of forwards and of backwards
    while any(place < len(spans) for place, spans in zip(at, workers, strict=True)):
        for worker, spans in enumerate(workers):
            for action, begin, end in spans[at[worker] :]:
                forward, needed = action.kind is Kind.FORWARD, action.stage + _NEEDS[action.kind]
                ready = 0.0
                if needed != action.stage and 0 <= needed <= last:
                    if (forward, needed, action.microbatch) not in ends:
                        break
                    ready = ends[forward, needed, action.microbatch]
                assert end is not None
                clocks[worker] = max(clocks[worker], ready) + end - begin
                if action.kind is not Kind.BACKWARD_WEIGHT:
                    ends[forward, action.stage, action.microbatch] = clocks[worker]
                at[worker] += 1
    ended = max(spans[-1].end or 0.0 for spans in workers)
    return max(clocks) / (ended - min(spans[0].begin for spans in workers))
