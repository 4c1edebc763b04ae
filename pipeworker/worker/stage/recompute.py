"""What makes a second forward equal the first: the buffers it sees and the input it starts from.

Random numbers repeat by themselves (:mod:`pipeworker.worker.stage.rng`), and both forwards run in
the same grad mode, because kernels may be chosen by it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pipeworker.worker.internals import buffers_of, version_of
from pipeworker.worker.stage.microbatch import MicroBatch

_state = threading.local()


def is_recomputing() -> bool:
    """Whether the layer's forward that asks is run for the second time on its micro-batch.

    For layers that count, log or cache: False in the first forward, in evaluation and outside of
    pipeworker. It must not change what the layer computes. (As torchgpipe offers.)
    """
    return getattr(_state, "recomputing", False)


_Slot = tuple[nn.Module, str]
Before = list[tuple[_Slot, torch.Tensor]]
"""What the buffers that change held before a micro-batch's first forward."""


class Buffers:
    """Buffers that forward changes (batch-norm statistics, counters) change once, not twice.

    The first forward of all finds out which buffers change; from then on only those are copied,
    before each forward that will be repeated.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = {id(m): m for layer in layers for m in layer.modules()}.values()
        self._slots: list[_Slot] = [(m, name) for m in modules for name in buffers_of(m)]
        self._changing: list[_Slot] | None = None
        self._steady: list[_Slot] = []

    @contextmanager
    def first_forward(self, mb: MicroBatch) -> Iterator[None]:
        """Keep what the forward starts from."""
        slots = self._slots if self._changing is None else self._changing
        copies: dict[int, torch.Tensor] = {}  # a buffer that two modules share stays one
        saved = [
            (slot, copies.setdefault(id(value), value.detach().clone()))
            for slot in slots
            if (value := _get(slot)) is not None
        ]
        looks = [] if self._changing is None else [(slot, _look(slot)) for slot in self._steady]
        yield
        if self._changing is None:
            # By value: batch norm changes its statistics without a trace in their version.
            self._changing = [slot for slot, value in saved if not _same(_get(slot), value)]
            saved = [(slot, value) for slot, value in saved if slot in self._changing]
            self._steady = [slot for slot in self._slots if slot not in self._changing]
        for slot, look in looks:
            if _look(slot) != look and (value := _get(slot)) is not None:
                # It begins to change only now: what it was is gone, but it will change only once.
                self._changing.append(slot)
                self._steady.remove(slot)
                saved.append((slot, value.detach().clone()))
        mb.before = saved or None

    @contextmanager
    def second_forward(self, mb: MicroBatch) -> Iterator[None]:
        """Let the forward see what the first one saw, and leave no trace."""
        _state.recomputing = True
        try:
            with self._put_back(mb):
                yield
        finally:
            _state.recomputing = False

    @contextmanager
    def _put_back(self, mb: MicroBatch) -> Iterator[None]:
        if not self._changing:
            yield
            return
        after = [(slot, _get(slot)) for slot in self._changing]
        before, mb.before = mb.before, None
        for (module, name), value in before or ():
            buffers_of(module)[name] = value
        try:
            yield
        finally:
            for (module, name), kept in after:
                buffers_of(module)[name] = kept


def _get(slot: _Slot) -> torch.Tensor | None:
    module, name = slot
    return buffers_of(module).get(name)


def _look(slot: _Slot) -> tuple[int, int]:
    """Differs after an assignment, and after a change in place that leaves a trace."""
    value = _get(slot)
    return id(value), -1 if value is None else version_of(value)


def _same(now: torch.Tensor | None, before: torch.Tensor) -> bool:
    return now is not None and now.shape == before.shape and torch.equal(now, before)
