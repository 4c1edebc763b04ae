"""Gradients that a layer computes in its forward, by ``backward()`` of a loss of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from pipeworker.worker.stage.microbatch import MicroBatch


class LocalGradients:
    """The gradients that forwards of a stage accumulate, as in layer-wise training.

    They are added to those of the backward as it begins. So each is added once, also with
    recompute, and in the order of the plain loop under every schedule. The very first forward finds
    out whether a stage has any; few networks do.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._is_absent = False

    @contextmanager
    def forward(self, mb: MicroBatch) -> Iterator[None]:
        """Keep for the backward what the forward inside the context accumulates."""
        if self._is_absent:
            yield
            return
        held = self._exchange([None] * len(self._weights))
        try:
            yield
        finally:
            added = self._exchange(held)
        pairs = zip(self._weights, added, strict=True)
        mb.local_gradients = [(weight, one) for weight, one in pairs if one is not None]
        self._is_absent = not mb.local_gradients

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Drop what the second forward inside the context accumulates."""
        if self._is_absent:
            yield
            return
        held = self._exchange([None] * len(self._weights))
        try:
            yield
        finally:
            self._exchange(held)

    def _exchange(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Give the weights these gradients; return those that they had."""
        held = [weight.grad for weight in self._weights]
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        return held


def add_local_gradients(mb: MicroBatch) -> None:
    """Accumulate the gradients that the forward of a micro-batch has kept."""
    for weight, gradient in mb.local_gradients:
        if weight.grad is None:
            weight.grad = gradient
        else:
            weight.grad.add_(gradient)
    mb.local_gradients = ()
