"""Changes that a unit makes to lists and dicts that it is called with, as a cache of keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import is_
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.worker.internals import pytree
from pipeworker.worker.stage.values import replace_tensors

Contents = list[tuple[Any, Any]]
"""The containers in the arguments of a call, each with a copy of what it held."""
Effects = list[tuple[int, Any, Any]]
"""Changes of them: the container's place, the key or index (None: appended) and the value."""


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        if isinstance(value, list):
            yield value
        for item in value:
            yield from _containers(item)
    elif _is_mapping(value):
        yield value
        for key in list(value.keys()):
            yield from _containers(value[key])


def _is_mapping(value: Any) -> bool:
    return hasattr(value, "keys") and hasattr(value, "__setitem__")


def held_by(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Contents:
    """Return the mutable containers in the arguments of a call, and copies of their content."""
    return [
        (one, list(one) if isinstance(one, list) else {key: one[key] for key in one.keys()})  # noqa: SIM118
        for value in (*args, *kwargs.values())
        for one in _containers(value)
    ]


def effects_since(held: Contents) -> Effects:
    """Return what was put into the containers since :func:`held_by`."""
    found: Effects = []
    for place, (one, before) in enumerate(held):
        is_list = isinstance(one, list)
        if len(one) < len(before) if is_list else not {*before} <= {*one.keys()}:
            raise UsageError(
                "model(): a module with parameters removes what is in a "
                f"{type(one).__name__} that it is called with; have it return the values, or cut "
                "the model by hand, as a list of layers"
            )
        if is_list:
            pairs = enumerate(zip(one, before, strict=False))
            found += [(place, key, now) for key, (now, was) in pairs if not _same(was, now)]
            found += [(place, None, value) for value in one[len(before) :]]
        else:
            found += [
                (place, key, one[key])
                for key in list(one.keys())
                if key not in before or not _same(before[key], one[key])
            ]
    return found


Changed = list[tuple[Any, Any, Any, Any]]
"""Exchanges in containers: the container, the key or index, the value there now and before."""


def exchange(value: Any, replaced: Mapping[int, torch.Tensor], changed: Changed) -> Any:
    """Return a nested value with other tensors in the place of some, by their ids.

    Containers are changed in place, which `changed` notes: a copy of one might differ from it, as
    that of a dict that gives its values by number too.
    """
    if not replaced or isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, list) or _is_mapping(value):
        for key in list(range(len(value)) if isinstance(value, list) else value.keys()):
            before = value[key]
            made = exchange(before, replaced, changed)
            if made is not before:
                value[key] = made
                changed.append((value, key, made, before))
        return value
    if isinstance(value, tuple):
        items = [exchange(item, replaced, changed) for item in value]
        if all(map(is_, items, value)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return replace_tensors(value, replaced)


def put_back(changed: Changed) -> None:
    """Put back what was exchanged in containers, and is still there."""
    for one, key, made, before in reversed(changed):
        if one[key] is made:
            one[key] = before


def restore(held: Contents) -> None:
    """Put back into the containers what they held."""
    for one, before in held:
        one.clear()
        (one.extend if isinstance(one, list) else one.update)(before)


def repeat(held: Contents, effects: Effects) -> None:
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
