"""The calls of a forward, written down so that another run of it can be compared with them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipeworker.worker.internals import is_fake, version_of
from pipeworker.worker.stage.cut.calls import Counting, leaves_of, name_of, reads_metadata
from pipeworker.worker.stage.cut.objects import bytes_of, held_within
from pipeworker.worker.stage.values import bits_of
from pipeworker.worker.transport.structure import PLAIN_TYPES

Call = tuple[Any, ...]
"""The name of what was called, and a key of each leaf of its arguments."""
_PLAIN = (*PLAIN_TYPES, torch.device)
_MIRRORED = {"ge": "le", "gt": "lt", "__eq__": "__eq__", "ne": "ne"}
"""The comparisons that give the same as others do for swapped operands.

Python asks an operand of a subclass first, so ``plain >= fake`` calls ``le(fake, plain)``.
"""


class Content(tuple[Any, ...]):
    """The key of an object: what it holds, which units may change."""

    __slots__ = ()


def is_object(leaf: Any) -> bool:
    """Return whether a leaf of arguments is an object that may hold others."""
    return not isinstance(leaf, (torch.Tensor, slice, *_PLAIN))


def without_content(call: Call) -> Call:
    """Return a call as it is whatever the objects in its arguments hold."""
    return tuple(key[0][0] if isinstance(key, Content) else key for key in call)


class Trace:
    """The calls of one run that depend on parameters, in order."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._digests: dict[int, tuple[torch.Tensor, int, Any]] = {}

    def add(self, name: str, leaves: Sequence[Any], *known: Mapping[int, Any]) -> None:
        """Add a call, by the leaves of its arguments; `known` has what stands for a tensor's id."""
        keys = [self._key(leaf, known) for leaf in leaves]
        mirrored = _MIRRORED.get(name, "")
        if mirrored == name:
            keys.sort(key=repr)
        elif mirrored:
            name, keys = mirrored, keys[::-1]
        self.calls.append((name, *keys))

    def _key(self, leaf: Any, known: Sequence[Mapping[int, Any]]) -> Any:
        if not is_object(leaf):
            return self._atom(leaf, known)
        return Content(self._atom(one, known) for one in held_within(leaf))

    def _atom(self, leaf: Any, known: Sequence[Mapping[int, Any]]) -> Any:
        if isinstance(leaf, torch.Tensor):
            for names in known:
                if id(leaf) in names:
                    return names[id(leaf)]
            return tuple(leaf.shape), leaf.dtype, None if is_fake(leaf) else self._digest(leaf)
        if isinstance(leaf, slice):
            return tuple(self._atom(one, known) for one in (leaf.start, leaf.stop, leaf.step))
        return type(leaf), repr(leaf) if isinstance(leaf, _PLAIN) else bytes_of(leaf)

    def _digest(self, tensor: torch.Tensor) -> Any:
        """Return a number for a tensor's content; a mask that all layers use is read once."""
        held = self._digests.get(id(tensor))
        if held is None or held[1] != version_of(tensor):
            dense = tensor.layout is torch.strided
            digest = zlib.crc32(bits_of(tensor).cpu().numpy().data) if dense else None
            held = self._digests[id(tensor)] = tensor, version_of(tensor), digest
        return held[2]


class Recording(Counting):
    """Adds each call inside the context that has a fake tensor among its arguments to a trace.

    Attributes:
        used: these tensors, by id.
    """

    def __init__(self) -> None:
        super().__init__(self._record)
        self.trace = Trace()
        self.used: dict[int, torch.Tensor] = {}

    def _record(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        leaves = leaves_of((args, kwargs))
        used = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and is_fake(leaf)]
        if used:
            self.used |= {id(tensor): tensor for tensor in used}
            if not reads_metadata(func):  # a cache reads a length where it is filled alone
                self.trace.add(name_of(func), leaves)
        return func(*args, **kwargs)
