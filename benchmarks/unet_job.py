"""A U-Net of sixteen layers with equal cost; the argument is the number of micro-batches.

One level further down the image has half the height and width and twice the channels, so that a
convolution costs the same. The operations that change the number of channels have no weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import pipeworker

CHANNELS, LEVELS, BLOCKS, SIZE, BATCH = 12, 3, 2, 64, 2


class Block(nn.Module):
    """A convolution; one on the way down may stash its output, one on the way up may pop it."""

    def __init__(self, width: int, *, stash: int = 0, pop: int = 0) -> None:
        super().__init__()
        self.stash, self.pop = stash, pop
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pop:
            first, second = x.chunk(2, 1)
            x = nn.functional.interpolate(first + second, scale_factor=2.0)
            x = x + pipeworker.pop(f"level {self.pop}")
        x = torch.relu(self.norm(self.convolution(x)))
        if self.stash:
            pipeworker.stash(f"level {self.stash}", x)
            x = nn.functional.max_pool2d(x, 2)
            x = torch.cat([x, x], 1)
        return x


def model() -> list[Any]:
    down: list[Any] = []
    up: list[Any] = []
    for level in range(1, LEVELS + 1):
        width = CHANNELS * 2 ** (level - 1)
        more = [partial(Block, width)] * (BLOCKS - 1)
        down += [*more, partial(Block, width, stash=level)]
        up = [partial(Block, width, pop=level), *more, *up]
    return [*down, *[partial(Block, CHANNELS * 2**LEVELS)] * (2 * BLOCKS), *up]


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * int(sys.argv[1]), CHANNELS, SIZE, SIZE, generator=generator)
    while True:
        yield x, x
