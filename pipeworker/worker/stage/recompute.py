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
_Copies = dict[int, torch.Tensor]
"""By the id of the buffer: one that two modules share stays one."""
Before = list[tuple[_Slot, torch.Tensor | None]]
"""What the buffers that change held before a micro-batch's first forward."""


class Buffers:
    """Buffers that forward changes (batch-norm statistics, counters) change once, not twice.

    The first forward of all finds out which buffers change; from then on only those are copied,
    before each forward that will be repeated. Of the others one copy is kept, because a forward may
    begin to change them.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        modules = {id(m): m for layer in layers for m in layer.modules()}.values()
        self._slots: list[_Slot] = [(m, name) for m in modules for name in buffers_of(m)]
        self._changing: list[_Slot] | None = None
        self._steady: dict[_Slot, _Kept] = {}
        self._until: dict[_Slot, torch.Tensor | None] = {}
        """Of those that began to change later, what they were until then."""

    @contextmanager
    def first_forward(self, mb: MicroBatch) -> Iterator[None]:
        """Keep what the forward starts from."""
        copies: _Copies = {}
        for slot in self._changed():  # by something else than a forward
            self._steady[slot] = _Kept(slot, _copy(_get(slot), copies))
        slots = self._slots if self._changing is None else self._changing
        mb.before = [(slot, _copy(_get(slot), copies)) for slot in slots]
        yield
        if self._changing is None:
            # By value: batch norm changes its statistics without a trace in their version.
            mb.before = [(slot, value) for slot, value in mb.before if not _same(_get(slot), value)]
            # What was None is now made, and hardly ever made again.
            self._changing = [slot for slot, value in mb.before if value is not None]
            copies = {}
            for slot in self._slots:
                if slot not in self._changing:
                    self._steady[slot] = _Kept(slot, _copy(_get(slot), copies))
        for slot in self._changed():
            self._changing.append(slot)
            self._until[slot] = self._steady.pop(slot).copy
        mb.before = mb.before or None

    def _changed(self) -> list[_Slot]:
        """The steady buffers of modules of which one is not as it was: another's change may leave
        no trace."""
        found = {slot[0] for slot, kept in self._steady.items() if kept.differs(slot)}
        return [slot for slot in self._steady if slot[0] in found]

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
        before, mb.before = dict(mb.before or ()), None
        copies: _Copies = {}
        for slot, value in self._until.items():
            if slot not in before:
                before[slot] = _copy(value, copies)
        after = [(slot, _get(slot)) for slot in before]
        for (module, name), value in before.items():
            buffers_of(module)[name] = value
        try:
            yield
        finally:
            for (module, name), kept in after:
                buffers_of(module)[name] = kept


def _get(slot: _Slot) -> torch.Tensor | None:
    module, name = slot
    return buffers_of(module).get(name)


def _copy(value: torch.Tensor | None, copies: _Copies) -> torch.Tensor | None:
    if value is None:
        return None
    if id(value) not in copies:
        copies[id(value)] = value.detach().clone()
    return copies[id(value)]


class _Kept:
    """A copy of a buffer, and what tells whether it is as it was."""

    def __init__(self, slot: _Slot, copy: torch.Tensor | None) -> None:
        self.copy = copy
        self._buffer = _get(slot)
        self._version = 0 if self._buffer is None else version_of(self._buffer)

    def differs(self, slot: _Slot) -> bool:
        """After an assignment, and after a change in place that leaves a trace."""
        now = _get(slot)
        return now is not self._buffer or (now is not None and version_of(now) != self._version)


def _same(now: torch.Tensor | None, before: torch.Tensor | None) -> bool:
    if now is None or before is None:
        return now is before
    return now.shape == before.shape and torch.equal(now, before)
