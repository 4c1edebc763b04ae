"""Random streams that do not depend on how layers are grouped into stages.

Every number that a layer draws in forward comes from a stream seeded by (seed, step, micro-batch,
layer); the data is read under a stream of its own. Seeding covers torch's generators (CPU and the
worker's accelerator), Python's ``random``, and NumPy's legacy generator.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

_PATH = Struct("<6q")
_LAYER, _BUILD, _DATA, _EVALUATION, _EVALUATION_DATA, _UPDATE, _APART, _BACKWARD = range(8)
_POSITIVE = (1 << 63) - 1


def _derive(kind: int, seed: int, *path: int) -> int:
    """Derive a 64-bit seed from a path of numbers; seeds of different paths are unrelated."""
    packed = _PATH.pack(kind, len(path), seed, *path, *([0] * (3 - len(path))))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Return the seed of a layer's forward for one micro-batch of one step."""
    return _derive(_LAYER, seed, step, microbatch, layer)


def backward_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Return the seed of a layer's backward for one micro-batch of one step."""
    return _derive(_BACKWARD, seed, step, microbatch, layer)


def build_seed(seed: int, layer: int) -> int:
    """Return the seed under which a layer given as a callable is built."""
    return _derive(_BUILD, seed, layer)


def data_seed(seed: int, epoch: int) -> int:
    """Return the seed of the stream under which ``data()`` is read in an epoch."""
    return _derive(_DATA, seed, epoch)


def evaluation_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Return the seed of a layer's forward in the evaluation pass after a step."""
    return _derive(_EVALUATION, seed, step, microbatch, layer)


def evaluation_data_seed(seed: int, _: int) -> int:
    """Return the seed of the stream under which ``evaluation()`` is read, in each pass."""
    return _derive(_EVALUATION_DATA, seed)


def update_seed(seed: int, step: int, layer: int, tie: int) -> int:
    """Return the seed under which ``before_update`` gets a layer's, or a tied, parameters."""
    return _derive(_UPDATE, seed, step, layer, tie)


def seed_all(seed: int, accelerator: Generator | None = None) -> None:
    """Seed every generator that the user's code may draw from. It takes a few microseconds."""
    torch.default_generator.manual_seed(seed)
    if accelerator is not None:
        accelerator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def accelerator_generator(device: torch.device) -> Generator | None:
    """Return the default generator of an accelerator; None on the CPU."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device.type)
    own = getattr(module, "default_generators", None)
    found: Any = None if own is None else own[device.index or 0]
    return found or SimpleNamespace(  # the module has functions instead of an object
        manual_seed=module.manual_seed,
        get_state=module.get_rng_state,
        set_state=module.set_rng_state,
    )


class Generator(Protocol):
    """The methods of :class:`torch.Generator` that are used of an accelerator's generator."""

    def manual_seed(self, seed: int) -> Any: ...

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor) -> Any: ...


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore every generator's state on exit."""
    process = Stream(_generator_in_use())
    before = process.states()
    try:
        yield
    finally:
        process.continue_from(before)


@contextmanager
def apart(number: int, accelerator: Generator | None) -> Iterator[None]:
    """Draw torch's numbers from a stream of their own; the one that is active does not advance.

    The stream is seeded by the seed of the active one and a number.
    """
    generators = [torch.default_generator, *([accelerator] if accelerator is not None else [])]
    seed = _derive(_APART, torch.default_generator.initial_seed() & _POSITIVE, number)
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _generator_in_use() -> Generator | None:
    """Return the generator of the accelerator that this process already computes on, if any."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return None
    module = torch.get_device_module(current.type)
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    return accelerator_generator(
        torch.device(current.type, torch.accelerator.current_device_index())
    )


States = tuple[Any, Any, Any, Any]
"""The states of torch's CPU generator, Python's, NumPy's and an accelerator's, if there is one."""


def have_drawn(before: States, after: States) -> bool:
    """Return whether a number was drawn between two states of the generators."""
    torch_state, python_state, numpy_state, accelerator_state = after
    numpy_before = before[2]["state"]
    return not (
        torch.equal(torch_state, before[0])
        and python_state == before[1]
        and numpy_state["state"]["pos"] == numpy_before["pos"]
        and np.array_equal(numpy_state["state"]["key"], numpy_before["key"])
        and numpy_state["has_gauss"] == before[2]["has_gauss"]
        and (accelerator_state is None or torch.equal(accelerator_state, before[3]))
    )


class Stream:
    """A random stream that is switched in for a while, and later continues where it was."""

    def __init__(self, accelerator: Generator | None = None) -> None:
        self._accelerator = accelerator
        self._states: States | None = None

    def restart(self, seed: int) -> None:
        """Restart the stream from a seed, inside :meth:`active` only."""
        seed_all(seed, self._accelerator)

    def states(self) -> States:
        """Return the generators' states: those of the stream inside :meth:`active` only."""
        return (
            torch.default_generator.get_state(),
            random.getstate(),
            np.random.get_state(legacy=False),
            self._accelerator.get_state() if self._accelerator is not None else None,
        )

    def continue_from(self, states: States) -> None:
        """Continue the stream from earlier states, inside :meth:`active` only."""
        torch_state, python_state, numpy_state, accelerator_state = states
        torch.default_generator.set_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if self._accelerator is not None and accelerator_state is not None:
            self._accelerator.set_state(accelerator_state)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the context.

        The generators are not restored on exit, because each layer is seeded before its forward.
        """
        if self._states is not None:
            self.continue_from(self._states)
        try:
            yield
        finally:
            self._states = self.states()
