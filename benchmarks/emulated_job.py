"""A job of sleeping layers.

Its arguments are the number of layers, the seconds of a forward, the bytes of an activation, and
the number of micro-batches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, seconds: float, after: float
    ) -> torch.Tensor:
        ctx.seconds = after
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None, None, None


def sleep(
    x: torch.Tensor, weight: torch.Tensor | None, seconds: float, after: float
) -> torch.Tensor:
    """Return the tensor after some seconds; its backward takes `after` seconds.

    There is one if the tensor or the weight needs a gradient.
    """
    result: torch.Tensor = _Sleep.apply(x, weight, seconds, after)  # type: ignore
    return result


class Sleeping(nn.Module):
    """An emulated accelerator: f seconds forward, 2 f backward, almost no CPU time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sleep(x, self.weight, self.seconds, 2 * self.seconds)


class _Free(torch.autograd.Function):
    """A loss that takes no time, as in the bound; its gradient is a fixed tensor."""

    gradient = torch.zeros(0)

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        if _Free.gradient.shape != output.shape:
            _Free.gradient = torch.zeros_like(output)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Free.gradient


def model() -> list[Any]:
    layers, seconds = int(sys.argv[1]), float(sys.argv[2])
    return [partial(Sleeping, seconds)] * layers


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _Free.apply(output)  # type: ignore
    return result


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    size, samples = int(sys.argv[3]), int(sys.argv[4])
    x, y = torch.zeros(samples, size // 4), torch.zeros(samples, 1)
    while True:
        yield x, y
