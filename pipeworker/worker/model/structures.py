"""Which classes may pass between stages: named tuples, registered pytree nodes, enums as keys.

They are found where the job defines them, and where they were registered under a name. A worker
tells the others their names; those that all know get numbers, and channels say numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import ModuleType

from pipeworker.wire.messages.limits import LONGEST_NAME, MOST_TYPES
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport.structure import is_named


def classes_of(modules: Iterable[ModuleType]) -> dict[str, type]:
    """By name, the classes of the modules, and those registered under a name; sorted."""
    found: dict[str, type] = {}
    for kind, entry in list(pytree.SUPPORTED_SERIALIZED_TYPES.items()):
        named = entry.serialized_type_name != pytree.NO_SERIALIZED_TYPE_NAME_FOUND
        if named and kind not in pytree.BUILTIN_TYPES:
            found[_name(kind)] = kind
    for module in modules:
        for value in list(vars(module).values()):
            # By its type: what pretends to be a class, a lazy proxy say, is not looked into.
            if (
                issubclass(type(value), type)
                and value.__module__ == module.__name__
                and (is_named(value) or value in pytree.SUPPORTED_NODES or issubclass(value, Enum))
            ):
                found[_name(value)] = value
    short = sorted(name for name in found if len(name) <= LONGEST_NAME)
    return {name: found[name] for name in short[:MOST_TYPES]}


def _name(kind: type) -> str:
    # A script's classes have another module where multiprocessing has spawned the process.
    module = "__main__" if kind.__module__ == "__mp_main__" else kind.__module__
    return f"{module}.{kind.__qualname__}"
