"""Offload: tensors that graphs save wait in the host's memory until a backward needs them.

Whole storages are moved, each once, however many saved tensors lie in it: all tensors come back
with their strides and alignment, by which kernels are chosen. Storages that are on the device
anyway stay: parameters and buffers, the stage's inputs, and its outputs.

A storage is copied to the host while the stage's next action computes, and its device memory is
freed when that action has ended. It is not copied earlier, because some kernels write to a tensor
after torch has saved it for them, as that of ``rrelu`` writes its noise. A fetch copies a storage
back into new memory. Only the graph refers to that memory, and frees it node by node, like
everything that it saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.internals import counter_of, version_of
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.values import distinct_tensors
from pipeworker.worker.transport.layout import ALIGNMENT


class Copies:
    """Synchronous copies on the CPU (offload there is only useful to tests), and the interface.

    Copies are made in the order in which they are requested. No method blocks the host.

    Attributes:
        least: bytes; a smaller storage is not worth a copy.
    """

    least = 1

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        return tensor.is_cpu

    def follow(self) -> None:
        """Make later copies wait for all computation submitted so far."""

    def out(self, source: torch.Tensor) -> torch.Tensor:
        """Copy a uint8 tensor to the host; keep the source until a later mark is waited for."""
        return source.clone()

    def back(self, source: torch.Tensor) -> torch.Tensor:
        """Copy a uint8 tensor to the device; keep the result until a later mark is waited for."""
        return source.clone()

    def mark(self) -> Any:
        """Return a mark after the copies so far."""

    def wait(self, mark: Any) -> None:
        """Make computation submitted from now on wait for a mark."""


class StreamCopies(Copies):
    """Copies in a stream of an accelerator, to and from pinned memory.

    No tensor is recorded as used in that stream: a copied tensor is freed only after the computing
    stream has waited for the copy, so the allocator can reuse its memory at once, however far ahead
    the host is.
    """

    def __init__(self, accelerator: Accelerator, least: int = 1 << 14) -> None:
        self.least = least
        self._accelerator = accelerator

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._accelerator.holds(tensor)

    def follow(self) -> None:
        self._accelerator.offloads.wait_event(self._accelerator.event(self._accelerator.current))

    def out(self, source: torch.Tensor) -> torch.Tensor:
        return self._copy(source, self._accelerator.pinned(len(source)))

    def back(self, source: torch.Tensor) -> torch.Tensor:
        # Allocate for the computing stream, where the result is used and freed.
        target = self._accelerator.empty(len(source))
        if torch.are_deterministic_algorithms_enabled():  # torch fills it, in that stream
            self.follow()
        return self._copy(source, target)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self._accelerator.using(self._accelerator.offloads):
            self._accelerator.copy(target, source)
        return target

    def mark(self) -> Any:
        return self._accelerator.event(self._accelerator.offloads)

    def wait(self, mark: Any) -> None:
        self._accelerator.current.wait_event(mark)


class Offload:
    """The offload of one stage's graphs; its layers' parameters and buffers stay on the device."""

    def __init__(self, layers: Sequence[nn.Module], copies: Copies) -> None:
        self._layers = layers
        self._copies = copies
        self._own: frozenset[int] = frozenset()
        self._copying: list[SavedGraph] = []

    def begin(self) -> None:
        """Start a mini-batch: parameters and buffers may be other tensors than before."""
        own = (t for layer in self._layers for t in (*layer.parameters(), *layer.buffers()))
        self._own = frozenset(addresses_of(own))

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave more tensors of the layers on the device until the next mini-batch."""
        self._own = self._own.union(addresses_of(tensors))

    @contextmanager
    def saving(self, mb: MicroBatch) -> Iterator[None]:
        """Start to copy to the host what the forward inside the context saves for backward."""
        arrived = [tensor for tensors, _ in mb.arrived.values() for tensor in tensors]
        inputs = addresses_of(distinct_tensors((mb.value, mb.target, arrived)))
        saved = mb.offloaded = SavedGraph(self._copies, self._own.union(inputs))
        with saved_tensors_hooks(saved.pack, Packed.unpack):
            yield
        saved.end_forward(distinct_tensors(mb.output))
        self._copying.append(saved)

    def release_copied(self, mb: MicroBatch) -> None:
        """Free device memory after an action: copies started before the action are complete."""
        for saved in self._copying:
            if saved is not mb.offloaded:
                saved.release_copied()
        self._copying = [saved for saved in self._copying if saved is mb.offloaded]


class SavedGraph:
    """The tensors that the graph of one micro-batch saved; storages at addresses `stay` stay."""

    def __init__(self, copies: Copies, stay: frozenset[int]) -> None:
        self._copies = copies
        self._stay = stay
        # By address. Only the graph refers to a storage: one that it frees early is not copied.
        self._storages: WeakValueDictionary[int, _Storage] = WeakValueDictionary()
        self._fetching: list[_Storage] = []
        self._mark: Any = None

    def pack(self, tensor: torch.Tensor) -> Packed:
        """Keep a tensor for a node, whose storage will be copied to the host."""
        if not self._moves(tensor):
            return Packed(tensor, None)
        storage = tensor.untyped_storage()
        memory = self._storages.get(storage.data_ptr())
        if memory is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memory = self._storages[storage.data_ptr()] = _Storage(whole, self._copies)
        return Packed(tensor, memory)

    def _moves(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or not self._copies.holds(tensor):
            return False
        if tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        if not tensor.data_ptr():  # zeros without memory, which forward-mode gradients have
            return False
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        large = storage.nbytes() >= self._copies.least and not address % ALIGNMENT
        return large and address not in self._stay

    def end_forward(self, output: Iterable[torch.Tensor]) -> None:
        """Start to copy the storages to the host, but those that the output keeps on the device."""
        kept = {*addresses_of(output)}
        self._copies.follow()
        for address, memory in self._storages.items():
            if address not in kept:
                memory.start_copy()
        self._mark = self._copies.mark()

    def release_copied(self) -> None:
        """Free device memory whose copy to the host is complete."""
        self._copies.wait(self._mark)
        for memory in self._storages.values():
            memory.release_copied()

    def fetch(self) -> None:
        """Start to copy back the storages whose device memory was freed."""
        self._copies.follow()
        self._fetching = list(self._storages.values())
        for memory in self._fetching:
            memory.fetch()
        self._mark = self._copies.mark()

    def arrive(self) -> None:
        """Make later work on the device wait for the copies."""
        if not self._fetching:
            self.fetch()
        self._copies.wait(self._mark)
        self._fetching = []


class _Storage:
    """A storage: on the device, in the host's memory, or both while it is copied."""

    __slots__ = ("__weakref__", "_copies", "_on_device", "_on_host", "address")

    def __init__(self, whole: torch.Tensor, copies: Copies) -> None:
        self.address = whole.data_ptr()
        self._copies = copies
        self._on_device: torch.Tensor | None = whole
        self._on_host: torch.Tensor | None = None

    def start_copy(self) -> None:
        """Start to copy the storage to the host."""
        assert self._on_device is not None
        self._on_host = self._copies.out(self._on_device)

    def release_copied(self) -> None:
        """Free the device memory, if the storage was copied."""
        if self._on_host is not None:
            self._on_device = None

    def fetch(self) -> None:
        """Start to copy the storage back, unless it is on the device."""
        if self._on_device is None:
            assert self._on_host is not None
            self._on_device = self._copies.back(self._on_host)
        self._on_host = None

    def on_device(self) -> torch.UntypedStorage:
        """Return the storage on the device; fetch it now if a backward was not announced."""
        if self._on_device is None:
            self._copies.follow()
            self.fetch()
            self._copies.wait(self._copies.mark())
        assert self._on_device is not None
        return self._on_device.untyped_storage()


class Packed:
    """A tensor that a node saved. It stays on the device, unless its `storage` is moved."""

    __slots__ = ("_saved_version", "_storage", "_tensor", "_view")

    def __init__(self, tensor: torch.Tensor, storage: _Storage | None) -> None:
        self._saved_version, self._storage, self._tensor = version_of(tensor), storage, tensor
        if storage is not None:
            self._view = tensor.storage_offset(), tensor.size(), tensor.stride()
            self._tensor = counter_of(tensor)

    @property
    def address(self) -> int | None:
        """The address at which the tensor's storage was when it was saved; None if it has none."""
        if self._storage is not None:
            return self._storage.address
        return next(addresses_of((self._tensor,)), None)

    def unpack(self) -> torch.Tensor:
        """Return the tensor, with its strides and alignment.

        Raises:
            RuntimeError: the tensor was changed in place; torch raises the same without hooks.
        """
        saved = self._tensor
        if self._storage is not None:
            whole = self._storage.on_device()
            saved = torch.empty(0, dtype=saved.dtype, device=whole.device)
            saved.set_(whole, *self._view)
        now = version_of(self._tensor)
        if now != self._saved_version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{saved.type()} {list(saved.shape)}] is at version {now}; "
                f"expected version {self._saved_version} instead"
            )
        return saved


def addresses_of(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    """Yield the addresses of the storages of those tensors that have elements in memory."""
    for tensor in tensors:
        has_storage = tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor)
        if has_storage and tensor.data_ptr():
            yield tensor.untyped_storage().data_ptr()
