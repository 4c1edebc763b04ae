"""The user's classes that may pass between layers of different stages."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import ModuleType

from torch.nn.utils.rnn import PackedSequence

from pipeworker.facts.limits import LONGEST_NAME, MOST_TYPES
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport.structure import is_namedtuple


def classes_of(modules: Iterable[ModuleType]) -> dict[str, type]:
    """Return by name, sorted, the classes that may pass between stages.

    They are the named tuples, registered pytree nodes and enums of the modules, and the nodes
    registered under a name. The classes that all workers report get numbers, which channels send.
    """
    found: dict[str, type] = {}
    for kind, entry in list(pytree.SUPPORTED_SERIALIZED_TYPES.items()):
        named = entry.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
        if named and kind not in pytree.BUILTIN_TYPES:
            found[_name(kind)] = kind
    for kind in (PackedSequence,):  # torch's own modules are not searched
        found[_name(kind)] = kind
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
                )
            ):
                found[_name(value)] = value
    short = sorted(name for name in found if len(name) <= LONGEST_NAME)
    return {name: found[name] for name in short[:MOST_TYPES]}


def _name(kind: type) -> str:
    # A script's classes have another module where multiprocessing has spawned the process.
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"
