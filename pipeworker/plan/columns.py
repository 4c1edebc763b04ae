"""A worker's actions as columns: by kind, stage and peer, their micro-batches and places.

The checker compares whole columns rather than single actions, so that a schedule of half a million
actions is checked in half a second. What a stage holds in memory at once is counted from columns
too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from pipeworker.plan.actions import COMPUTE, WEIGHTS, Action, Kind

NOWHERE = 1 << 60
"""A place behind all others: that of an action that the tuple does not contain."""


@dataclass(slots=True)
class Column:
    """The actions of one kind, stage and peer; `places` are their indices in the worker's tuple."""

    microbatches: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def place_of(self, wrong: Callable[[int], bool]) -> int:
        """Return the place of the first action whose micro-batch is `wrong`."""
        return next(p for m, p in zip(self.microbatches, self.places, strict=True) if wrong(m))

    def by_microbatch(self, count: int) -> list[int]:
        """Return the place of each of `count` micro-batches' actions, or NOWHERE."""
        if self.microbatches == list(range(count)):
            return self.places
        found = [NOWHERE] * count
        for m, place in zip(self.microbatches, self.places, strict=True):
            found[m] = place
        return found


NONE = Column()
Columns = dict[tuple[Kind, int, int], Column]
"""By kind, stage, and the stage at the other end or -1."""


def columns_of(actions: Sequence[Action]) -> Columns:
    """Return the columns of one worker's actions."""
    columns: Columns = defaultdict(Column)
    for place, (kind, stage, microbatch, peer) in enumerate(actions):
        column = columns[kind, stage, peer]
        column.microbatches.append(microbatch)
        column.places.append(place)
    return dict(columns)


def joined(columns: Iterable[Column]) -> Column:
    """Return the actions of several columns together, in the order of the tuple."""
    some = [column for column in columns if column.places]
    if len(some) < 2:
        return some[0] if some else NONE
    pairs = sorted(pair for c in some for pair in zip(c.places, c.microbatches, strict=True))
    return Column([m for _, m in pairs], [place for place, _ in pairs])


def peak_live(columns: Columns, stage: int, size: int) -> tuple[int, int, int]:
    """Return the fields of :class:`~pipeworker.plan.check.LiveMicroBatches` for one stage.

    `columns` are those of its worker, whose tuple has `size` actions.
    """
    return (
        peak_graphs(columns, (stage,), size),
        _peak(_column(columns, Kind.FORWARD, stage).places, _done(columns, stage), size),
        _peak(
            _column(columns, Kind.BACKWARD_INPUT, stage).places,
            _column(columns, Kind.BACKWARD_WEIGHT, stage).places,
            size,
        ),
    )


def peak_graphs(columns: Columns, stages: Iterable[int], size: int) -> int:
    """Return the most graphs of some stages of a worker that are on its device at once."""
    begins: list[int] = []
    ends: list[int] = []
    for stage in stages:
        forwards = _column(columns, Kind.FORWARD, stage)
        recomputes = _column(columns, Kind.RECOMPUTE, stage)
        recomputed = set(recomputes.microbatches)
        pairs = zip(forwards.microbatches, forwards.places, strict=True)
        begins += [place for m, place in pairs if m not in recomputed]
        begins += [*recomputes.places, *_column(columns, Kind.FETCH, stage).places]
        ends += [*_done(columns, stage), *offloaded_at(columns, stage).values()]
    return _peak(begins, ends, size)


def _done(columns: Columns, stage: int) -> Sequence[int]:
    """Return the places at which a stage has no more use for a micro-batch."""
    done = joined(_column(columns, kind, stage) for kind in WEIGHTS).places
    # A stage without backward keeps nothing of a forward.
    return done or _column(columns, Kind.FORWARD, stage).places


def offloaded_at(columns: Columns, stage: int) -> Mapping[int, int]:
    """Return, for each micro-batch that is fetched, the place at which it has left the device.

    That is the place of the stage's next action after its forward; NOWHERE if there is none.
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


def _peak(begins: Iterable[int], ends: Iterable[int], size: int) -> int:
    """Return the largest number of open intervals; an interval includes the place of its end."""
    changes = [0] * (size + 1)
    for place in begins:
        changes[place] += 1
    for place in ends:
        changes[place + 1] -= 1
    return max(accumulate(changes))
