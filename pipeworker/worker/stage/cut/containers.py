"""Changes that a unit makes to lists and dicts that it is called with, as a cache of keys."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.worker.internals import pytree

Held = list[tuple[Any, Any]]
"""The containers in the arguments of a call, each with a copy of what it held."""
Effects = list[tuple[int, Any, Any]]
"""Additions to them: the container's place, the key (None: appended) and the value."""


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        if isinstance(value, list):
            yield value
        for item in value:
            yield from _containers(item)
    elif hasattr(value, "keys") and hasattr(value, "__setitem__"):
        yield value
        for key in list(value.keys()):
            yield from _containers(value[key])


def held_by(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Held:
    """Return the mutable containers in the arguments of a call, and copies of their content."""
    return [
        (one, list(one) if isinstance(one, list) else {key: one[key] for key in one.keys()})  # noqa: SIM118
        for value in (*args, *kwargs.values())
        for one in _containers(value)
    ]


def effects_since(held: Held) -> Effects:
    """Return what was put into the containers since :func:`held_by`."""
    found: Effects = []
    for place, (one, before) in enumerate(held):
        kept = list(one)[: len(before)] if isinstance(one, list) else list(one.keys())
        if isinstance(one, list):
            same = len(kept) == len(before) and all(map(is_, kept, before))
        else:
            same = {*before} <= {*kept}
        if not same:
            raise UsageError(
                "model(): a module with parameters removes or replaces what is in a "
                f"{type(one).__name__} that it is called with, and may only add to it; have it "
                "return the values, or cut the model by hand, as a list of layers"
            )
        if isinstance(one, list):
            found += [(place, None, value) for value in one[len(before) :]]
        else:
            found += [
                (place, key, one[key])
                for key in list(one.keys())
                if key not in before or not _same(before[key], one[key])
            ]
    return found


def restore(held: Held) -> None:
    """Put back into the containers what they held."""
    for one, before in held:
        one.clear()
        (one.extend if isinstance(one, list) else one.update)(before)


def repeat(held: Held, effects: Effects) -> None:
    """Put the same into the containers of another run."""
    for place, key, value in effects:
        one = held[place][0]
        if key is None:
            one.append(value)
        else:
            one[key] = value


def _same(left: Any, right: Any) -> bool:
    leaves = (pytree.tree_leaves(value) for value in (left, right))
    a, b = ([id(leaf) for leaf in found] for found in leaves)
    return a == b
