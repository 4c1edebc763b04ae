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
