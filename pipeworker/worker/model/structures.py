"""Named tuples and registered dataclasses of the job may pass between stages: they get names.

A value's structure crosses the wire by name, never pickled, so torch's pytree wants a serialized
name for each class. Those that come with the job file get theirs here: module and class name, which
are the same on every worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from pipeworker.worker.internals import pytree


def name_classes(modules: Iterable[ModuleType]) -> None:
    """Name every named tuple and every registered pytree node that the modules define."""
    for module in modules:
        for value in list(vars(module).values()):
            # By its type: what pretends to be a class, a lazy proxy say, is not looked into.
            if issubclass(type(value), type) and value.__module__ == module.__name__:
                _name(value)


def _name(kind: type) -> None:
    # A script's classes have another module where multiprocessing has spawned the process.
    module = kind.__module__.replace("__mp_main__", "__main__")
    name = f"{module}.{kind.__qualname__}"
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        if kind not in pytree.SUPPORTED_SERIALIZED_TYPES:
            pytree._register_namedtuple(kind, serialized_type_name=name)
        return
    known: Any = pytree.SUPPORTED_SERIALIZED_TYPES.get(kind)
    if known is not None and known.serialized_type_name == pytree.NO_SERIALIZED_TYPE_NAME_FOUND:
        pytree.SUPPORTED_SERIALIZED_TYPES[kind] = known._replace(serialized_type_name=name)
        pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name] = kind
