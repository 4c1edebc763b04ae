"""The updater of a stage, and layers with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pipeworker.job.file import JobFile
from pipeworker.worker.update.update import Updater


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def make_updater(
    layers: Sequence[nn.Module],
    optimizer: Any = sgd,
    scheduler: Any = None,
    *,
    first: int = 0,
    clip_value: float | None = None,
    **job: Any,
) -> Updater:
    made = JobFile(None, never, optimizer, None, scheduler, **job)
    return Updater(layers, first, made, seed=5, clip_value=clip_value)


def never(*_: Any) -> Any:
    raise AssertionError("not to be called")


def layer(*gradients: float | None) -> nn.Module:
    """Return a layer with one parameter of one element (1.0) for each gradient."""
    made = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in gradients])
    for parameter, gradient in zip(made.parameters(), gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor([gradient])
    return made


def weights(made: nn.Module) -> list[float]:
    return [parameter.item() for parameter in made.parameters()]
