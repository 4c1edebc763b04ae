"""Changes that a unit makes to lists and dicts that it is called with, as a cache of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.worker.internals import pytree

Held = list[tuple[Any, Any]]
"""The containers in the arguments of a call, each with a copy of what it held."""
Effects = list[tuple[int, Any, Any]]
"""Changes of them: the container's place, the key or index (None: appended) and the value."""


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


def exchanged(value: Any, replaced: Mapping[int, torch.Tensor]) -> Any:
    """Return a nested value with other tensors in the place of some, by their ids.

    The containers in it that hold such a tensor, and that pytree knows, are copies.
    """
    if not replaced:
        return value
    return pytree.tree_map_only(torch.Tensor, lambda t: replaced.get(id(t), t), value)


def exchange_within(held: Held, replaced: Mapping[int, torch.Tensor]) -> Callable[[], None]:
    """Replace tensors in containers that pytree does not know, which are no copies.

    Returns a function that puts those back that are still there.
    """
    changed: list[tuple[Any, Any, Any, Any]] = []
    for one, before in held if replaced else ():
        for key in range(len(one)) if isinstance(one, list) else before:
            made = exchanged(before[key], replaced)
            if not _same(made, before[key]):
                one[key] = made
                changed.append((one, key, made, before[key]))

    def put_back() -> None:
        for one, key, made, before in changed:
            if one[key] is made:
                one[key] = before

    return put_back


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
