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

from pipeworker.worker.internals import allow_any_number_of_graphs

KERNELS = "inductor"
"""The backend of ``torch.compile`` that makes kernels."""


def compiled(layers: Sequence[nn.Module], backend: str) -> list[Callable[[Any], Any]]:
    """What to call in the place of each layer; the layers stay as they are."""
    return [partial(_call, torch.compile(one, backend=backend, dynamic=False)) for one in layers]


class _Thread(threading.local):
    ready = False


_thread = _Thread()


def _call(layer: Callable[[Any], Any], value: Any) -> Any:
    if not _thread.ready:  # torch keeps what it is configured to by thread
        allow_any_number_of_graphs()
        _thread.ready = True
    return layer(value)
