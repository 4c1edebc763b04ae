"""The contents of objects, which code may change: they are compared, and put back."""

from __future__ import annotations

import itertools
import pickle
import random
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from types import CellType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeworker.worker.internals import is_fake, version_of
from pipeworker.worker.stage.values import is_dense
from pipeworker.worker.transport.structure import PLAIN_TYPES

_MOST = 1 << 10
"""The length of a container up to which its items are compared, and the objects of a value."""
_ENDS = (*PLAIN_TYPES, type)
_LARGEST = 1 << 16
"""The bytes of a tensor or an array up to which its numbers are put back."""
_Pair = tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]]
"""Classes of objects, a function that copies the content of one, and one that puts it back."""
_CONTAINERS: tuple[Any, ...] = (list, tuple, deque, OrderedDict, dict, set)


def _base_of(container: Any) -> Any:
    """Return the class whose methods a container is read by: those of a user may do more."""
    return next(kind for kind in _CONTAINERS if isinstance(container, kind))


def _of_dict(one: dict[Any, Any]) -> dict[Any, Any]:
    return dict(_base_of(one).items(one))


def _of_items(one: Any) -> list[Any]:
    return [*_base_of(one).__iter__(one)]


def _put_all(one: Any, items: Any) -> None:
    kind = _base_of(one)
    kind.clear(one)
    if isinstance(one, dict):
        for key, value in items.items():
            kind.__setitem__(one, key, value)
    else:
        (kind.update if isinstance(one, set) else kind.extend)(one, items)


def dict_of(value: Any) -> dict[str, Any] | None:
    """Return the attributes that an object has beside its slots, without a method of its class."""
    with suppress(AttributeError):  # it has slots alone
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
        return found
    return None


def slots_of(value: Any) -> list[tuple[MemberDescriptorType, Any]]:
    """Return the slots of an object that have values, and these."""
    found = []
    for kind in map(vars, type(value).__mro__):
        for slot in kind.values() if "__slots__" in kind else ():  # else it is a class of C
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it has no value
                    found.append((slot, slot.__get__(value)))
    return found


def _put_slots(one: Any, slots: list[tuple[MemberDescriptorType, Any]]) -> None:
    for slot, value in slots:
        slot.__set__(one, value)


def _of_cell(cell: CellType) -> list[Any]:
    with suppress(ValueError):  # it is empty
        return [cell.cell_contents]
    return []


def _put_cell(cell: CellType, content: list[Any]) -> None:
    for value in content:
        cell.cell_contents = value


def _of_variable(variable: ContextVar[Any]) -> list[Any]:
    with suppress(LookupError):  # it has no value yet
        return [variable.get()]
    return []


def _put_variable(variable: ContextVar[Any], content: list[Any]) -> None:
    for value in content:
        variable.set(value)


def _of_tensor(tensor: torch.Tensor) -> list[torch.Tensor]:
    is_plain = is_dense(tensor) and not is_fake(tensor) and not tensor.is_inference()
    if not is_plain or tensor.nbytes > _LARGEST or 0 in tensor.stride():  # an expanded one
        return []
    return [tensor.detach().clone()]


def _put_tensor(tensor: torch.Tensor, content: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for numbers in content:
            tensor.copy_(numbers)


def _of_array(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    is_plain = array.flags.writeable and not array.dtype.hasobject
    return [array.copy()] if is_plain and array.nbytes <= _LARGEST else []


def _put_array(array: np.ndarray[Any, Any], content: list[np.ndarray[Any, Any]]) -> None:
    for numbers in content:
        np.copyto(array, numbers)


_HOLDERS: tuple[_Pair, ...] = (
    (dict, _of_dict, _put_all),
    ((list, deque, set), _of_items, _put_all),
    (CellType, _of_cell, _put_cell),
    (ContextVar, _of_variable, _put_variable),
    (torch.Tensor, _of_tensor, _put_tensor),
)
_GENERATORS: tuple[_Pair, ...] = (
    (random.Random, lambda one: one.getstate(), lambda one, state: one.setstate(state)),
    (np.random.RandomState, lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    (
        np.random.Generator,
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
    (torch.Generator, lambda one: one.get_state(), lambda one, state: one.set_state(state)),
    (np.ndarray, _of_array, _put_array),
)
_PAIRS = (*_HOLDERS, *_GENERATORS)
_NUMBERED = (*(kind for kind, _, _ in _GENERATORS), itertools.count)
MUTABLE: tuple[Any, ...] = (dict, list, deque, set, ContextVar, SimpleNamespace, *_NUMBERED)
"""Classes whose objects may hold something else later."""
_HOLDING = (*MUTABLE, CellType)
Contents = list[tuple[Callable[[Any], None], Any]]
"""For objects, what puts back what each holds, and a copy of that."""


def number_of(value: Any) -> int | None:
    """Return a number for the state of a generator or an array, or None."""
    if not isinstance(value, _NUMBERED):  # nearly always
        return None
    if isinstance(value, itertools.count):
        return zlib.crc32(repr(value).encode())
    for kind, get, _ in _GENERATORS:
        if isinstance(value, kind):
            with suppress(NotImplementedError):  # a generator of the system's has no state
                state = get(value)
                if isinstance(state, torch.Tensor):  # its pickle is another one each time
                    state = state.numpy().tobytes()
                return zlib.crc32(pickle.dumps(state))
    return None


def contents_of(objects: list[Any]) -> Contents:
    """Return objects with copies of what they hold."""
    contents: Contents = []
    for one in objects:
        if slots := slots_of(one):
            contents.append((partial(_put_slots, one), slots))
        for kind, get, put in _PAIRS:
            if isinstance(one, kind):
                with suppress(NotImplementedError):  # a generator of the system's has no state
                    contents.append((partial(put, one), get(one)))
    return contents


def put_back(contents: Contents) -> None:
    """Put back what objects held."""
    for put, content in contents:
        put(content)


class Search:
    """A search of values for what may change in them.

    It goes through containers, functions, and objects of classes that modules with these names
    define.
    """

    def __init__(self, modules: set[str]) -> None:
        self.modules = modules

    def is_object(self, value: Any) -> bool:
        """Return whether a value is an object whose attributes are searched."""
        kind = type(value)
        own = kind is SimpleNamespace or kind.__module__ in self.modules
        return own and not isinstance(value, (type, nn.Module))

    def of(self, value: Any) -> tuple[list[Any], list[Any]]:
        """Return what shows a change of a value, and the objects that may hold something else."""
        shown: list[Any] = [value]
        objects: list[Any] = []
        waiting, searched = [value], set[int]()
        while waiting and len(shown) <= _MOST:
            one = waiting.pop()
            if isinstance(one, torch.Tensor):
                objects.append(one)
                shown.append(version_of(one))
            elif not isinstance(one, _ENDS) and id(one) not in searched:
                searched.add(id(one))
                if isinstance(one, _HOLDING) or (self.is_object(one) and slots_of(one)):
                    objects.append(one)
                    shown.append(number_of(one))
                items = [*self._items(one)]
                shown += items
                waiting += [item for item in reversed(items) if type(item) not in _ENDS]
        return shown, objects

    def _items(self, one: Any) -> Iterator[Any]:
        if isinstance(one, _CONTAINERS):
            size = _base_of(one).__len__(one)
            yield size
            if size <= _MOST and not isinstance(one, set):
                yield from _of_items(one)
                yield from _of_dict(one).values() if isinstance(one, dict) else ()
        elif isinstance(one, FunctionType):
            yield from one.__defaults__ or ()
            yield from (one.__kwdefaults__ or {}).values()
            yield from one.__closure__ or ()
            if vars(one):
                yield vars(one)
        elif isinstance(one, MethodType):
            yield from (one.__func__, one.__self__)
        elif isinstance(one, partial):
            yield from (one.func, one.args, one.keywords)
        elif isinstance(one, CellType):
            yield from _of_cell(one)
        elif isinstance(one, ContextVar):
            yield from _of_variable(one)
        elif isinstance(one, (staticmethod, classmethod)):
            yield one.__func__
        elif isinstance(one, property):
            yield from (one.fget, one.fset)
        elif self.is_object(one):
            yield dict_of(one)
            yield from (value for _, value in slots_of(one))
