"""Parts of checkpoints, made without a job."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeworker.record.checkpoint import Part


def part(
    layers: Sequence[nn.Module],
    first: int,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: object = None,
) -> Part:
    """A stage from layer `first` on, in a module without names."""
    names = [str(index) for index in range(first, first + len(layers))]
    states = [layer.state_dict() for layer in layers]
    return Part(names, layers, states, optimizer, scheduler)
