"""Eight equal transformer blocks on random vectors.

The first argument is the number of micro-batches. The optional argument ``adamw`` selects an
optimizer with more state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WIDTH, TIME, BATCH = 256, 128, 2


def block() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)


def model() -> list[Any]:
    return [block] * 8


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target)


def optimizer(params: Any) -> torch.optim.Optimizer:
    if "adamw" in sys.argv:
        return torch.optim.AdamW(params, lr=1e-4)
    return torch.optim.SGD(params, lr=0.01)


def data() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    samples = BATCH * int(sys.argv[1])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, TIME, WIDTH, generator=generator)
    while True:
        yield x, x
