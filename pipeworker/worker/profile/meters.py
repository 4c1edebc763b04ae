"""Meters of one layer: seconds without waiting for a core, memory, operations, saved tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import flop_registry
from typing_extensions import Self

from pipeworker.worker.device.device import Stopwatch, stopwatch_for
from pipeworker.worker.internals import dense_parts, observing, pytree, storage_key

_QUEUE = "/proc/thread-self/schedstat"
"""Nanoseconds of the calling thread on a core, and waiting for one."""
_READINGS = 5
"""Readings of both clocks until they are of one moment."""


class UndisturbedStopwatch(Stopwatch):
    """A stopwatch of the CPU that stands still while the thread waits for a core.

    Several workers measure at the same time, perhaps on fewer cores than workers. What they share
    besides cores, as memory bandwidth, they share in training too, and it counts. Sleep counts.
    """

    def __init__(self, path: str = _QUEUE) -> None:
        self._file = -1
        with suppress(OSError):  # the kernel does not count it: waiting counts
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def mark(self) -> float:
        """Return the seconds on this stopwatch's clock."""
        waited = self._waited()
        for _ in range(_READINGS):
            now, before = perf_counter(), waited
            waited = self._waited()
            if waited == before:  # else the thread waited between the two readings
                break
        return now - waited

    def seconds(self, marks: Sequence[float]) -> float:
        """As :meth:`Stopwatch.seconds`, never negative: the two clocks are not one."""
        return max(0.0, super().seconds(marks))

    def _waited(self) -> float:
        if self._file < 0:
            return 0.0
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Close the file of the system that it reads."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def stopwatch_of_layers(device: torch.device) -> Iterator[Stopwatch]:
    """Yield the stopwatch with which layers are measured on a device."""
    if device.type != "cpu":
        yield stopwatch_for(device)
        return
    with closing(UndisturbedStopwatch()) as own:
        yield own


class Flops:
    """Counts, inside the context, floating-point operations as torch's flop counter does."""

    def __init__(self) -> None:
        self._observer = observing(self._observe)
        self.count = 0

    def __enter__(self) -> Self:
        self._observer.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._observer.__exit__(*error)

    def _observe(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], made: Any) -> bool:
        """Count an operation; return whether torch's counter knows it."""
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.count += int(formula(*args, **named, out_val=made))
        return formula is not None


class Operations(Flops):
    """Counts, inside the context, operations and the bytes of the tensors that they make.

    An operation is one multiplication or addition of torch's flop counter, or else one element of
    the result.

    Attributes:
        live: bytes of the tensors that exist now.
        peak: the most bytes that have existed at once since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, Any] = {}

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of some tensors out of the count."""
        for tensor in tensors:
            for part in dense_parts(tensor):
                self._storages.setdefault(storage_key(part), part)

    def restart(self) -> int:
        """Begin a new peak; return the bytes of the tensors that exist now."""
        self.peak = self.live
        return self.live

    def _observe(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], made: Any) -> bool:
        tensors = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        parts = [part for tensor in tensors for part in dense_parts(tensor)]
        known = super()._observe(func, args, named, made)
        if not known and not func.is_view:
            self.count += sum(part.numel() for part in parts)
        for part in parts:
            self._add(part)
        return known

    def _add(self, tensor: torch.Tensor) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._storages:
            return
        size = storage.nbytes()

        def freed(_: object) -> None:
            self._storages.pop(key, None)
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


class OperationCounter(Stopwatch):
    """A stopwatch that shows operations instead of seconds."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def mark(self) -> int:
        """Return the number of operations so far."""
        return self._operations.count


class SavedTensors:
    """Counts the bytes that graphs made inside :meth:`active` save, each storage once."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Note what is saved inside the context."""

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self._storages.update(_storages_of([tensor]))
            return tensor.detach()  # a saved output would else refer to its own graph

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def take(self, tensors: Iterable[torch.Tensor]) -> int:
        """Return how many saved bytes are those of some tensors; they are not counted again."""
        return sum(
            self._storages.pop(key).nbytes()
            for key in _storages_of(tensors)
            if key in self._storages
        )

    def rest(self, others: Iterable[torch.Tensor] = ()) -> int:
        """Return the saved bytes that were not taken, with those of some other tensors."""
        all_of_them = {**self._storages, **_storages_of(others)}
        return sum(storage.nbytes() for storage in all_of_them.values())


def _storages_of(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the storages of some tensors by their keys."""
    parts = [part for tensor in tensors for part in dense_parts(tensor)]
    return {storage_key(part): part.untyped_storage() for part in parts}


class _DeviceMemory:
    """The memory of a device's allocator, which counts by itself; 0 if it does not."""

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device.type)
        names = ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats")
        found = [getattr(module, name, None) for name in names]
        functions: list[Any] = [lambda _: 0] * len(names) if None in found else found
        self._used, self._most, self._reset = (partial(one, device) for one in functions)

    @property
    def peak(self) -> int:
        return int(self._most())

    def know(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: what exists is told apart by :meth:`restart`."""

    def restart(self) -> int:
        self._reset()
        return int(self._used())

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


Memory = Operations | _DeviceMemory
"""A meter of the memory that is used inside the context."""


def memory_meter(device: torch.device, *, compiles: bool = False) -> Memory:
    """Return a meter of memory on a device.

    On the CPU, whose allocator does not count, it sees each operation. A compiled layer has none,
    so nothing is counted.
    """
    return _DeviceMemory(device) if device.type != "cpu" or compiles else Operations()
