"""The user's own random generators that data draws from, and their states."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import BuiltinMethodType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from pipeworker.errors import UsageError, a_type
from pipeworker.worker.stage import rng

Places = list[tuple[str, Any]]
Generators = dict[str, Any]
"""The user's own random generators that data may draw from, each once, by where it was found.

A loader, its sampler or its dataset may have one, and so may the module that defines one of them,
a module that this one imports, and the objects that load items, as transforms, which may be global.
The data of an epoch depends on what was drawn from them in the epochs before."""

INVALID_POSITION = "the position in the data: {}; resume from another checkpoint"
_FAULTS = (RuntimeError, TypeError, ValueError, LookupError, OverflowError)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_OF_THE_STREAM = (
    torch.default_generator,
    *(getattr(function, "__self__", None) for function in (random.random, np.random.random)),
)
_OF_CODE = {FunctionType, classmethod, staticmethod, property, *map(type, vars(type).values())}
_OF_CODE -= {MemberDescriptorType}
_LEAVES = (*_GENERATORS, type, ModuleType, torch.Tensor, np.ndarray, str, bytes, int, float)
_MOST_OBJECTS, _MOST_ITEMS = 1000, 100
"""Objects whose contents are searched for generators, and items of a list or dict."""
_INDICES = {"pos": 624, "buffer_pos": 4}
"""Entries of a NumPy state that NumPy does not check, and the maximum of each."""


def own_generators(data: Any) -> Generators:
    """Return the generators that are known before ``data`` is called, if it is a function.

    They are those of the module that defines it, and those inside of it or of a method's object.
    """
    if not callable(data):
        return {}
    owner = getattr(data, "__self__", data)
    return _of_objects([("function", owner)], _module("function", data))


def generators_of_source(source: Any) -> Generators:
    """Return the generators of an iterable, of a loader's parts, and of their modules."""
    return _of_objects(list(_parts(source)))


def of_sampler(name: str) -> bool:
    """Return whether :func:`generators_of_source` has found a generator in a sampler alone."""
    return name.startswith(("sampler.", "batch_sampler."))


def generators_of_loading(dataset: Any, collate: Any) -> Generators:
    """Return the generators that the loading of items may draw from, in a loader's process."""
    return _of_objects([("dataset", dataset), ("collate_fn", collate)])


def _of_objects(parts: Places, modules: Iterable[tuple[str, Any]] = ()) -> Generators:
    """Return the generators of some modules, and of objects, all inside of them, and their modules.

    A loader's parts are a few of the objects inside of it, but are named as what they are.
    """
    modules = [*modules, *(found for place, part in parts for found in _module(place, part))]
    nested = list(_nested(parts))
    for place, thing in tuple(nested):  # its type's: a proxy may pretend to be of another module
        nested += _module(place, thing if type(thing) is FunctionType else type(thing))
    found = [*parts, *modules, *nested]
    found += _imported(found)
    own = [(p, one) for p, one in found if type(one) is ModuleType and not _is_installed(one)]
    return _distinct([*found, *_nested(own)])


def _parts(source: Any) -> Iterator[tuple[str, Any]]:
    yield "data", source
    dataset = getattr(source, "dataset", None)
    if not hasattr(dataset, "load_state_dict"):  # else it saves its own
        yield "dataset", dataset
    yield "sampler", getattr(source, "sampler", None)
    batches = getattr(source, "batch_sampler", None)
    yield "batch_sampler", batches
    yield "batch_sampler.sampler", getattr(batches, "sampler", None)
    yield "collate_fn", getattr(source, "collate_fn", None)


def _module(place: str, thing: Any) -> Places:
    module = sys.modules.get(str(getattr(thing, "__module__", None)))
    return [(f"{place}:module", module)] if module else []


def _imported(places: Places) -> Iterator[tuple[str, Any]]:
    """Yield the modules that the user's modules import, or import functions and classes from.

    A module of Python's or of an installed package is yielded, and those that it imports are not.
    """
    queue = deque((place, thing) for place, thing in places if type(thing) is ModuleType)
    seen = {id(module) for _, module in queue}
    while queue:
        place, module = queue.popleft()
        if _is_installed(module):
            continue
        for name, value in list(vars(module).items()):
            for found in _module_behind(f"{place}.{name}", value):
                if id(found[1]) not in seen:
                    seen.add(id(found[1]))
                    queue.append(found)
                    yield found


def _module_behind(place: str, value: Any) -> Places:
    kind = type(value)
    if kind is ModuleType:
        return [(place, value)]
    return _module(place, value) if kind is FunctionType or issubclass(kind, type) else []


def _is_installed(module: ModuleType) -> bool:
    top = module.__name__.partition(".")[0]
    folders = Path(getattr(module, "__file__", None) or "").parts
    return (
        top in sys.stdlib_module_names
        or top == __name__.partition(".")[0]
        or not {"site-packages", "dist-packages"}.isdisjoint(folders)
    )


def _nested(places: Places) -> Iterator[tuple[str, Any]]:
    """Yield the objects inside of others, as the transforms of a dataset, nearest first.

    The search is limited: a dataset may have a list of a million samples.
    """
    queue, seen = deque(places), {id(thing) for _, thing in places}
    for _ in range(_MOST_OBJECTS):
        if not queue:
            return
        place, thing = queue.popleft()
        for name, value in _contents(thing):
            if id(value) not in seen and not issubclass(type(value), _LEAVES):
                seen.add(id(value))
                queue.append((f"{place}.{name}", value))
                yield queue[-1]


def _contents(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to. Only its own type is asked: a proxy may pretend another."""
    kind = type(thing)
    if kind in (list, tuple):
        yield from ((str(index), value) for index, value in enumerate(thing[:_MOST_ITEMS]))
    elif kind is dict:
        items = list(itertools.islice(thing.items(), _MOST_ITEMS))  # a thread may change it
        yield from ((str(key), value) for key, value in items)
    elif kind is functools.partial:
        yield from (("func", thing.func), ("args", thing.args), ("keywords", thing.keywords))
    elif kind in (MethodType, BuiltinMethodType):
        yield "__self__", thing.__self__
    elif kind is ModuleType:  # its loader and its specification refer to how it was imported
        yield from ((n, value) for n, value in list(vars(thing).items()) if not n.startswith("__"))
    else:
        attributes = getattr(thing, "__dict__", None)
        if isinstance(attributes, dict):
            yield from list(attributes.items())
        if kind is FunctionType:
            yield from _of_function(thing)
        else:
            for base in kind.__mro__[:-1]:
                yield from _of_class(base, thing)


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names of a function's closure, and its arguments with a default."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # it has no value yet
            yield name, cell.cell_contents
    defaults = function.__defaults__ or ()
    code = function.__code__
    yield from zip(code.co_varnames[: code.co_argcount][-len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def _of_class(base: type, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's slots of a class, and the attributes of the class that are no code."""
    for name, value in list(vars(base).items()):
        if name.startswith("__") or type(value) in _OF_CODE:
            continue
        with suppress(AttributeError):  # a slot has no value yet
            yield name, value.__get__(thing) if type(value) is MemberDescriptorType else value


def _distinct(places: Places) -> Generators:
    found: Generators = {}
    seen = set(map(id, _OF_THE_STREAM))
    searched: set[int] = set()
    for place, thing in places:
        if id(thing) in searched:
            continue
        searched.add(id(thing))
        for name, value in _contents(thing):
            kind = type(value)
            if issubclass(kind, _GENERATORS) and kind is not random.SystemRandom:
                if id(value) not in seen:
                    found[f"{place}.{name}"] = value
                seen.add(id(value))
    return found


def generator_states(found: Generators) -> dict[str, Any]:
    """Return the state of each generator, as plain data."""
    return {name: _state(generator) for name, generator in found.items()}


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


@contextmanager
def preserve_generators_of(modules: Iterable[ModuleType]) -> Iterator[None]:
    """Restore the state of each generator that is a global name of a module on exit."""
    found = _distinct([(module.__name__, module) for module in modules])
    before = generator_states(found)
    try:
        yield
    finally:
        restore_states(found, before)


def restore_states(found: Generators, states: Any) -> None:
    """Restore the result of :func:`generator_states`; skip a name that only one of the two has."""
    for name, generator in found.items():
        with rejecting_faults(name):
            if name in states:
                _restore_state(generator, states[name])


def _restore_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_checked_state(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _checked_state(state)
    else:
        generator.set_state(state)


def restore_stream(stream: rng.Stream, states: Any) -> None:
    """Restore the states of the stream, which is active."""
    with rejecting_faults("the stream"):
        _checked_state(states[2])
        stream.continue_from(states)


@contextmanager
def rejecting_faults(name: str) -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        why = f"{name} rejects its state ({error!r:.200})"
        raise UsageError(INVALID_POSITION.format(why)) from None


def _checked_state(state: Any) -> Any:
    if not isinstance(state, dict):
        raise TypeError(f"it is {a_type(state)}")
    words = {**state, **state["state"]} if isinstance(state["state"], dict) else state
    for name, most in _INDICES.items():
        if not 0 <= words.get(name, 0) <= most:
            raise ValueError(f"{name} is {words[name]!r}")
    return state


def equal_states(state: Any, other: Any) -> bool:
    """Return whether two states, as plain data, are equal."""
    if isinstance(state, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(state) is type(other) and torch.equal(state, other)
    if isinstance(state, np.ndarray) or isinstance(other, np.ndarray):
        return type(state) is type(other) and np.array_equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        return state.keys() == other.keys() and all(
            equal_states(value, other[name]) for name, value in state.items()
        )
    if isinstance(state, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(state) == len(other) and all(map(equal_states, state, other))
    return bool(state == other)
