"""The state of a scheduler for parameter groups that other stages had: lists with an item a group.

A scheduler's state does not depend on the stage but for such lists (``base_lrs``), and these may
be anywhere in it: a ``SequentialLR`` has schedulers within.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BY_GROUP = {
    *("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums"),
    "lr_lambdas",
}
_Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What a stage's optimizer had: its groups, with names for parameters, and its scheduler's
    state."""

    groups: Sequence[dict[str, Any]]
    scheduler: Any


@dataclass(frozen=True, slots=True)
class Place:
    """A saved parameter group: the number of one in an update."""

    update: Update
    index: int

    @property
    def group(self) -> dict[str, Any]:
        return self.update.groups[self.index]


def regrouped(origin: Update, places: Sequence[Place | None], built: Any) -> Any:
    """The scheduler's state of `origin` for other groups.

    Args:
        places: of each group the saved one that it goes on with, if any.
        built: the state of the scheduler for these groups, which has the rest.
    """
    before, now = len(origin.groups), len(places)

    def by_group(name: Any, saved: list[Any], here: Any) -> bool:
        if len(saved) != before:
            return False
        # What is no such list is as long in both.
        other = before != now and type(here) is list and len(here) == now
        return other or (type(name) is str and name in _BY_GROUP)

    def of_group(index: int, path: _Path, here: Any) -> Any:
        place = places[index]
        found = None if place is None else _at(place.update.scheduler, path)
        if place is not None and type(found) is list and place.index < len(found):
            return found[place.index]
        return _within(here, index)

    def walk(saved: Any, here: Any, path: _Path) -> Any:
        if isinstance(saved, dict):
            filled = saved.copy()
            for key, value in saved.items():
                filled[key] = walk(value, _within(here, key), (*path, key))
            return filled
        if type(saved) is not list:
            return saved
        if by_group(path[-1] if path else None, saved, here):
            return [of_group(index, path, here) for index in range(now)]
        return [walk(v, _within(here, i), (*path, i)) for i, v in enumerate(saved)]

    return walk(origin.scheduler, built, ())


def _within(value: Any, key: Any) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if type(value) is list and type(key) is int and key < len(value) else None


def _at(value: Any, path: _Path) -> Any:
    for key in path:
        value = _within(value, key)
    return value
