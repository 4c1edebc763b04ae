"""Gradients that a layer computes in its forward, by ``backward()`` of a loss of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pipeworker.worker.stage.microbatch import MicroBatch

_Added = list[tuple[nn.Parameter, torch.Tensor]]


class LocalGradients:
    """The gradients that forwards of a stage accumulate, as in layer-wise training.

    They are added to those of the backward as it begins. So each is added once, also with
    recompute, and in the order of the plain loop under every schedule. The first forward of each
    mini-batch is watched, and every one as soon as a forward has had such gradients; few networks
    have any.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        self._is_first = True
        self._has_any = False

    def begin(self) -> None:
        """Start a mini-batch."""
        self._is_first = True

    @contextmanager
    def forward(self, mb: MicroBatch) -> Iterator[None]:
        """Keep for the backward what the forward inside the context accumulates."""
        if not (self._is_first or self._has_any):
            yield
            return
        self._is_first = False
        with self._held_back() as added:
            yield
        mb.local_gradients = added
        self._has_any = self._has_any or bool(added)

    @contextmanager
    def recompute(self) -> Iterator[None]:
        """Drop what the second forward inside the context accumulates."""
        if not self._has_any:
            yield
            return
        with self._held_back():
            yield

    @contextmanager
    def _held_back(self) -> Iterator[_Added]:
        """Yield a list that gets, in order, what is accumulated inside the context."""
        added: _Added = []

        def note(weight: torch.Tensor) -> None:
            assert isinstance(weight, nn.Parameter)
            assert weight.grad is not None
            added.append((weight, weight.grad))
            weight.grad = None

        trained = [weight for weight in self._weights if weight.requires_grad and self._has_any]
        hooks: list[Any] = [
            weight.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            for weight in trained
        ]
        held = self._exchange([None] * len(self._weights))
        try:
            yield added
        finally:
            left = zip(self._weights, self._exchange(held), strict=True)
            added += [(weight, gradient) for weight, gradient in left if gradient is not None]
            for hook in hooks:
                hook.remove()

    def _exchange(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Give the weights these gradients; return those that they had."""
        held = [weight.grad for weight in self._weights]
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        return held


def add_local_gradients(mb: MicroBatch, scale: float) -> None:
    """Accumulate the gradients that the forward of a micro-batch has kept, times the loss scale."""
    for weight, gradient in mb.local_gradients:
        added = gradient if scale == 1.0 else gradient * scale
        if weight.grad is None:
            weight.grad = added
        elif weight.grad.is_sparse and not added.is_sparse:
            weight.grad = added + weight.grad  # as autograd does
        else:
            weight.grad.add_(added)
    mb.local_gradients = ()
