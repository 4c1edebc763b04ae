"""What graphs save, in the host's memory for as long as no backward needs it.

Whole memories are moved (torch's *storages*), each once, however many tensors in it are saved: all
come back with their strides and alignment, by which kernels are chosen. What is on the device
anyway stays: parameters and buffers, what the stage was given, and what it gave.

A memory leaves while the stage's next action computes, and is let go of when that has ended. A
fetch brings it back, into memory of its own. The graph alone refers to it then, and lets go of it
node by node, as of anything that it saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipeworker.worker.device.copies import Copies
from pipeworker.worker.internals import version_of
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.values import distinct_tensors

_ALIGNED = 64
"""Bytes: fresh memory begins at a multiple."""
_Key = tuple[int, int]
"""Of a memory: its address, and the version that it was saved in."""


class Offload:
    """See the module, for one stage.

    Args:
        layers: whose parameters and buffers stay.
    """

    def __init__(self, layers: Sequence[nn.Module], copies: Copies) -> None:
        self._layers = layers
        self._copies = copies
        self._own: frozenset[int] = frozenset()
        self._leaving: list[Saved] = []

    def begin(self) -> None:
        """A mini-batch starts: parameters and buffers may be other ones."""
        own = (t for layer in self._layers for t in (*layer.parameters(), *layer.buffers()))
        self._own = frozenset(_addresses(own))

    @contextmanager
    def saving(self, mb: MicroBatch) -> Iterator[None]:
        """A forward whose graph is wanted later: what it saves begins to leave."""
        arrived = [tensor for tensors, _ in mb.arrived.values() for tensor in tensors]
        given = _addresses(distinct_tensors((mb.value, mb.target, arrived)))
        saved = mb.saved = Saved(self._copies, self._own.union(given))
        with saved_tensors_hooks(saved.pack, unpack):
            yield
        saved.leave(distinct_tensors(mb.output))
        self._leaving.append(saved)

    def settle(self, mb: MicroBatch) -> None:
        """The stage's action for a micro-batch has ended: what was leaving before it has left."""
        for saved in self._leaving:
            if saved is not mb.saved:
                saved.left()
        self._leaving = [saved for saved in self._leaving if saved is mb.saved]

    def fetch(self, mb: MicroBatch) -> None:
        """What a graph saved begins to come back."""
        assert mb.saved
        mb.saved.fetch()

    def arrive(self, mb: MicroBatch) -> None:
        """What is computed from now on needs it."""
        assert mb.saved
        mb.saved.arrive()
        mb.saved = None


class Saved:
    """What the graph of one micro-batch saved.

    Args:
        stay: the addresses of memory that does.
    """

    def __init__(self, copies: Copies, stay: frozenset[int]) -> None:
        self._copies = copies
        self._stay = stay
        # The graph alone holds a memory: what it lets go of early is not fetched.
        self._memories: dict[_Key, weakref.ref[_Memory]] = {}
        self._coming: list[_Memory] = []
        self._mark: Any = None

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Keep a tensor for a node; it begins to leave."""
        version = version_of(tensor)
        if not self._moves(tensor):
            return _Stays(tensor, version)
        storage = tensor.untyped_storage()
        key = storage.data_ptr(), version
        known = self._memories.get(key)
        memory = None if known is None else known()
        if memory is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._copies.follow()
            memory = _Memory(whole, self._copies)
            self._memories[key] = weakref.ref(memory)
        return _Moves(tensor, version, memory)

    def _moves(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or not self._copies.holds(tensor):
            return False
        if tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        right = storage.nbytes() >= self._copies.least and not address % _ALIGNED
        return right and address not in self._stay

    def leave(self, output: Iterable[torch.Tensor]) -> None:
        """The forward has ended; what its output keeps on the device stays."""
        self._mark = self._copies.mark()
        kept = {*_addresses(output)}
        for (address, _), known in self._memories.items():
            if address in kept and (memory := known()):
                memory.stay()

    def left(self) -> None:
        """Let go of what has been copied."""
        self._copies.wait(self._mark)
        for memory in self._there():
            memory.left()

    def fetch(self) -> None:
        """Begin to bring back what has left."""
        self._copies.follow()
        self._coming = self._there()
        for memory in self._coming:
            memory.fetch()
        self._mark = self._copies.mark()

    def arrive(self) -> None:
        """What is computed from now on may use it."""
        if not self._coming:
            self.fetch()
        self._copies.wait(self._mark)
        self._coming = []

    def _there(self) -> list[_Memory]:
        return [memory for known in self._memories.values() if (memory := known())]


class _Memory:
    """A storage: on the device, on its way, or in the host's memory."""

    __slots__ = ("__weakref__", "_away", "_copies", "_here")

    def __init__(self, whole: torch.Tensor, copies: Copies) -> None:
        self._copies = copies
        self._here: torch.Tensor | None = whole
        self._away: torch.Tensor | None = copies.out(whole)

    def stay(self) -> None:
        self._away = None

    def left(self) -> None:
        if self._away is not None:
            self._here = None

    def fetch(self) -> None:
        if self._here is None:
            assert self._away is not None
            self._here = self._copies.back(self._away)
        self._away = None

    def here(self) -> torch.UntypedStorage:
        """On the device; at once, where a backward comes that nobody announced."""
        if self._here is None:
            self._copies.follow()
            self.fetch()
            self._copies.wait(self._copies.mark())
        assert self._here is not None
        return self._here.untyped_storage()


class _Stays:
    """A tensor that is kept where it is."""

    __slots__ = ("_tensor", "_then")

    def __init__(self, tensor: torch.Tensor, version: int) -> None:
        self._tensor, self._then = tensor, version

    def tensor(self) -> torch.Tensor:
        _check(self._tensor, self._then, self._tensor)
        return self._tensor


class _Moves:
    """A tensor whose memory is moved."""

    __slots__ = ("_changes", "_lies", "_memory", "_then")

    def __init__(self, tensor: torch.Tensor, version: int, memory: _Memory) -> None:
        self._then, self._memory = version, memory
        self._lies = tensor.storage_offset(), tensor.size(), tensor.stride()
        # Of its dtype; counts the changes in place, and holds no memory.
        self._changes = tensor.detach()
        self._changes.data = torch.empty(0, dtype=tensor.dtype)

    def tensor(self) -> torch.Tensor:
        whole = self._memory.here()
        found = torch.empty(0, dtype=self._changes.dtype, device=whole.device)
        found.set_(whole, *self._lies)
        _check(self._changes, self._then, found)
        return found


Packed = _Stays | _Moves


def unpack(packed: Packed) -> torch.Tensor:
    """What a node saved.

    Raises:
        RuntimeError: it was changed in place, as torch says it where there are no hooks.
    """
    return packed.tensor()


def _check(changes: torch.Tensor, version: int, saved: torch.Tensor) -> None:
    now = version_of(changes)
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{saved.type()} {list(saved.shape)}] is at version {now}; expected "
            f"version {version} instead"
        )


def _addresses(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    for tensor in tensors:
        if tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor):
            yield tensor.untyped_storage().data_ptr()
