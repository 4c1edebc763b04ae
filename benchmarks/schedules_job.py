"""A job of sleeping layers whose backward has two parts, for `benchmarks/schedules.py`.

Its arguments are the number of layers, the seconds of a forward, the bytes of an activation, and
the number of micro-batches. The gradient of the input takes as long as a forward, and that of the
weight as well.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from emulated_job import data, loss, optimizer, sleep
from torch import nn

__all__ = ["data", "loss", "model", "optimizer"]


class Sleeping(nn.Module):
    """An emulated accelerator: f seconds forward, f for the input's gradient, f for the weight's.

    The sum separates the two parts: its gradients lead to the input and to the weight.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = sleep(x, None, self.seconds, self.seconds)
        return moved + sleep(self.weight, None, 0, self.seconds)


def model() -> list[Any]:
    layers, seconds = int(sys.argv[1]), float(sys.argv[2])
    return [partial(Sleeping, seconds)] * layers
