"""The contents of an object: its attributes or items, and those of the objects there."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pipeworker.worker.stage.cut.contents import dict_of, number_of, slots_of
from pipeworker.worker.transport.structure import PLAIN_TYPES

_ENDS = (*PLAIN_TYPES, type, ModuleType, nn.Module, torch.Tensor)
"""Classes of values that are not searched."""
_MOST = 1 << 12
"""Objects that are searched at most: one may lead to a library's own."""


def held_within(value: Any) -> Iterator[Any]:
    """Yield a value, and all that it leads to, in a fixed order; each object is searched once."""
    waiting, searched = [value], set[int]()
    while waiting and len(searched) < _MOST:
        one = waiting.pop()
        yield one
        if not isinstance(one, _ENDS) and id(one) not in searched:
            searched.add(id(one))
            waiting += reversed([*_items(one)])


def bytes_of(value: Any) -> int | None:
    """Return a number for the bytes or the state of an array or a random generator, or None."""
    with suppress(TypeError, ValueError, NotImplementedError, BufferError):
        return zlib.crc32(memoryview(value).tobytes())
    return number_of(value)


def is_same(left: list[Any], right: list[Any]) -> bool:
    """Return whether two lists hold the same objects, or equal plain values."""
    return len(left) == len(right) and all(
        type(a) is type(b) and isinstance(a, PLAIN_TYPES) and a == b
        for a, b in zip(left, right, strict=True)
        if a is not b
    )


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, (set, frozenset)):
        yield from sorted(value, key=repr)
    elif isinstance(value, (list, tuple, deque)):
        yield from value
    elif isinstance(value, dict):
        yield from _pairs(value.items())
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it is empty
                yield cell.cell_contents
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    yield from _pairs((dict_of(value) or {}).items())
    yield from (one for _, one in slots_of(value))


def _pairs(items: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
    for key, one in items:
        yield from (key, one)
