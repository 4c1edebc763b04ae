"""Gradients that a layer computes in its forward, by ``backward()`` of a loss of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.internals import version_of
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.values import bytes_of, is_checked

_thread = threading.local()
_Gradients = list[torch.Tensor | None]
_State = tuple[torch.Tensor | None, int]
"""A gradient, and its version."""
_NONE: _State = None, 0
_SMALL = 64 * 1024
"""The bytes up to which a weight gets zeros: a layer of large weights mostly has small ones too."""


class LocalGradients:
    """The gradients that forwards of a stage accumulate, as in layer-wise training.

    They are added to those of the backward as it begins. So each is added once, also with
    recompute, and in the order of the plain loop under every schedule. A forward that calls no
    ``backward()`` costs nothing, but some are checked: a gradient that comes another way, or that
    the forward removes, as by ``zero_grad()``, is an error. Whether there are gradients to remove
    depends on the schedule, so in these forwards a small weight that has none has zeros.
    """

    def __init__(self, weights: Sequence[nn.Parameter], name_of: Callable[[int], str]) -> None:
        self._weights, self._name_of = weights, name_of
        self._forwards = 0
        _intercept_backward()

    def forward(self, mb: MicroBatch | None) -> AbstractContextManager[None]:
        """Keep for the backward what the forward inside the context accumulates.

        Without a micro-batch, as in the recompute, drop it.

        Raises:
            UsageError: the forward has changed a gradient without ``torch.autograd.backward``.
        """
        self._forwards += 1
        check = self._check if is_checked(self._forwards) else None
        return _Forward(self._weights, mb, check)

    def _check(self, before: Sequence[_State]) -> None:
        """Refuse gradients that differ from those before a forward without ``backward()``."""
        for number, (state, weight) in enumerate(zip(before, self._weights, strict=True)):
            if not _is_same(state, weight.grad):
                raise UsageError(
                    f"{self._name_of(number)}: a forward has changed its gradient without calling "
                    "torch.autograd.backward; have it call backward() of a loss of its own, whose "
                    "gradients are counted once under every schedule and recompute mode, and call "
                    "no zero_grad()"
                )


class _Forward:
    """One forward; from its first ``backward()`` to its end weights have local gradients only."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        mb: MicroBatch | None,
        check: Callable[[Sequence[_State]], None] | None,
    ) -> None:
        self._weights, self._mb, self._check = weights, mb, check
        self._held: _Gradients | None = None
        self._before: Sequence[_State] = ()
        self._zeros: Sequence[nn.Parameter] = ()
        """The weights that have zeros for this forward, in place of no gradient."""
        self._parts: dict[nn.Parameter, list[torch.Tensor]] = {}
        self._left: dict[nn.Parameter, _State] = {}
        """The gradient that each weight was left with, and its version."""

    def __enter__(self) -> None:
        _thread.forward = self
        if self._check is not None:
            self._zeros = [weight for weight in self._weights if _lacks_small_gradient(weight)]
            for weight in self._zeros:
                weight.grad = _zeros_for(weight)
            self._before = [_state_of(weight.grad) for weight in self._weights]

    def __exit__(self, kind: object, *_: object) -> None:
        _thread.forward = None
        try:
            if self._held is not None:
                added = self._end(self._held)
                if self._mb is not None:
                    self._mb.local_gradients = added
            elif self._check is not None and kind is None:
                self._check(self._before)
        finally:
            for weight in self._zeros:
                weight.grad = None

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
                self._left[weight] = _state_of(weight.grad)

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
        return gradient is not None and _is_same(self._left.get(weight, _NONE), gradient)

    def _exchange(self, gradients: _Gradients) -> _Gradients:
        """Give the weights these gradients; return those that they had."""
        held = [weight.grad for weight in self._weights]
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        return held


def _lacks_small_gradient(weight: nn.Parameter) -> bool:
    return weight.grad is None and weight.requires_grad and bytes_of(weight) <= _SMALL


def _zeros_for(weight: nn.Parameter) -> torch.Tensor:
    """Return zeros that torch accepts as the gradient of a weight, which may have another dtype."""
    dtype = weight.grad_dtype or weight.dtype
    return torch.zeros_like(weight, dtype=dtype, requires_grad=False)


def _state_of(gradient: torch.Tensor | None) -> _State:
    return _NONE if gradient is None else (gradient, version_of(gradient))


def _is_same(state: _State, gradient: torch.Tensor | None) -> bool:
    """Return whether a gradient is that of a state, and unchanged."""
    return gradient is state[0] and _state_of(gradient)[1] == state[1]


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
