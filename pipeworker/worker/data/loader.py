"""A map-style DataLoader that begins at a later mini-batch, without loading those before it.

Its sampler is advanced. The mini-batches are those that reading would give, because random numbers
continue where they were:

- Without processes, items are loaded under the stream of the data, which a position records.
- The processes of a loader draw from streams of their own. After each mini-batch a process writes
  their states into memory that it shares with the worker. A position records what the states were
  after an equal number of mini-batches of each process, and new processes restore them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from struct import Struct
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pipeworker.worker.data.generators import (
    equal_states,
    generator_states,
    generators_of_loading,
    rejecting_faults,
)
from pipeworker.worker.internals import forget_iterator, keep_iterator, kept_iterator

_PYTHON, _NUMPY = Struct("=625I?d"), Struct("=624Ii?d")
_WORDS = 624
_TORCH_BYTES = len(torch.Generator().get_state())
_BYTES = _TORCH_BYTES + _PYTHON.size + _NUMPY.size


_persisting: WeakKeyDictionary[DataLoader[Any], _ProcessStreams] = WeakKeyDictionary()
"""The streams of processes that persist from an iteration of a loader to the next one."""


def is_map_style(source: Any) -> bool:
    """Return whether a source is a loader whose sampler can be advanced."""
    return (
        isinstance(source, DataLoader)
        and type(source).__iter__ is DataLoader.__iter__
        and not isinstance(source.dataset, IterableDataset)
        and source.in_order
    )


def end_processes(source: Any) -> None:
    """End the processes that a loader keeps from an earlier iteration; they have drawn numbers."""
    if isinstance(source, DataLoader) and kept_iterator(source) is not None:
        forget_iterator(source)


def set_aside(source: Any) -> Callable[[], None]:
    """Have a loader begin an iteration of its own, beside that of the processes that it keeps.

    Returns:
        A function that gives it the processes back; those that it has by then end.
    """
    kept = kept_iterator(source) if isinstance(source, DataLoader) else None
    if kept is None:
        return partial(end_processes, source)
    streams = _persisting.pop(source, None)
    keep_iterator(source, None)

    def give_back() -> None:
        end_processes(source)
        keep_iterator(source, kept)
        _persisting.pop(source, None)
        if streams is not None:
            _persisting[source] = streams

    return give_back


class AdvancedLoader:
    """An iteration over a map-style loader, the first mini-batches of which are not loaded.

    A loader's own iterator draws the seed of its processes, then iterates over the sampler. With
    `persistent_workers` it draws no seed in later epochs. A position records that (`reset`): an
    iteration that resumes there has new processes, but iterates over the sampler as if it had not
    drawn their seed.

    Attributes:
        iterator: the loader's own iterator.
        skipped: number of mini-batches that are not loaded: `count`, or as many below it as give
            each process the mini-batches that it would have had.
        complete: whether the sampler was advanced by all `skipped`.
        reached: states of this process's generators behind the first and the last mini-batch that
            the sampler was advanced by; None if none, or if other processes load items.
        persists: whether the processes are, or replace, those of an iteration before.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        position: Mapping[str, Any],
        watch: Callable[[], Any],
        restore: Callable[[Any], None],
    ) -> None:
        """Begin the iteration at a position, or without one at the first mini-batch.

        `watch` returns the states of the generators of this process, from which a sampler may draw,
        and `restore` restores them.
        """
        count, states = position.get("read", 0), position.get("processes")
        self._workers = workers = loader.num_workers
        self.skipped = count - count % max(1, workers)
        resets = bool(position.get("reset")) and workers > 0
        restores = workers > 0 and (resets or self.skipped > 0)
        fits = not restores or _fits(states, workers)
        before = watch() if resets else None
        again = partial(restore, before) if resets else None
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        sampler = _AdvancedSampler(getattr(loader, name), self.skipped, watch, again)
        replaced: dict[str, Any] = {name: sampler}
        self._streams: _ProcessStreams | None = None
        if workers:
            self._streams = _ProcessStreams(loader, states if restores and fits else None)
            replaced |= {"collate_fn": self._streams.collate, "worker_init_fn": self._streams.begin}
        with _replaced(loader, replaced):
            self.iterator: Iterator[Any] = iter(loader)
        if not workers:
            sampler.advance()
        if not sampler.began:  # the processes persist from an iteration before
            self._streams = _persisting.get(loader)
            if self._streams is not None:
                self._streams.begin_next()
        elif self._streams is not None and loader.persistent_workers:
            _persisting[loader] = self._streams
        self.persists = resets or not sampler.began
        self.complete = fits and sampler.began and not sampler.left
        self.reached = None if workers else sampler.reached

    def end(self, read: int) -> None:
        """Note that the iteration has ended after `read` mini-batches, in all."""
        if self._streams is not None:
            self._streams.end(read - self.skipped)

    def recorded(self, read: int) -> dict[str, Any] | None:
        """Return the entries of a position after `read` mini-batches; None if they are not known.

        It is one of the two last positions.
        """
        if not self._workers or (read < self._workers and not self.persists):
            return {}
        if self._streams is None:
            return None
        states = self._streams.states((read - self.skipped) // self._workers)
        return None if states is None else {"processes": states, "reset": self.persists}


def _fits(states: Any, workers: int) -> bool:
    if not isinstance(states, torch.Tensor) or states.shape != (workers, _BYTES):
        return False
    with rejecting_faults("a loader's process"):
        for row in states:
            found, _, _ = _decode(row.numpy().tobytes())
            torch.Generator().set_state(found)
    return True


@contextmanager
def _replaced(loader: DataLoader[Any], attributes: dict[str, Any]) -> Iterator[None]:
    """Replace attributes of a loader inside the context; a loader itself allows that for few."""
    before = {name: getattr(loader, name) for name in attributes}
    try:
        for name, value in attributes.items():
            object.__setattr__(loader, name, value)
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(loader, name, value)


class _AdvancedSampler:
    """A sampler whose next iteration that is used begins later.

    If there is a function `again`, that iteration calls it before it begins.

    Attributes:
        began: whether an iteration began.
        left: mini-batches by which it is not yet advanced.
        reached: see :class:`AdvancedLoader`.
    """

    def __init__(
        self, sampler: Any, count: int, watch: Callable[[], Any], again: Callable[[], None] | None
    ) -> None:
        self.began, self.left = False, count
        self.reached: tuple[Any, Any] | None = None
        self._sampler, self._watch, self._again = sampler, watch, again
        self._current: Iterator[Any] = iter(())

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self.began = True
        self._current = iter(() if self._again else self._sampler)
        return self._indices(self._current)

    def _indices(self, current: Iterator[Any]) -> Iterator[Any]:
        if self._again:
            self._again()
            self._again = None
            current = self._current = iter(self._sampler)
        self.advance()
        yield from current

    def advance(self) -> None:
        """Advance the iteration that began last."""
        first = None
        while self.left and next(self._current, self) is not self:
            self.left -= 1
            first = first or self._watch()
        if first:
            self.reached = first, self._watch()


class _ProcessStreams:
    """The random streams of a loader's processes, in memory that is shared with them."""

    def __init__(self, loader: DataLoader[Any], states: torch.Tensor | None) -> None:
        self._collate, self._begin = loader.collate_fn, loader.worker_init_fn
        # A process may be ahead by what it prefetches, and a position lags behind by one.
        slots = (loader.prefetch_factor or 0) + 3
        self._states = _shared(loader.num_workers, slots, _BYTES)
        self._unknown = _shared(1)
        self._restores = states is not None
        self._loaded: list[int] | None = [0] * loader.num_workers
        """Mini-batches of each process before this iteration; None if they are not known."""
        self._ended = False
        if states is not None:
            self._states[:, 0] = states

    def states(self, count: int) -> torch.Tensor | None:
        """Return the states after `count` mini-batches of each process; None if not all is known.

        The states of other generators than those of the stream are not known.
        """
        if self._unknown.item() or self._loaded is None:
            return None
        slots = [(loaded + count) % self._states.shape[1] for loaded in self._loaded]
        return self._states[range(len(slots)), slots]

    def end(self, count: int) -> None:
        """Note that the iteration has ended after `count` mini-batches of all processes."""
        if self._loaded is not None and not self._ended:
            processes = len(self._loaded)
            for process in range(processes):
                self._loaded[process] += (count - process + processes - 1) // processes
        self._ended = True

    def begin_next(self) -> None:
        """Begin another iteration with the same processes."""
        if not self._ended:  # what the processes had prefetched is lost
            self._loaded = None
        self._ended = False

    # In a process of the loader.

    def begin(self, process: int) -> None:
        """Restore the streams of this process, after the user's own ``worker_init_fn``."""
        if self._begin is not None:
            self._begin(process)
        info = get_worker_info()
        self._generators = generators_of_loading(info.dataset if info else None, self._collate)
        self._before = generator_states(self._generators)
        self._process, self._count = process, 0
        if self._restores:
            torch_state, python_state, numpy_state = _decode(self._slot().tobytes())
            torch.default_generator.set_state(torch_state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        else:
            self._write()

    def collate(self, items: Any) -> Any:
        """Call the user's own ``collate_fn``, which is the last call for a mini-batch."""
        batch = self._collate(items)
        self._count += 1
        self._write()
        return batch

    def _slot(self) -> Any:
        return self._states[self._process, self._count % self._states.shape[1]].numpy()

    def _write(self) -> None:
        encoded = _encode()
        drawn = self._generators and not equal_states(
            generator_states(self._generators), self._before
        )
        if encoded is None or drawn:
            self._unknown[0] = 1
        else:
            self._slot()[:] = np.frombuffer(encoded, dtype=np.uint8)


def _shared(*shape: int) -> torch.Tensor:
    zeros: Any = torch.zeros(shape, dtype=torch.uint8, device="cpu")
    shared: torch.Tensor = zeros.share_memory_()
    return shared


def _encode() -> bytes | None:
    """Return the states of the stream of this process; None if NumPy's is of another kind."""
    _, words, gauss = random.getstate()
    found: Any = np.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        return None
    state = found["state"]
    return (
        torch.default_generator.get_state().numpy().tobytes()
        + _PYTHON.pack(*words, gauss is not None, gauss or 0.0)
        + _NUMPY.pack(*state["key"].tolist(), state["pos"], found["has_gauss"], found["gauss"])
    )


def _decode(data: bytes) -> tuple[torch.Tensor, Any, Any]:
    """Return the states of torch, ``random`` and NumPy.

    Raises:
        ValueError: NumPy would read past the end of its state.
    """
    end = _TORCH_BYTES + _PYTHON.size
    *words, drawn, gauss = _PYTHON.unpack(data[_TORCH_BYTES:end])
    *key, position, has_gauss, other = _NUMPY.unpack(data[end:])
    if not 0 <= position <= _WORDS or not 0 <= words[-1] <= _WORDS:
        raise ValueError(f"its position is {position}, {words[-1]}")
    return (
        torch.frombuffer(bytearray(data[:_TORCH_BYTES]), dtype=torch.uint8),
        (3, tuple(words), gauss if drawn else None),
        ("MT19937", np.array(key, dtype=np.uint32), position, int(has_gauss), other),
    )
