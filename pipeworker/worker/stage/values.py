"""Nested values and the tensors in them."""

from __future__ import annotations

from typing import Any

import torch

from pipeworker.worker.internals import pytree, version_of
from pipeworker.worker.transport.frame import replica


def distinct_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, each once, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found = {id(t): t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}
    return list(found.values())


def replace_tensors(value: Any, tensors: dict[int, torch.Tensor]) -> Any:
    """The value with each tensor whose id is a key replaced."""
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value)
    return pytree.tree_map_only(torch.Tensor, lambda t: tensors.get(id(t), t), value)


def copied(value: Any) -> Any:
    """The value with tensors that lie in memory as the originals do."""
    copies = {id(tensor): replica(tensor) for tensor in distinct_tensors(value)}
    return replace_tensors(value, copies)


def detached(value: Any) -> Any:
    """The value with its tensors outside of the graph, each once."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return replace_tensors(value, {id(t): t.detach() for t in distinct_tensors(value)})


def versions(value: Any) -> list[int]:
    """Counts of changes in place, by tensor."""
    return [version_of(tensor) for tensor in distinct_tensors(value)]


def first_in_graph(value: Any) -> torch.Tensor | None:
    return next((t for t in distinct_tensors(value) if t.grad_fn is not None), None)


_MOST_SHOWN = 16
"""Entries of a container that are shown."""


def describe(value: Any) -> str:
    """How a value nests, and what its tensors hold: ``(Tensor[4, 8], None) float32``."""
    kinds = {_kind(tensor) for tensor in distinct_tensors(value)}
    if len(kinds) == 1:
        return f"{_nested(value, False)} {kinds.pop()}"
    return _nested(value, True)


def _kind(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nested(value: Any, kinds: bool) -> str:
    """The structure; with `kinds`, each tensor says its own."""
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}" + (f" {_kind(value)}" if kinds else "")
    if isinstance(value, dict):
        return f"{{{_listed([f'{key!r}: {_nested(x, kinds)}' for key, x in value.items()])}}}"
    if isinstance(value, (list, tuple)):
        items = [_nested(item, kinds) for item in value]
        if isinstance(value, list):
            return f"[{_listed(items)}]"
        if fields := getattr(value, "_fields", ()):
            named = [f"{name}={item}" for name, item in zip(fields, items, strict=True)]
            return f"{type(value).__name__}({_listed(named)})"
        return f"({_listed(items)}{',' if len(items) == 1 else ''})"
    plain = value is None or isinstance(value, (bool, int, float))
    return repr(value) if plain else type(value).__name__


def _listed(items: list[str]) -> str:
    more = [f"... {len(items) - _MOST_SHOWN} more"] if len(items) > _MOST_SHOWN else []
    return ", ".join([*items[:_MOST_SHOWN], *more])
