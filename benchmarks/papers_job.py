"""A job of emulated accelerators: a layer is a stage of a real network, and sleeps as long.

Its arguments are, as JSON, the seconds of a sample's forward and backward in each layer, the number
of layers, the bytes of a sample between two layers, and the samples of a mini-batch.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from emulated_job import data, loss, optimizer, sleep
from torch import nn

__all__ = ["data", "loss", "model", "optimizer"]


class Stage(nn.Module):
    """An emulated accelerator: (batch, elements) to the same, for so many seconds a sample.

    Half of the backward is for the input and half for the weight, as zero-bubble schedules have it.
    """

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward, backward = self.seconds
        half = len(x) * backward / 2
        moved = sleep(x, self.weight, len(x) * forward, half)
        return moved + sleep(self.weight, self.weight, 0.0, half)


def model() -> list[Any]:
    return [partial(Stage, *pair) for pair in json.loads(sys.argv[1])]
