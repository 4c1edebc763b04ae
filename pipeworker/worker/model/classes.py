"""The user's classes that may pass between layers of different stages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from pipeworker.facts.limits import LONGEST_NAME, MOST_TYPES
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport.structure import is_namedtuple


def classes_of(modules: Iterable[ModuleType]) -> dict[str, type]:
    """Return by name, sorted, the classes that may pass between stages.

    They are the named tuples, registered pytree nodes and enums of the modules, and the nodes
    registered under a name. Dataclasses of the modules that have tensors are registered first, if
    their fields are all that they hold. The classes that all workers report get numbers, which
    channels send.
    """
    found: dict[str, type] = {}
    for kind, entry in list(pytree.SUPPORTED_SERIALIZED_TYPES.items()):
        named = entry.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
        if named and kind not in pytree.BUILTIN_TYPES:
            found[_name(kind)] = kind
    found[_name(PackedSequence)] = PackedSequence  # torch's own modules are not searched
    for module in modules:
        for value in list(vars(module).values()):
            # By the type of the value: a lazy proxy that pretends to be a class is not resolved.
            if (
                issubclass(type(value), type)
                and value.__module__ == module.__name__
                and (
                    is_namedtuple(value)
                    or value in pytree.SUPPORTED_NODES
                    or issubclass(value, Enum)
                    or _register_dataclass(value)
                )
            ):
                found[_name(value)] = value
    short = sorted(name for name in found if len(name) <= LONGEST_NAME)
    return {name: found[name] for name in short[:MOST_TYPES]}


def _register_dataclass(kind: Any) -> bool:
    """Register a class with torch's pytree if it is a dataclass with tensors; return whether it is.

    The class must be made of its fields alone, so that its constructor makes an equal object.
    """
    if "__dataclass_params__" not in vars(kind) or issubclass(kind, (nn.Module, torch.Tensor)):
        return False
    own = fields(kind)
    if hasattr(kind, "__post_init__") or not all(field.init for field in own):
        return False
    if not any("Tensor" in str(field.type) for field in own):
        return False
    if {field.name for field in own} != {*inspect.signature(kind).parameters}:
        return False
    pytree.register_dataclass(kind)
    return True


def _name(kind: type) -> str:
    # A script's classes have another module where multiprocessing has spawned the process.
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"
