"""A job of emulated accelerators: a layer is a stage of a real network, and sleeps as long.

Its arguments are, as JSON, the seconds of a sample's forward and backward in each layer, the
samples of a mini-batch, and the bytes of a sample between two layers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

SECONDS, SAMPLES, BYTES = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: Any) -> torch.Tensor:
        ctx.seconds = len(x) * seconds[1]
        time.sleep(len(x) * seconds[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None, None


class Stage(nn.Module):
    """An emulated accelerator: (batch, elements) to the same, for so many seconds a sample."""

    def __init__(self, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Sleep.apply(x, self.weight, self.seconds)  # type: ignore
        return result


def model() -> list[Any]:
    return [partial(Stage, pair) for pair in SECONDS]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output[:, :1] - target).mean()


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = torch.zeros(SAMPLES, BYTES // 4), torch.zeros(SAMPLES, 1)
    while True:
        yield x, y
