"""Gradients that a layer computes in its forward, by ``backward()`` of a loss of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from pipeworker.worker.internals import version_of
from pipeworker.worker.stage.microbatch import MicroBatch

_thread = threading.local()
_Gradients = list[torch.Tensor | None]


class LocalGradients:
    """The gradients that forwards of a stage accumulate, as in layer-wise training.

    They are added to those of the backward as it begins. So each is added once, also with
    recompute, and in the order of the plain loop under every schedule. A forward that calls no
    ``backward()`` costs nothing.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights
        _intercept_backward()

    def forward(self, mb: MicroBatch | None) -> AbstractContextManager[None]:
        """Keep for the backward what the forward inside the context accumulates.

        Without a micro-batch, as in the recompute, drop it.
        """
        return _Forward(self._weights, mb)


class _Forward:
    """One forward; from its first ``backward()`` to its end weights have local gradients only."""

    def __init__(self, weights: Sequence[nn.Parameter], mb: MicroBatch | None) -> None:
        self._weights, self._mb = weights, mb
        self._held: _Gradients | None = None
        self._parts: dict[nn.Parameter, list[torch.Tensor]] = {}
        self._left: dict[nn.Parameter, tuple[torch.Tensor, int]] = {}
        """The gradient that each weight was left with, and its version."""

    def __enter__(self) -> None:
        _thread.forward = self

    def __exit__(self, *_: object) -> None:
        _thread.forward = None
        if self._held is not None:
            added = self._end(self._held)
            if self._mb is not None:
                self._mb.local_gradients = added

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Keep what each weight gets inside the context by itself."""
        nothing: _Gradients = [None] * len(self._weights)
        if self._held is None:
            self._held = self._exchange(nothing)
        before = self._exchange(nothing)
        try:
            yield
        finally:
            for weight, old in zip(self._weights, before, strict=True):
                new = weight.grad
                if new is None:
                    weight.grad = old
                    continue
                if not self._is_left(weight, old):
                    self._parts[weight] = [] if old is None else [old]
                self._parts[weight].append(new)
                weight.grad = new if old is None else old + new
                self._left[weight] = weight.grad, version_of(weight.grad)

    def _end(self, held: _Gradients) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        """Return the gradients in order, and give the weights those that they had before.

        What the layer has made of a gradient, as by clipping, counts in its place.
        """
        added: list[tuple[nn.Parameter, torch.Tensor]] = []
        now = self._exchange(held)
        for weight, gradient in zip(self._weights, now, strict=True):
            if gradient is not None:
                is_left = self._is_left(weight, gradient)
                parts = self._parts[weight] if is_left else [gradient]
                added += [(weight, part) for part in parts]
        return added

    def _is_left(self, weight: nn.Parameter, gradient: torch.Tensor | None) -> bool:
        """Return whether a weight's gradient is what was left to it."""
        left, version = self._left.get(weight, (None, 0))
        return left is not None and left is gradient and version_of(left) == version

    def _exchange(self, gradients: _Gradients) -> _Gradients:
        """Give the weights these gradients; return those that they had."""
        held = [weight.grad for weight in self._weights]
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        return held


@cache
def _intercept_backward() -> None:
    """Have ``torch.autograd.backward``, which ``Tensor.backward`` calls, tell a running forward."""
    original = torch.autograd.backward

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        forward: _Forward | None = getattr(_thread, "forward", None)
        if forward is None:
            original(*args, **kwargs)
            return
        with forward.backward():
            original(*args, **kwargs)

    torch.autograd.backward = backward


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
