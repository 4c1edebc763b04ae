"""A micro-batch on its way through one stage, and the boundary where the stage's graph begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from pipeworker.worker.internals import apply_of
from pipeworker.worker.stage.values import distinct_tensors, replace_tensors

if TYPE_CHECKING:
    from pipeworker.worker.stage.offload import SavedGraph
    from pipeworker.worker.stage.split import DeferredBackward
    from pipeworker.worker.transport.unchanged import Unchanged

Gradients = list[torch.Tensor | None]
Arrived = dict[int, tuple[list[torch.Tensor], Sequence[bool]]]
BufferValues = list[tuple[tuple[nn.Module, str], torch.Tensor | None]]
"""Values of buffers, each by its module and its name there."""


@dataclass(slots=True, eq=False)
class MicroBatch:
    """The input, state and results of one micro-batch on one stage.

    Attributes:
        weight: share of the mini-batch's samples, 0 to 1.
        recompute, split_backward, offload: run the forward a second time before the backward; run
            the backward as two actions; keep what the graph saves in the host's memory.

        value, wants_grad: the stage's input, and for each of its distinct tensors whether it needs
            a gradient.
        common: whether two of these tensors had elements in the same memory on the stage before.
        unchanged: the check that the stage before, on this worker, has not changed the input.
        target: argument of the loss, on the last stage.
        arrived: tensors received over skip connections, by source stage, and whether each needs a
            gradient.

        output: root of the graph that is kept: the stage's output, or the loss.
        outgoing: the value to send to the next stage.
        departing: tensors to send to other stages over skip connections, by name.

        output_gradients: gradients of the output's distinct tensors that require grad.
        departed_gradients: gradients of sent skip tensors, by target stage.
        input_gradients: gradients of the input's distinct tensors that need one; None for an unused
            tensor.
        arrived_gradients: gradients of received skip tensors, by source stage.

        loss, count: scalars that ``loss`` returned, on the last stage.

        edges, boundary, buffers_before, is_checked, checksums, weight_gradients, offloaded,
        local_gradients:
            state that the stage keeps from one of its actions to the next: where the graph begins,
            for a split backward; gradients caught there; values of buffers before the first
            forward; whether its recompute is checked; the checksums of its output; the second half
            of the backward; what the graph saved; gradients that the forward has accumulated.
    """

    number: int
    weight: float = 1.0
    recompute: bool = False
    split_backward: bool = False
    offload: bool = False
    value: Any = None
    wants_grad: Sequence[bool] = ()
    common: bool = False
    unchanged: Unchanged | None = None
    target: Any = None
    arrived: Arrived = field(default_factory=dict)
    output: Any = None
    outgoing: Any = None
    departing: dict[str, torch.Tensor | None] = field(default_factory=dict)
    output_gradients: Gradients = field(default_factory=list)
    departed_gradients: dict[int, Gradients] = field(default_factory=dict)
    input_gradients: Gradients = field(default_factory=list)
    arrived_gradients: dict[int, Gradients] = field(default_factory=dict)
    loss: torch.Tensor | None = None
    count: torch.Tensor | None = None
    edges: Sequence[GradientEdge] = ()
    boundary: Gradients | None = None
    buffers_before: BufferValues | None = None
    is_checked: bool = False
    checksums: tuple[int, ...] = ()
    weight_gradients: DeferredBackward | None = None
    offloaded: SavedGraph | None = None
    local_gradients: Sequence[tuple[nn.Parameter, torch.Tensor]] = ()


class _Boundary(torch.autograd.Function):
    """Pass tensors into the graph of this stage; keep the gradients that come back, as they are.

    Accumulation into a leaf could change a gradient's strides; and the first layer may change the
    function's outputs in place, which it may not do with leaves.
    """

    @staticmethod
    def forward(
        ctx: Any, phony: torch.Tensor, boundary: Gradients, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.boundary = boundary
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.boundary[:] = gradients
        return (None, None, *(None for _ in gradients))


_pass: Callable[..., tuple[torch.Tensor, ...]] = apply_of(_Boundary)


def pass_boundary(
    value: Any, wants_grad: Sequence[bool], phony: torch.Tensor, boundary: Gradients
) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Replace the tensors that need a gradient by ones inside the stage's graph; return both.

    Args:
        value: a nested value with tensors of any shape and dtype.
        wants_grad: for each distinct tensor of `value`, in order, whether it needs a gradient.
        phony: a tensor of shape [0] that requires grad, so that the function's outputs do.
        boundary: gets the gradients in backward, in the order of the replaced tensors.
    """
    if isinstance(value, torch.Tensor):
        inside = _pass(phony, boundary, value)
        return inside[0], inside
    tensors = distinct_tensors(value)
    chosen = [t for t, wanted in zip(tensors, wants_grad, strict=True) if wanted]
    inside = _pass(phony, boundary, *chosen)
    passed = {id(old): new for old, new in zip(chosen, inside, strict=True)}
    return replace_tensors(value, passed), inside
