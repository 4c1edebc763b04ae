"""The places where modules keep tensors beside their parameters: buffers and attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import BatchNorm, buffers_of, dense_parts
from pipeworker.worker.stage.values import bytes_of

OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""The attributes that torch itself gives a module."""
Slot = tuple[nn.Module, str]
"""A module, and the name of a buffer, or of an attribute that is a tensor."""
_SMALL = 64 * 1024
"""The bytes of a buffer up to which its copy costs a few microseconds."""
Copies = dict[int, torch.Tensor]
"""Copies by the id of the buffer: a buffer that two modules share is copied once."""
ABSENT = object()
"""In the place of a buffer or an attribute that there is not."""
_PLAIN = (bool, int, float, str, tuple, torch.device, torch.dtype)
"""The classes of values that a module keeps beside a tensor, as the length of a cached table."""


def get_slot(slot: Slot, absent: object = None) -> Any:
    """Return what is in a slot; `absent` if nothing is."""
    module, name = slot
    buffers = buffers_of(module)
    return buffers[name] if name in buffers else vars(module).get(name, absent)


def set_slot(slot: Slot, value: Any, *, is_buffer: bool = False) -> None:
    """Put a value into a slot; ``ABSENT`` removes the buffer or the attribute.

    With `is_buffer` it is a buffer, also if that was removed.
    """
    module, name = slot
    if value is ABSENT:
        buffers_of(module).pop(name, None)
        vars(module).pop(name, None)
    elif is_buffer or name in buffers_of(module):
        buffers_of(module)[name] = value
    else:
        vars(module)[name] = value


def is_small(slot: Slot, value: torch.Tensor) -> bool:
    """Return whether a buffer is copied for each forward, as one that may change at any time.

    Some kernels, as those of observers in quantization, and ``buffer.data`` leave no trace of a
    change. The statistics of batch norm are left out: they are many, and have a counter beside
    them.
    """
    return bytes_of(value) <= _SMALL and not isinstance(slot[0], BatchNorm)


def copy_of(value: Any, copies: Copies) -> Any:
    """Return a copy of a tensor without the graph behind it, the same one for the same tensor.

    In the place of a tensor, an attribute may also have something else, which is returned.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in copies:
        copies[id(value)] = value.detach().clone()
    return copies[id(value)]


def is_same(now: object, before: object) -> bool:
    """Return whether two tensors have the same shape and values, or neither is there."""
    if not (isinstance(now, torch.Tensor) and isinstance(before, torch.Tensor)):
        return now is before
    if now.is_nested or now.layout != before.layout or now.shape != before.shape:
        return False
    return all(map(torch.equal, dense_parts(now), dense_parts(before)))


class PlainValues:
    """The plain values of a module, and None, as they were at the last update."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.all = attributes
        self._names: list[str] = []
        self._values: list[Any] = []
        self._size = -1
        self.update()

    def update(self) -> None:
        """Read the values; in each mini-batch of all modules, so in little time."""
        if len(self.all) != self._size:
            self._size = len(self.all)
            self._names = [
                name
                for name, value in self.all.items()
                if (value is None or isinstance(value, _PLAIN)) and name not in OF_EVERY_MODULE
            ]
        self._values = [*map(self.all.get, self._names)]

    @property
    def values(self) -> dict[str, Any]:
        """The values by name."""
        return dict(zip(self._names, self._values, strict=True))


def plain_values(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values among a module's attributes."""
    return {
        name: value
        for name, value in attributes.items()
        if isinstance(value, _PLAIN) and name not in OF_EVERY_MODULE
    }
