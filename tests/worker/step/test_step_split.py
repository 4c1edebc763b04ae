"""A backward in two actions, in whole pipelines: the bits of one."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeworker.plan.placement import Placement
from pipeworker.plan.skips import Skip
from support.orders import Which, always, depth_first, never, written, zero_bubble
from support.pipelines import (
    Apply,
    Batches,
    Layer,
    Noise,
    Pipeline,
    Pop,
    Stash,
    Trained,
    Way,
    assert_equal,
    data,
    filled,
    mse,
    plain,
)

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
"""Written out, on three workers."""


def some(stage: int, microbatch: int) -> bool:
    """Halves beside whole backwards."""
    return (stage + microbatch) % 2 == 0


RECOMPUTED = (never, always, some)


@functools.cache
def ways(again: Which) -> list[tuple[str, Way]]:
    found = []
    for placement in PLACEMENTS:
        found += [
            (f"{placement} zero bubble", Way(placement, lambda p, m: zero_bubble(p, m, again))),
            (f"{placement} some", Way(placement, lambda p, m: depth_first(p, m, again, some))),
        ]
    return found


@functools.cache
def fewer_ways(again: Which) -> list[tuple[str, Way]]:
    """Of all that may be recomputed together each order in each placement."""
    turn = RECOMPUTED.index(again)
    return [way for index, way in enumerate(ways(again)) if (index // 2 + index + turn) % 2]


def check(
    layers: Sequence[nn.Module],
    batches: Batches,
    *,
    skips: Sequence[Skip] = (),
    again: Sequence[Which] = RECOMPUTED,
    ways: Callable[[Which], list[tuple[str, Way]]] = fewer_ways,
    microbatches: int = FOUR,
) -> Trained:
    expected = plain(copy.deepcopy(layers), mse, copy.deepcopy(batches), microbatches)
    one = filled(Placement.identity(1))
    for case, way in [("one", one), *(way for which in again for way in ways(which))]:
        made = Pipeline(
            layers, mse, copy.deepcopy(batches), way, microbatches=microbatches, skips=skips
        )
        assert_equal(made.train(len(batches)), expected, case)
    return expected


def mlp() -> list[nn.Module]:
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), Noise(), nn.GELU(), nn.Linear(8, 2)]


def test_equals_the_plain_loop() -> None:
    check(mlp(), data(8, 8), ways=ways)


def test_a_written_order() -> None:
    layers, batches = mlp(), data(8, 8, 8)
    expected = plain(copy.deepcopy(layers), mse, batches, FOUR)
    for lanes in (1, 2):
        way = Way(Placement.identity(3), lambda p, m: ZB_H1)
        made = Pipeline(layers, mse, batches, way, microbatches=FOUR, lanes=lanes)
        assert_equal(made.train(3), expected)


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
    check(layers, data(8, 8), skips=[Skip(1, 6, "a"), Skip(3, 5, "b")])


def test_nested_values_and_what_nobody_uses() -> None:
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
    check(layers, data(8, 8))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def test_tied_weights() -> None:
    layers: list[nn.Module] = [nn.Linear(6, 6) for _ in range(6)]
    layers[3].weight = layers[1].weight = layers[0].weight
    layers[5].bias = layers[2].bias
    layers[4] = layers[2]
    layers += [Noise(), nn.Linear(6, 2)]
    batches = data(8, 8, 8)

    def train(way: Way) -> Trained:
        made = Pipeline(layers, mse, batches, way, microbatches=FOUR, optimizer=sgd)
        return made.train(3)

    expected = train(filled(Placement.identity(1)))
    for again in RECOMPUTED:
        for case, way in fewer_ways(again):
            assert_equal(train(way), expected, case)


class Grows(nn.Module):
    """Its parameter gets a gradient in some micro-batches alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.sum() > 0 else x * 1


@pytest.mark.parametrize("make", [Grows, lambda: Layer(lambda x: x)], ids=["sometimes", "never"])
def test_stages_with_nothing_to_defer(make: Callable[[], nn.Module]) -> None:
    layers = [nn.Identity(), nn.Linear(6, 6), make(), nn.Linear(6, 2), nn.Tanh()]
    check(layers, data(8, 8), again=[never, always])


def test_frozen_layers() -> None:
    frozen = [nn.Linear(6, 6).requires_grad_(False) for _ in range(3)]
    layers = [*frozen[:2], nn.Linear(6, 6), frozen[2], nn.Linear(6, 2)]
    check(layers, data(8, 8), again=[never, always])
