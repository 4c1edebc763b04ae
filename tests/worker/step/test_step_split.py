"""Backward split in two actions, in whole pipelines: bitwise equal to a whole backward."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeworker.facts.connections import Skip
from pipeworker.plan.placement import Placement
from support.draws import some
from support.in_process.layers import Apply, Layer, Noise, Pop, Stash, data, mlp, mse
from support.in_process.pipelines import Pipeline, Way, filled
from support.in_process.plain_loop import Batches, Trained, assert_equal, plain
from support.pure.orders import Which, always, depth_first, never, written, zero_bubble
from support.slow import slow

FOUR = 4
PLACEMENTS = [
    *(Placement.identity(k) for k in (1, 2, 3, 4)),
    Placement.looped(2, 2),
    Placement(((0, 3), (1, 2))),
    Placement(((0, 1), (2, 3))),
]
ZB_H1 = written(
    "0F0 0F1 0F2 0I0 0F3 0I1 0W0 0I2 0W1 0I3 0W2 0W3",
    "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
    "2F0 2I0 2F1 2W0 2I1 2F2 2W1 2I2 2F3 2W2 2I3 2W3",
)
"""The order on three workers."""


def alternate(stage: int, microbatch: int) -> bool:
    """Split every other backward."""
    return (stage + microbatch) % 2 == 0


RECOMPUTED = (never, always, alternate)


@functools.cache
def ways(recompute: Which) -> list[tuple[str, Way]]:
    found = []
    for placement in PLACEMENTS:
        found += [
            (f"{placement} zero bubble", Way(placement, lambda p, m: zero_bubble(p, m, recompute))),
            (
                f"{placement} alternate",
                Way(placement, lambda p, m: depth_first(p, m, recompute, alternate)),
            ),
        ]
    return found


@functools.cache
def fewer_ways(recompute: Which) -> list[tuple[str, Way]]:
    """Return a third of the ways; over all of RECOMPUTED, each order occurs in each placement."""
    return ways(recompute)[RECOMPUTED.index(recompute) :: len(RECOMPUTED)]


def check(
    layers: Sequence[nn.Module],
    batches: Batches,
    *,
    skips: Sequence[Skip] = (),
    recompute: Sequence[Which] = RECOMPUTED,
    every: int = 2,
    turn: int = 0,
    microbatches: int = FOUR,
) -> Trained:
    """Compare the plain loop with one worker and, in an ordinary run, each `every`-th way."""
    which = ways if every == 1 else fewer_ways
    expected = plain(copy.deepcopy(layers), mse, copy.deepcopy(batches), microbatches)
    one = filled(Placement.identity(1))
    others = some((way for mode in recompute for way in which(mode)), every, turn)
    for case, way in [("one", one), *others]:
        pipeline = Pipeline(
            layers, mse, copy.deepcopy(batches), way, microbatches=microbatches, skips=skips
        )
        assert_equal(pipeline.train(len(batches)), expected, case)
    return expected


@slow
def test_equals_the_plain_loop() -> None:
    check(mlp(), data(8, 8), every=1)


def test_zb_h1_equals_the_plain_loop() -> None:
    layers, batches = mlp(), data(8, 8, 8)
    expected = plain(copy.deepcopy(layers), mse, batches, FOUR)
    for lanes in (1, 2):
        way = Way(Placement.identity(3), lambda p, m: ZB_H1)
        pipeline = Pipeline(layers, mse, batches, way, microbatches=FOUR, lanes=lanes)
        assert_equal(pipeline.train(3), expected)


def test_in_place_first_layers() -> None:
    relu = nn.ReLU(inplace=True)
    layers = [nn.Linear(6, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2)]
    check([nn.Hardtanh(-0.5, 0.5, inplace=True), *layers], data(8, 8))


def test_skip_connections() -> None:
    layers = [
        nn.Linear(6, 6),
        Stash("a"),
        nn.Linear(6, 6),
        Stash("b"),
        Noise(),
        Pop("b"),
        Pop("a"),
        nn.Linear(6, 2),
    ]
    check(layers, data(8, 8), skips=[Skip(1, 6, "a"), Skip(3, 5, "b")], turn=1)


def test_nested_values_and_unused_outputs() -> None:
    layers = [
        Apply("x", "h"),
        Apply("x", "unused"),
        Layer(lambda v: {**v, "h": torch.tanh(v["h"]), "t": v["h"].t()}),
        Apply("h", "h"),
        Layer(lambda v: v["h"] * v["t"].t() + v["x"]),
        nn.Linear(6, 2),
    ]
    check(layers, [({"x": x}, y) for x, y in data(8, 8)])


def test_a_weight_used_twice_a_checkpoint_and_a_norm() -> None:
    torch.manual_seed(2)
    twice, inner = nn.Linear(6, 6), nn.Linear(6, 6)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = twice

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.linear(torch.tanh(self.linear(x))))

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = inner, nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run = lambda y: self.dropout(torch.tanh(self.linear(y)))  # noqa: E731
            return torch.as_tensor(checkpoint(run, x, use_reentrant=False))

    layers = [nn.Linear(6, 6), Twice(), nn.LayerNorm(6), Checkpointed(), nn.Linear(6, 2)]
    check(layers, data(8, 8), turn=1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@slow
def test_tied_weights() -> None:
    layers: list[nn.Module] = [nn.Linear(6, 6) for _ in range(6)]
    layers[3].weight = layers[1].weight = layers[0].weight
    layers[5].bias = layers[2].bias
    layers[4] = layers[2]
    layers += [Noise(), nn.Linear(6, 2)]
    batches = data(8, 8, 8)

    def train(way: Way) -> Trained:
        pipeline = Pipeline(layers, mse, batches, way, microbatches=FOUR, optimizer=sgd)
        return pipeline.train(3)

    expected = train(filled(Placement.identity(1)))
    for recompute in RECOMPUTED:
        for case, way in fewer_ways(recompute):
            assert_equal(train(way), expected, case)


class Grows(nn.Module):
    """A layer whose parameter gets a gradient in some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.sum() > 0 else x * 1


@pytest.mark.parametrize(
    "make",
    [Grows, pytest.param(lambda: Layer(lambda x: x), marks=slow)],
    ids=["sometimes", "never"],
)
def test_stages_without_weight_gradients_to_defer(make: Callable[[], nn.Module]) -> None:
    layers = [nn.Identity(), nn.Linear(6, 6), make(), nn.Linear(6, 2), nn.Tanh()]
    check(layers, data(8, 8), recompute=[never, always])


def test_frozen_layers() -> None:
    frozen = [nn.Linear(6, 6).requires_grad_(False) for _ in range(3)]
    layers = [*frozen[:2], nn.Linear(6, 6), frozen[2], nn.Linear(6, 2)]
    check(layers, data(8, 8), recompute=[never, always])
