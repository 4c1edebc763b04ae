"""A micro-batch on its way through one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.autograd.graph import GradientEdge

    from pipeworker.worker.stage.boundary import Caught
    from pipeworker.worker.stage.offload import Saved
    from pipeworker.worker.stage.recompute import Before
    from pipeworker.worker.stage.split import Deferred

Gradients = list["torch.Tensor | None"]
Arrived = dict[int, "tuple[list[torch.Tensor], Sequence[bool]]"]


@dataclass(slots=True, eq=False)
class MicroBatch:
    """What a stage is given, keeps and gives for one micro-batch.

    Attributes:
        number: within the mini-batch.
        weight: its share of the samples.
        again: it will be forwarded again before its backward.
        halves: its backward is two actions.
        away: what its graph saves is in the host's memory until it is fetched.

        value, wants_grad: the input, and which of its distinct tensors want a gradient.
        target: for the loss, on the last stage.
        arrived: over skip connections, by the stage they come from: tensors, and which want a
            gradient.

        output: what the graph that is kept leads to: the stage's output, or the loss.
        outgoing: what the next stage is given.
        departing: what other stages are given over skip connections, by name.

        output_gradients: of the output's distinct tensors that require grad.
        departed_gradients: of what departed, by the stage it went to.
        input_gradients: of the input's distinct tensors that want one; None for an unused one.
        arrived_gradients: of what arrived, by the stage it came from.

        loss, count: what ``loss`` gave, on the last stage.
    """

    number: int
    weight: float = 1.0
    again: bool = False
    halves: bool = False
    away: bool = False
    value: Any = None
    wants_grad: Sequence[bool] = ()
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
    # Between a stage's own calls.
    edges: Sequence[GradientEdge] = ()
    """Where the graph begins, for a backward in halves."""
    caught: Caught | None = None
    before: Before | None = None
    deferred: Deferred | None = None
    saved: Saved | None = None

    @property
    def share(self) -> torch.Tensor:
        """What is added up to the step's loss, or to its numerator where there are counts."""
        assert self.loss is not None
        return self.loss if self.count is not None else self.loss * self.weight
