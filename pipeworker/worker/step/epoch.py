"""One pass over the user's data, and the reading position in it.

A position is plain data with these entries:

- ``epoch``: number of the epoch.
- ``read``: number of mini-batches read in that epoch.
- ``began``: states of the user's own generators when the epoch began, if there are any.

On resume, the mini-batches before the position are read again and dropped. A stateful source, with
``state_dict`` and ``load_state_dict``, is not read again; its position also has:

- ``source``: its state.
- ``over``: whether it is exhausted.
- ``drawn``: states of its generators.
- ``random``: states of the random stream.
"""

from __future__ import annotations

import copy
import random
import reprlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from pipeworker.errors import UsageError, a_type
from pipeworker.worker.blame import user_code
from pipeworker.worker.stage import rng

Generators = dict[str, Any]
"""The user's own random generators that data may draw from, each once, by where it was found.

A loader, its sampler or its dataset may have one, and so may the module that defines one of them.
The data of an epoch depends on what was drawn from them in the epochs before."""

_INVALID_POSITION = "the position in the data: {}; resume from another checkpoint"
_FAULTS = (RuntimeError, TypeError, ValueError, LookupError, OverflowError)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_INDICES = {"pos": 624, "buffer_pos": 4}
"""Entries of a NumPy state that NumPy does not check, and the maximum of each."""


def generators_of_function(function: Any) -> Generators:
    """Return the generators of the module that defines a function, and of a method's object."""
    owner = getattr(function, "__self__", function)
    return _distinct([*_module("function", function), ("function", owner)])


def generators_of_source(source: Any) -> Generators:
    """Return the generators of an iterable, of a loader's parts, and of their modules."""
    parts = list(_parts(source))
    modules = [found for place, part in parts for found in _module(place, part)]
    return _distinct([*parts, *modules])


def _parts(source: Any) -> Iterator[tuple[str, Any]]:
    yield "data", source
    dataset = getattr(source, "dataset", None)
    if not hasattr(dataset, "load_state_dict"):  # else it saves its own
        yield "dataset", dataset
    yield "sampler", getattr(source, "sampler", None)
    batches = getattr(source, "batch_sampler", None)
    yield "batch_sampler", batches
    yield "batch_sampler.sampler", getattr(batches, "sampler", None)


def _module(place: str, thing: Any) -> list[tuple[str, Any]]:
    module = sys.modules.get(str(getattr(thing, "__module__", None)))
    return [(f"{place}:module", module)] if module else []


def _distinct(places: list[tuple[str, Any]]) -> Generators:
    found: Generators = {}
    seen: set[int] = set()
    for place, thing in places:
        attributes = getattr(thing, "__dict__", None)
        for name, value in attributes.items() if isinstance(attributes, dict) else ():
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


def restore_states(found: Generators, states: Any) -> None:
    """Restore the result of :func:`generator_states`; skip a name that only one of the two has.

    Raises:
        UsageError: a state does not fit its generator.
    """
    for name, generator in found.items():
        with _rejecting_faults(name):
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
    """Restore the states of the stream, which is active.

    Raises:
        UsageError: the value is not a set of states of a stream.
    """
    with _rejecting_faults("the stream"):
        if states[2] is not None:
            _checked_state(states[2])
        stream.continue_from(states)


@contextmanager
def _rejecting_faults(name: str) -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        why = f"{name} rejects its state ({error!r:.200})"
        raise UsageError(_INVALID_POSITION.format(why)) from None


def _checked_state(state: Any) -> Any:
    if not isinstance(state, dict):
        raise TypeError(f"it is a {type(state).__name__}")
    words = {**state, **state["state"]} if isinstance(state["state"], dict) else state
    for name, most in _INDICES.items():
        if not 0 <= words.get(name, 0) <= most:
            raise ValueError(f"{name} is {words[name]!r}")
    return state


END = object()
"""The marker after the last mini-batch."""

_MOST = 2**63 - 1
_WITH_STATE = {"source", "over", "drawn", "random"}
_ENTRIES = {"began": dict, "source": object, "over": bool, "drawn": dict, "random": tuple}


def validate_position(position: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a position from an untrusted source after checking its entries.

    Raises:
        UsageError: the value is not a valid position.
    """

    def reject(why: str) -> NoReturn:
        raise UsageError(_INVALID_POSITION.format(why))

    if not isinstance(position, Mapping):
        reject(f"it is a {type(position).__name__}")
    for name in ("epoch", "read"):
        number = position.get(name)
        if type(number) is not int or not 0 <= number <= _MOST:
            reject(f"{name} is {reprlib.repr(number)}")
    for name, value in position.items():
        if name not in ("epoch", "read") and not isinstance(value, _ENTRIES.get(name, ())):
            reject(f"{reprlib.repr(name)} is {reprlib.repr(value)}")
    if len(_WITH_STATE & position.keys()) not in (0, len(_WITH_STATE)):
        reject(f"it has not all of {', '.join(sorted(_WITH_STATE))}")
    return position


class Epoch:
    """A pass over data; it is created and used while the random stream of the data is active.

    At a position in this epoch (empty for none) a stateful source resumes; any other begins again
    with its generators restored.

    Attributes:
        count: number of mini-batches read.
        stateful: whether the source has ``state_dict`` and ``load_state_dict``.
        one_shot: whether the source is an iterator, which cannot be started again.
    """

    def __init__(
        self, data: Any, name: str, number: int, stream: rng.Stream, position: Mapping[str, Any]
    ) -> None:
        self.number = number
        self.count = 0
        self._name = name
        self._stream = stream
        self._ended = False
        self._state_before_read: dict[str, Any] = {}  # of a stateful source
        began = position.get("began", {})
        with user_code(f"{name}()"):
            found = generators_of_function(data) if callable(data) else {}
            restore_states(found, began)
            self._began = generator_states(found)
            source = self._source = data() if callable(data) else data
            self.stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
            loader = isinstance(source, DataLoader)
            if loader or not self.stateful:  # other stateful sources save their own generators
                more = generators_of_source(source)
                restore_states(more, began)
                self._began |= generator_states(more)
                found |= more
            self._all_generators = found
            self._loader_generators = found if loader else {}
            if "source" in position:
                self._load(position["source"])
            self._iterator = self._iterate(source)
            self.one_shot = self._iterator is data
        if "source" in position:
            restore_states(self._loader_generators, position["drawn"])
            restore_stream(stream, position["random"])
            self.count = position["read"]
            # A source in its final state may yield nothing, or begin its next epoch.
            self._ended = position["over"]

    def _load(self, state: Any) -> None:
        if not self.stateful:
            raise UsageError(
                f"{self._name}(): gave {a_type(self._source)}, which has no load_state_dict, but "
                "the data of the checkpoint had one; resume with the same data"
            )
        self._source.load_state_dict(copy.deepcopy(state))

    def _iterate(self, source: Any) -> Iterator[Any]:
        if hasattr(source, "__iter__"):
            return iter(source)
        if hasattr(source, "__getitem__"):
            return (source[index] for index in range(len(source)))
        raise UsageError(
            f"{self._name}(): gave {a_type(source)}; return an iterable of (input, target) "
            "mini-batches"
        )

    @property
    def length(self) -> int:
        """The length of the source in mini-batches; 0 if it has none."""
        try:
            return len(self._source)
        except Exception:  # of the user's __len__; a value that is only displayed fails no job
            return 0

    def next_batch(self) -> Any:
        """Return the next mini-batch, or END."""
        if self._ended:
            return END
        if self.stateful:
            self._state_before_read = self._source_state()
        with user_code(f"{self._name}()"):
            item = next(self._iterator, END)
        self._ended = item is END
        self.count += not self._ended
        return item

    def skip(self, count: int) -> None:
        """Read `count` mini-batches and drop them.

        Raises:
            UsageError: the epoch has fewer.
        """
        for _ in range(count):
            if self.next_batch() is END:
                raise UsageError(
                    f"{self._name}(): gave {self.count} mini-batches in epoch {self.number}, fewer "
                    "than were read before the checkpoint; resume with the same data"
                )

    def rewind(self) -> None:
        """Restore the user's own generators to their states at the beginning of the epoch."""
        restore_states(self._all_generators, self._began)

    def position(self, before_last: bool) -> dict[str, Any]:
        """Return the reading position; with `before_last`, that before the last mini-batch read."""
        position: dict[str, Any] = {"epoch": self.number, "read": self.count - before_last}
        if self._began:
            position["began"] = self._began
        if self.stateful:
            position |= self._state_before_read if before_last else self._source_state()
        return position

    def _source_state(self) -> dict[str, Any]:
        """Return the entries of a position that a stateful source needs to resume here."""
        source, own, over = self._source, self._loader_generators, self._ended
        with user_code(f"{self._name}()"):
            state = copy.deepcopy(source.state_dict())
            if hasattr(source, "__len__") and not isinstance(source, DataLoader):
                over = over or len(source) == self.count
            sampler = getattr(source, "sampler", None)
        if isinstance(sampler, RandomSampler) and not over:  # draws again on resume
            own = {name: drawn for name, drawn in own.items() if drawn is not sampler.generator}
        drawn = generator_states(own)
        return {"source": state, "over": over, "drawn": drawn, "random": self._stream.states()}
