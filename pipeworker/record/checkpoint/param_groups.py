"""Parameter groups across stages: which saved group a group continues, and the scheduler's state.

A scheduler's state is the same on every stage except for lists with an item for each parameter
group, such as ``base_lrs``. These lists may be anywhere in the state: a ``SequentialLR`` contains
schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_BY_GROUP = frozenset(
    ("base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas")
)
_Path = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SavedOptimizer:
    """The saved parameter groups of a stage's optimizer, and the state of its scheduler.

    Attributes:
        steps: the number of steps that the scheduler was made for; 0 if it takes none.
    """

    groups: Sequence[dict[str, Any]]
    scheduler: Any
    steps: int = 0

    @property
    def scheduled(self) -> int | None:
        """The number of steps of the scheduler; None if its state does not have that."""
        return _steps_of(self.scheduler)


def _steps_of(state: Any) -> int | None:
    """Return the number of steps in a scheduler's state; a ``ChainedScheduler`` has its parts'."""
    if not isinstance(state, dict):
        return None
    count, parts = state.get("last_epoch"), state.get("_schedulers")
    if count is None and isinstance(parts, (list, tuple)):
        counts = {_steps_of(part) for part in parts}
        count = counts.pop() if len(counts) == 1 else None
    return count if type(count) is int and count >= 0 else None


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A saved parameter group: an optimizer, and the index of the group in it."""

    optimizer: SavedOptimizer
    index: int


def scheduler_state_for(
    origin: SavedOptimizer, saved_groups: Sequence[SavedGroup | None], built: Any
) -> Any:
    """Return the scheduler's state of `origin` for the groups now.

    Each continues one of `saved_groups`, or has its items in the state of the scheduler that was
    `built` for the groups now.
    """
    before, now = len(origin.groups), len(saved_groups)

    optimizers = {saved.optimizer for saved in saved_groups if saved is not None}

    def is_by_group(path: _Path, saved: list[Any], here: Any) -> bool:
        if len(saved) != before:
            return False
        if path and type(path[-1]) is str and path[-1] in _BY_GROUP:
            return True
        if type(here) is not list or len(here) != now:
            return False
        if any(isinstance(item, dict) and "last_epoch" in item for item in saved):
            return False  # these are schedulers, of which there are as many as groups
        # A list that is not by group has the same length in both states, and is the same on every
        # stage, or as the scheduler was built.
        return before != now or (
            repr(saved) != repr(here)
            and any(repr(_at(one.scheduler, path)) != repr(saved) for one in optimizers)
        )

    def item_of_group(index: int, path: _Path, here: Any) -> Any:
        saved = saved_groups[index]
        found = None if saved is None else _at(saved.optimizer.scheduler, path)
        if saved is not None and type(found) is list and saved.index < len(found):
            return found[saved.index]
        return _item(here, index)

    def walk(saved: Any, here: Any, path: _Path) -> Any:
        if isinstance(saved, dict):
            filled = saved.copy()
            for key, value in saved.items():
                filled[key] = walk(value, _item(here, key), (*path, key))
            return filled
        if type(saved) is not list:
            return saved
        if is_by_group(path, saved, here):
            return [item_of_group(index, path, here) for index in range(now)]
        return [walk(v, _item(here, i), (*path, i)) for i, v in enumerate(saved)]

    return walk(origin.scheduler, built, ())


def _item(value: Any, key: Any) -> Any:
    """Return the item of a dict or list; None if there is none."""
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if type(value) is list and type(key) is int and key < len(value) else None


def _at(value: Any, path: _Path) -> Any:
    for key in path:
        value = _item(value, key)
    return value
