"""Where the graph of a stage begins.

:class:`_Boundary` is a function that passes tensors on and catches their gradients as they are (no
accumulation into a leaf, which could change their strides), and whose outputs may be changed in
place by the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeworker.worker.internals import apply_of
from pipeworker.worker.stage.values import distinct_tensors, replace_tensors


@dataclass(slots=True)
class Caught:
    """The gradients that came back to the boundary; None before backward."""

    gradients: list[torch.Tensor | None] | None = None


class _Boundary(torch.autograd.Function):
    """Pass tensors into the graph of this stage; keep the gradients that come back."""

    @staticmethod
    def forward(
        ctx: Any, phony: torch.Tensor, caught: Caught, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.caught.gradients = list(gradients)
        return (None, None, *(None for _ in gradients))


_pass: Callable[..., tuple[torch.Tensor, ...]] = apply_of(_Boundary)


def pass_boundary(
    value: Any, wants_grad: Sequence[bool], phony: torch.Tensor, caught: Caught
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """The value with the tensors that want a gradient replaced by ones inside the graph.

    Args:
        phony: an empty tensor that requires grad, so that the outputs do.

    Returns:
        The value, and the tensors inside.
    """
    if isinstance(value, torch.Tensor):
        inside = _pass(phony, caught, value)
        return inside[0], inside
    tensors = distinct_tensors(value)
    chosen = [t for t, wanted in zip(tensors, wants_grad, strict=True) if wanted]
    inside = _pass(phony, caught, *chosen)
    passed = {id(old): new for old, new in zip(chosen, inside, strict=True)}
    return replace_tensors(value, passed), inside
