"""What a stage keeps at once of its micro-batches, by the tuple of its worker."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

from pipeworker.plan.actions import COMPUTE, WEIGHTS, Kind
from pipeworker.plan.columns import NONE, NOWHERE, Column, Columns, joined


def keeps(columns: Columns, stage: int, size: int) -> tuple[int, int, int]:
    """How many micro-batches' graphs, inputs, and backwards of which only half is done.

    Args:
        size: of the tuple.
    """
    forwards = _column(columns, Kind.FORWARD, stage)
    recomputes = _column(columns, Kind.RECOMPUTE, stage)
    fetches = _column(columns, Kind.FETCH, stage)
    done = joined(_column(columns, kind, stage) for kind in WEIGHTS).places
    again = set(recomputes.microbatches)
    pairs = zip(forwards.microbatches, forwards.places, strict=True)
    begins = [*(place for m, place in pairs if m not in again), *recomputes.places, *fetches.places]
    return (
        _most(begins, [*done, *leaves(columns, stage).values()], size),
        _most(forwards.places, done, size),
        _most(
            _column(columns, Kind.BACKWARD_INPUT, stage).places,
            _column(columns, Kind.BACKWARD_WEIGHT, stage).places,
            size,
        ),
    )


def leaves(columns: Columns, stage: int) -> Mapping[int, int]:
    """Of each micro-batch that is fetched: the place of the stage's next action after its forward.

    When that has ended, what the forward saved has left the device.
    """
    fetched = {*_column(columns, Kind.FETCH, stage).microbatches}
    if not fetched:
        return {}
    forwards = _column(columns, Kind.FORWARD, stage)
    places = joined(_column(columns, kind, stage) for kind in COMPUTE).places
    pairs = zip(forwards.microbatches, forwards.places, strict=True)
    following = {m: bisect_right(places, place) for m, place in pairs if m in fetched}
    return {m: places[at] if at < len(places) else NOWHERE for m, at in following.items()}


def _column(columns: Columns, kind: Kind, stage: int) -> Column:
    return columns.get((kind, stage, -1), NONE)


def _most(begins: Iterable[int], ends: Iterable[int], size: int) -> int:
    """The most that is kept at once, where each end still has it."""
    changes = [0] * (size + 1)
    for place in begins:
        changes[place] += 1
    for place in ends:
        changes[place + 1] -= 1
    return max(accumulate(changes))
