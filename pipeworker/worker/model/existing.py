"""Parameters that exist before layers given as callables are built.

A callable can return or use a parameter of a global variable, a closure or a default argument. Two
callables then share it, which is seen by identity where one process builds both layers. In two
processes the parameter is two objects. They have the same origin: the path by which the callables
reach the parameter. Each process has all callables, and finds the same paths.

A function without arguments may keep what it returns (``functools.cache``), once the first layer
is built that needs it. Its parameters are *cached*; they have origins as well.
"""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from pipeworker.facts.connections import Cached, Existing
from pipeworker.facts.layer_names import numbered
from pipeworker.job.signatures import signature
from pipeworker.record.checkpoint.tensor_file import raw_bytes
from pipeworker.worker.internals import is_fake

_MOST = 1 << 16
"""Objects that are visited, or wait for it, at most: a callable may use a data set or a library."""
_PLAIN = (str, bytes, int, float, complex, bool, type(None), CodeType)
_CONTAINERS = (dict, list, tuple, set)
_WITHOUT = frozenset({"torch", "pipeworker", *sys.stdlib_module_names})
"""Packages whose functions and classes reach no parameter of the user's."""
_DIGEST_SIZE = 8
_DIGESTED = 16
"""Number of elements of each parameter that a digest of initial weights covers."""
_CACHED = type(functools.cache(print))


class ByParameter:
    """Texts by parameter; the parameters are not kept alive."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[weakref.ref[nn.Parameter], str]] = {}

    def __setitem__(self, parameter: nn.Parameter, text: str) -> None:
        self._texts[id(parameter)] = weakref.ref(parameter), text

    def __getitem__(self, parameter: nn.Parameter) -> str:
        """Return the text of a parameter, or ""."""
        alive, text = self._texts.get(id(parameter), (None, ""))
        return text if alive is not None and alive() is parameter else ""


class Origins:
    """The origins of the parameters that a model's entries reach before any layer is built.

    Attributes:
        kept: by path, the functions that keep parameters which were built with layers.
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        self._found, self._cached = ByParameter(), ByParameter()
        self._caches: dict[str, Any] = {}
        self.kept: dict[str, Cached] = {}
        if not all(isinstance(entry, nn.Module) for entry in entries):
            self._visit(_items(entries), self._found)

    def __getitem__(self, parameter: nn.Parameter) -> str:
        """Return the origin of a parameter, or ""."""
        return self._found[parameter] or self._cached[parameter]

    def of(self, layers: Sequence[nn.Module], first: int) -> list[Existing]:
        """Return the parameters that built layers train, and that existed before or are cached.

        A frozen one may be in several layers: no copy of it changes.
        """
        for path, function in [*self._caches.items()]:  # what they keep may reach more
            parameters = self._visit([(path, _cached(function))], self._cached)
            if parameters and path not in self.kept:  # what is loaded later is the same everywhere
                name = getattr(function, "__name__", "function")
                self.kept[path] = Cached(_digest(path), name, digest(parameters))
        return [
            Existing(numbered(index, key), origin)
            for index, layer in enumerate(layers, first)
            for key, parameter in layer.named_parameters()
            if parameter.requires_grad and (origin := self[parameter])
        ]

    def release(self) -> None:
        """Forget the functions that keep what they return; all layers are built."""
        self._caches.clear()

    def _visit(self, start: Iterable[tuple[str, Any]], found: ByParameter) -> list[nn.Parameter]:
        """Note the origins of parameters that objects reach; return those that had none."""
        parameters: list[nn.Parameter] = []
        visited: dict[int, Any] = {}  # keeps objects alive, so that no other one has their id
        waiting = deque(start)
        while waiting and len(visited) < _MOST:
            path, value = waiting.popleft()
            if id(value) in visited:
                continue
            visited[id(value)] = value
            if issubclass(type(value), torch.Tensor):  # isinstance runs code of a proxy
                if isinstance(value, nn.Parameter) and not self._found[value]:
                    found[value] = _digest(path)
                    parameters.append(value)
                continue
            if type(value) is _CACHED and _is_without_arguments(value):
                self._caches[f"{path}()"] = value
            try:
                held = list(islice(_held_by(value), _MOST))
            except Exception:  # of the user's code, which may be behind an attribute
                continue
            leading = ((f"{path}/{name}", one) for name, one in held if _may_lead_on(one))
            waiting.extend(islice(leading, _MOST - len(waiting)))
        return parameters


def _held_by(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, by names that are the same in each process."""
    if isinstance(value, (FunctionType, type)) and _is_without(value):
        return
    match value:
        case FunctionType():
            code, names = value.__code__, [*_names(value.__code__)]
            cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
            yield from _variables(dict(_contents(cells)), code.co_freevars, names)
            yield from _variables(value.__globals__, names, names)
            yield from _items(value.__defaults__ or ())
            yield from (value.__kwdefaults__ or {}).items()
        case MethodType():
            yield from (("function", value.__func__), ("self", value.__self__))
        case functools.partial():
            yield from (("function", value.func), ("args", value.args), ("kwargs", value.keywords))
        case staticmethod() | classmethod():
            yield "function", value.__func__
        case property():
            yield "function", value.fget
        case dict() | MappingProxyType():
            for number, (key, one) in enumerate(value.items()):
                yield repr(key) if isinstance(key, (str, int)) else str(number), one
        case list() | tuple() | deque():
            yield from _items(value)
        case type():
            yield from _items(value.__bases__)
        case _:
            yield "class", type(value)
            for kind in type(value).__mro__:
                slots = vars(kind).get("__slots__", ())
                for name in (slots,) if isinstance(slots, str) else slots:
                    yield name, getattr(value, name, None)
    if not isinstance(value, ModuleType):
        yield "attributes", getattr(value, "__dict__", None)


def _variables(
    namespace: Mapping[str, Any], names: Iterable[str], attributes: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield the variables with some names; of a module, those of its own with some `attributes`."""
    seen: set[int] = set()
    waiting = deque((name, namespace[name]) for name in names if name in namespace)
    while waiting:
        name, value = waiting.popleft()
        if not isinstance(value, ModuleType):
            yield name, value
        elif id(value) not in seen and value.__name__.partition(".")[0] not in _WITHOUT:
            seen.add(id(value))
            own = vars(value)
            waiting.extend((f"{name}.{key}", own[key]) for key in attributes if key in own)


def digest(parameters: Iterable[nn.Parameter]) -> int:
    """Return a checksum of the first elements of each parameter that has memory."""
    found = 0
    for parameter in parameters:
        if not (parameter.is_meta or is_fake(parameter)):
            some = parameter.detach().reshape(-1)[:_DIGESTED].cpu()
            found = zlib.crc32(raw_bytes(some).numpy().tobytes(), found)
    return found


def _digest(path: str) -> str:
    return hashlib.blake2b(path.encode(), digest_size=_DIGEST_SIZE).hexdigest()


def _may_lead_on(value: Any) -> bool:
    """Return whether a value may refer to others; runs no code of the value's class."""
    kind = type(value)
    return not issubclass(kind, _PLAIN) and (kind not in _CONTAINERS or len(value) > 0)


def _items(values: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    return ((str(index), one) for index, one in enumerate(values))


def _contents(cells: Iterable[tuple[str, CellType]]) -> Iterator[tuple[str, Any]]:
    for name, cell in cells:
        with suppress(ValueError):  # it is empty
            yield name, cell.cell_contents


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function's code, and in functions inside."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _is_without(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).partition(".")[0] in _WITHOUT


def _is_without_arguments(cached: Any) -> bool:
    found = signature(cached)
    return found is not None and not found.parameters


def _cached(function: Any) -> Any:
    """Return what a function without arguments keeps, without a call of the user's code."""
    return function() if function.cache_info().currsize else None
