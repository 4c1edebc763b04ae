"""Random streams that do not depend on how layers are grouped into stages.

Whatever a layer draws in forward comes from a stream seeded by (seed, step, micro-batch, layer), so
the same numbers come out for any number of stages, and again when the forward is recomputed. The
data is read under a stream of its own. Three generators are seeded each time: torch's (CPU and the
worker's accelerator), Python's ``random``, and NumPy's legacy one if it is imported.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any, Protocol

import torch

from pipeworker.worker.device.visible import module_of

_PATH = Struct("<6q")
_LAYER, _BUILD, _DATA, _EVALUATION, _EVALUATION_DATA, _UPDATE = range(6)


def _derive(kind: int, seed: int, *path: int) -> int:
    """A 64-bit seed from a path of numbers, none related to another's."""
    packed = _PATH.pack(kind, len(path), seed, *path, *([0] * (3 - len(path))))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def layer_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Seed of a layer's forward for one micro-batch of one step."""
    return _derive(_LAYER, seed, step, microbatch, layer)


def build_seed(seed: int, layer: int) -> int:
    """Seed under which a layer given as a callable is built."""
    return _derive(_BUILD, seed, layer)


def data_seed(seed: int, epoch: int) -> int:
    """Seed of the stream under which ``data()`` is read in an epoch."""
    return _derive(_DATA, seed, epoch)


def evaluation_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Seed of a layer's forward in the evaluation pass after a step."""
    return _derive(_EVALUATION, seed, step, microbatch, layer)


def evaluation_data_seed(seed: int, _: int) -> int:
    """Seed of the stream under which ``evaluation()`` is read, in each pass."""
    return _derive(_EVALUATION_DATA, seed)


def update_seed(seed: int, step: int, layer: int, tie: int = 0) -> int:
    """Seed under which ``before_update`` is called with a layer's parameters, or a tied one's."""
    return _derive(_UPDATE, seed, step, layer, tie)


def seed_all(seed: int, accelerator: Generator | None = None) -> None:
    """Seed every generator the user's code may draw from. Takes a few microseconds."""
    torch.default_generator.manual_seed(seed)
    if accelerator is not None:
        accelerator.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def accelerator_generator(device: torch.device) -> Generator | None:
    """The default generator of an accelerator; None on the CPU."""
    if device.type == "cpu":
        return None
    module = module_of(device.type)
    own = getattr(module, "default_generators", None)
    found: Generator = _OfModule(module) if own is None else own[device.index or 0]
    return found


class Generator(Protocol):
    """What is asked of an accelerator's generator, as :class:`torch.Generator` has it."""

    def manual_seed(self, seed: int) -> Any: ...

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor) -> Any: ...


class _OfModule:
    """Of a kind of device whose module has functions in its place."""

    def __init__(self, module: Any) -> None:
        self.manual_seed = module.manual_seed
        self.get_state = module.get_rng_state
        self.set_state = module.set_rng_state


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave every generator as it was found."""
    accelerator = _used()
    before = states(accelerator)
    try:
        yield
    finally:
        restore(before, accelerator)


def _used() -> Generator | None:
    """Of the accelerator that this process has begun to compute on."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return None
    module = module_of(current.type)
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    return accelerator_generator(
        torch.device(current.type, torch.accelerator.current_device_index())
    )


States = tuple[Any, Any, Any, Any]


def states(accelerator: Generator | None = None) -> States:
    """Of torch's CPU generator, Python's and NumPy's, and that of an accelerator."""
    numpy: Any = sys.modules.get("numpy")
    return (
        torch.default_generator.get_state(),
        random.getstate(),
        numpy.random.get_state(legacy=False) if numpy is not None else None,
        accelerator.get_state() if accelerator is not None else None,
    )


def restore(states: States, accelerator: Generator | None = None) -> None:
    """Let them draw as they did; one without a state is left out."""
    torch_state, python_state, numpy_state, accelerator_state = states
    torch.default_generator.set_state(torch_state)
    random.setstate(python_state)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and numpy_state is not None:
        numpy.random.set_state(numpy_state)
    if accelerator is not None and accelerator_state is not None:
        accelerator.set_state(accelerator_state)


class Stream:
    """A random stream that is switched in for a while and goes on where it was.

    Args:
        accelerator: the generator of the worker's, if it has one.
    """

    def __init__(self, accelerator: Generator | None = None) -> None:
        self._accelerator = accelerator
        self._states: States | None = None

    def restart(self, seed: int) -> None:
        """Begin the stream anew from a seed; only inside :meth:`active`, as what follows."""
        seed_all(seed, self._accelerator)

    def states(self) -> States:
        """What is drawn next."""
        return states(self._accelerator)

    def go_on(self, states: States) -> None:
        """Draw what was drawn next."""
        restore(states, self._accelerator)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream. Layers are seeded before each forward, so nothing is put back."""
        if self._states is not None:
            self.go_on(self._states)
        try:
            yield
        finally:
            self._states = self.states()
