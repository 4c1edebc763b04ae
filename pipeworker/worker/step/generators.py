"""Random generators of the user's own that data may draw from, beside the stream it is read under.

A loader, its sampler or its dataset may hold one, and so may the module where one of them is
written. What they give in an epoch depends on what was drawn in those before.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.stage import rng

Found = dict[str, Any]
"""Generators by where they were found, each once."""

REFUSED = "the position in the data is none that data can be read on from"
_FAULTS = (RuntimeError, TypeError, ValueError, LookupError, OverflowError)
_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_INDICES = {"pos": 624, "buffer_pos": 4}
"""In a state of NumPy's, which does not look at them, and the most each may be."""


def around(function: Any) -> Found:
    """Of the module where a function is written, and of what it is a method of."""
    owner = getattr(function, "__self__", function)
    return _distinct([*_module("function", function), ("function", owner)])


def within(source: Any) -> Found:
    """Of an iterable and the parts a loader has, and of the modules where these are written."""
    parts = list(_parts(source))
    modules = [found for place, part in parts for found in _module(place, part)]
    return _distinct([*parts, *modules])


def _parts(source: Any) -> Iterator[tuple[str, Any]]:
    yield "data", source
    dataset = getattr(source, "dataset", None)
    if not hasattr(dataset, "load_state_dict"):  # else it answers for its own
        yield "dataset", dataset
    yield "sampler", getattr(source, "sampler", None)
    batches = getattr(source, "batch_sampler", None)
    yield "batch_sampler", batches
    yield "batch_sampler.sampler", getattr(batches, "sampler", None)


def _module(place: str, thing: Any) -> list[tuple[str, Any]]:
    module = sys.modules.get(str(getattr(thing, "__module__", None)))
    return [(f"{place}:module", module)] if module else []


def _distinct(places: list[tuple[str, Any]]) -> Found:
    found: Found = {}
    seen: set[int] = set()
    for place, thing in places:
        held = getattr(thing, "__dict__", None)
        for name, value in held.items() if isinstance(held, dict) else ():
            kind = type(value)
            if issubclass(kind, _KINDS) and kind is not random.SystemRandom:
                if id(value) not in seen:
                    found[f"{place}.{name}"] = value
                seen.add(id(value))
    return found


def states(found: Found) -> dict[str, Any]:
    """What each draws from, as a plain value."""
    return {name: _state(generator) for name, generator in found.items()}


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def put_back(found: Found, states: Any) -> None:
    """Let each draw as it did then.

    Args:
        states: what :func:`states` gave; what only one of the two has is left out.

    Raises:
        UsageError: a state is none of such a generator.
    """
    for name, generator in found.items():
        try:
            if name in states:
                _put_back(generator, states[name])
        except _FAULTS as error:
            raise UsageError(f"{REFUSED}: {name} cannot draw on ({error!r:.200})") from None


def _put_back(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_checked(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _checked(state)
    else:
        generator.set_state(state)


def put_back_stream(stream: rng.Stream, states: Any) -> None:
    """Let the stream, which is active, draw as it did then.

    Raises:
        UsageError: these are none of its states.
    """
    try:
        if states[2] is not None:
            _checked(states[2])
        stream.go_on(states)
    except _FAULTS as error:
        raise UsageError(f"{REFUSED}: the stream cannot draw on ({error!r:.200})") from None


def _checked(state: Any) -> Any:
    if not isinstance(state, dict):
        raise TypeError(f"it is a {type(state).__name__}")
    words = {**state, **state["state"]} if isinstance(state["state"], dict) else state
    for name, most in _INDICES.items():
        if not 0 <= words.get(name, 0) <= most:
            raise ValueError(f"{name} is {words[name]!r}")
    return state
