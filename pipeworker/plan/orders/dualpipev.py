"""DualPipeV: a V in which forwards and whole backwards run side by side."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice

from pipeworker.plan.actions import Action, Kind
from pipeworker.plan.orders.squeeze import numbered
from pipeworker.plan.placement import Placement

_FORWARD, _BACKWARD = Kind.FORWARD, Kind.BACKWARD
_INPUT, _WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def dualpipev(placement: Placement, microbatches: int) -> list[list[Action]]:
    """Return the compute order of DualPipeV (DeepSeek-AI 2025; Sea AI Lab's "cut in half").

    It is half of DualPipe (DeepSeek-V3, 2412.19437): the two directions are the two arms of a V, so
    no weights are held twice. A worker holds at most 2K + 1 graphs of its two stages. Where
    DeepSeek overlaps a forward with a backward, the forward runs first here, and its activation
    travels during the backward. Backwards are split only in the fill and the drain.
    """
    workers = placement.workers
    count = max(microbatches, 2 * workers)  # that fill the pipeline
    return [numbered(_steps(w, workers, count), microbatches) for w in range(workers)]


def _steps(worker: int, workers: int, count: int) -> Iterator[tuple[Kind, int]]:
    """Yield the kinds and stages of a worker's actions, in order."""
    behind = workers - 1 - worker  # workers on the way to the turn of the V
    down, up = worker, 2 * workers - 1 - worker
    # Fill.
    yield from [(_FORWARD, down)] * (2 * behind)
    yield from [(_FORWARD, down), (_FORWARD, up)] * (worker + 1)
    yield from [(_INPUT, up), (_WEIGHT, up), (_FORWARD, up)] * behind
    # Steady state: a forward down beside a backward up, and a forward up beside a backward down.
    pair = [(_FORWARD, up), (_BACKWARD, down)]
    yield from [(_FORWARD, down), (_BACKWARD, up), *pair] * (count - workers - behind)
    yield from [(_BACKWARD, up), *pair] * behind
    # Drain: half of the last backwards are split, and their weight parts fill the gaps.
    backwards = list(islice(cycle([up, down]), 2 * (worker + 1)))
    whole, split = backwards[: worker + 1], backwards[worker + 1 :]
    yield from ((_BACKWARD, stage) for stage in whole)
    yield from ((_INPUT, stage) for stage in split)
    deferred = iter([*split, *[down] * behind])
    for _ in range(behind):
        yield _WEIGHT, next(deferred)
        yield _INPUT, down
    yield from ((_WEIGHT, stage) for stage in deferred)
