"""Layers compiled by ``torch.compile``, each by itself.

No kernel spans two layers, so none depends on how layers are grouped into stages. Nor may one
depend on what was compiled before: each shape has a graph of its own (no dynamic shapes, to which
torch turns when a second layer of a class has other sizes), and there is no number of graphs after
which layers run uncompiled. Layers that are alike share a graph; workers of a host share torch's
cache of kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from pipeworker.host.position import Tracker
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.worker.internals import allow_any_number_of_graphs, off_compiling, on_compiling

Backend = Callable[..., Any]
KERNELS = "inductor"
"""The backend of ``torch.compile`` that makes kernels."""


def compiled(layers: Sequence[nn.Module], backend: str | Backend) -> list[Callable[[Any], Any]]:
    """What to call in the place of each layer; the layers stay as they are."""
    return [partial(_call, torch.compile(one, backend=backend, dynamic=False)) for one in layers]


class Watch:
    """Says where a worker is while something is compiled, which may take minutes.

    Args:
        tracker: of the worker.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._at: Position | None = None
        on_compiling(self._began, self._ended)

    def _began(self, _: Any) -> None:
        if self._tracker.waits:  # it is none of our layers
            return
        at = self._at = self._tracker.get()
        self._tracker.set(Phase.COMPILING, at.step, at.microbatch, at.layer)

    def _ended(self, _: Any) -> None:
        at, self._at = self._at, None
        if at is not None:
            self._tracker.set(at.phase, at.step, at.microbatch, at.layer)

    def close(self) -> None:
        """Watch no more."""
        off_compiling(self._began, self._ended)


class _Thread(threading.local):
    ready = False


_thread = _Thread()


def _call(layer: Callable[[Any], Any], value: Any) -> Any:
    if not _thread.ready:  # torch keeps what it is configured to by thread
        allow_any_number_of_graphs()
        _thread.ready = True
    return layer(value)
