"""A worker's actions as columns, by kind, stage and peer.

A column has the micro-batches of such actions, and their places in the tuple. Half a million
actions are looked at quickly when they are not looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeworker.plan.actions import Action, Kind


@dataclass(slots=True)
class Column:
    """The actions of one kind, stage and peer, in the order of the tuple."""

    microbatches: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    def by_microbatch(self, count: int) -> list[int]:
        """The place of each micro-batch's action; beyond any place where there is none."""
        if len(self.places) == count and self.microbatches == list(range(count)):
            return self.places
        found = [NOWHERE] * count
        for m, place in zip(self.microbatches, self.places, strict=True):
            found[m] = place
        return found


NOWHERE = 1 << 60
NONE = Column()
Columns = dict[tuple[Kind, int, int], Column]
"""By kind, stage, and the stage at the other end or -1."""


def columns_of(actions: Sequence[Action]) -> Columns:
    columns: Columns = {}
    for place, (kind, stage, microbatch, peer) in enumerate(actions):
        end = kind, stage, peer
        column = columns.get(end)
        if column is None:
            column = columns[end] = Column()
        column.microbatches.append(microbatch)
        column.places.append(place)
    return columns


def joined(columns: Iterable[Column]) -> Column:
    """The actions of several columns together, in the order of the tuple."""
    some = [column for column in columns if column.places]
    if len(some) < 2:
        return some[0] if some else NONE
    pairs = sorted(pair for c in some for pair in zip(c.places, c.microbatches, strict=True))
    return Column([m for _, m in pairs], [place for place, _ in pairs])
