"""Compiled layers: a graph each, whatever else is compiled, and the same bits however they are cut.

Kernels take long to make: that their bits are the same is seen in ``benchmarks/compiled.py``.
"""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch._dynamo import reset
from torch._dynamo.utils import counters

from pipeworker.plan.placement import Placement
from pipeworker.plan.skips import Skip
from support.pipelines import (
    Batches,
    Noise,
    Pipeline,
    Pop,
    Stash,
    Trained,
    assert_equal,
    data,
    filled,
    mse,
    plain,
)

EAGER = "aot_eager"
"""Traces and parts a graph as the one that makes kernels does, and runs it as it is."""
SKIPS = [Skip(1, 5, "s")]


@pytest.fixture(autouse=True)
def _anew() -> None:
    reset()
    counters.clear()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(6),
            nn.Linear(6, width),
            nn.Linear(width, 6),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))
        return nn.functional.dropout(x, 0.2, self.training)


def layers() -> list[nn.Module]:
    """Of one class with several sizes; stateful, random, in place; a skip across stages."""
    hooked = nn.Linear(6, 6)
    hooked.register_forward_hook(lambda module, given, output: 2 * output)
    return [
        *(hooked, Stash("s"), Block(12), nn.BatchNorm1d(6), nn.ReLU(inplace=True), Pop("s")),
        *(Block(20), Noise(), nn.Linear(6, 2)),
    ]


def train(stages: int, mode: str, built: list[nn.Module], batches: Batches) -> Trained:
    way = filled(Placement.identity(stages), mode)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    pipeline = Pipeline(
        copy.deepcopy(built),
        *(mse, batches, way),
        microbatches=3,
        skips=SKIPS if len(built) > 5 else (),
        optimizer=optimizer,
        compiler=EAGER,
        limit=120.0,
    )
    return pipeline.train(len(batches))


def test_what_is_traced_and_not_rounded_otherwise_is_what_the_layers_give() -> None:
    built, batches = layers(), data(9, 7)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    expected = plain(copy.deepcopy(built), mse, batches, 3, optimizer)
    assert_equal(train(1, "never", built, batches), expected)
    assert_equal(train(3, "always", built, batches), expected)


def test_layers_that_are_alike_share_a_graph_and_no_number_of_them_is_too_many() -> None:
    train(1, "never", [nn.Linear(6, 6) for _ in range(3)], data(6, out=6))
    assert counters["stats"]["unique_graphs"] == 2  # the first one's input wants no gradient
    reset()
    counters.clear()
    widths = [6, *range(7, 19), 2]
    sizes: list[nn.Module] = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    train(1, "never", sizes, data(6))
    assert counters["stats"]["unique_graphs"] == len(sizes)
