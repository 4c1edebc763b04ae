"""Random numbers drawn in a backward, which depend neither on the stages nor on what ran before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeworker.plan.placement import Placement
from pipeworker.worker.stage import backward_streams, rng
from pipeworker.worker.stage.backward_streams import BackwardStreams
from support.in_process.layers import Layer, noisy
from support.in_process.pipelines import MODES, Pipeline, filled

WIDTH = 6


class Noise(torch.autograd.Function):
    """The identity, whose backward adds noise."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient) * random.random()


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Noise.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return out


class NoisyOutput(nn.Linear):
    """A layer whose hook on its own output adds noise to the gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(super().forward(x))


class NoisyPair(nn.Module):
    """A layer of two outputs. Backward reaches the second one first, and its hook adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), noisy(self.linear(x))


class Sum(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0] + pair[1]


def hooked() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight.register_hook(  # type: ignore[no-untyped-call]
        lambda g: g + torch.randn_like(g) * float(np.random.rand())
    )
    return layer


class Doubled(nn.Linear):
    """A layer whose hook on its own output doubles the gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return out


class NoisyInput(nn.Linear):
    """A layer whose hook on its input adds noise to the gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(noisy(x))


class NoisyReLU(nn.Module):
    """A layer that adds noise to the gradient of its input, and changes it in place after that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return noisy(x).relu_()


class Slope(nn.Linear):
    """A layer that differentiates by its input in its forward, and draws after that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = super().forward(x).tanh().sum()
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        return functional.dropout(slope + x)


def mixed_layers() -> list[nn.Module]:
    made = [nn.Linear(WIDTH, WIDTH), hooked(), nn.Tanh(), Noisy(WIDTH, WIDTH), nn.Identity()]
    made += [nn.Dropout(), NoisyOutput(WIDTH, WIDTH), nn.Tanh(), NoisyPair(), Sum()]
    made += [Doubled(WIDTH, WIDTH), Slope(WIDTH, WIDTH)]
    made += [Doubled(WIDTH, WIDTH), NoisyInput(WIDTH, WIDTH), Layer(noisy), Layer(noisy)]
    return [*made, Noisy(WIDTH, WIDTH)]


def changing_layers() -> list[nn.Module]:
    """Return layers that change outputs with hooks in place."""
    made = [NoisyOutput(WIDTH, WIDTH), nn.ReLU(inplace=True), NoisyOutput(WIDTH, WIDTH)]
    return [*made, NoisyReLU(), nn.Linear(WIDTH, WIDTH)]


def trained(stages: int, mode: Any, layers: Callable[[], list[nn.Module]] = mixed_layers) -> Any:
    torch.manual_seed(0)
    batches = [(torch.randn(5, WIDTH), torch.randn(5, WIDTH)) for _ in range(3)]

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    plan = filled(Placement.identity(stages), mode)
    pipeline = Pipeline(layers(), functional.mse_loss, batches, plan, microbatches=2, optimizer=sgd)
    return pipeline.train(3)


def test_what_backwards_draw_does_not_depend_on_stages_or_recomputation() -> None:
    first, *others = [trained(stages, mode) for stages in (1, 2, 3, 5) for mode in MODES]
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(first.weights[name], other.weights[name]) for name in first.weights)


def test_a_hook_of_an_output_draws_the_same_if_the_next_layer_changes_the_output() -> None:
    first, *others = [trained(stages, "never", changing_layers) for stages in (1, 2, 3, 5)]
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(first.weights[name], other.weights[name]) for name in first.weights)


DRAWS: list[Callable[[], Any]] = [
    lambda: torch.rand(1),
    random.random,
    np.random.rand,
    np.random.randn,
]


def seeds_after(watched: int, draw: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how often a stage is seeded in a backward after those that are watched."""
    streams = BackwardStreams(0, None)
    for number in range(watched):
        streams.enter(1, number, 1)
        if number == watched - 1:
            draw()
        streams.enter(1, number, 0)
        streams.leave()
    seeds: list[int] = []
    monkeypatch.setattr(rng, "seed_all", lambda seed, _: seeds.append(seed))
    streams.enter(1, watched, 0)
    return len(seeds)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_stage_is_seeded_only_while_a_backward_may_draw(
    draw: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seeds_after(backward_streams.WATCHED_BACKWARDS, draw, monkeypatch) == 1
    assert seeds_after(backward_streams.WATCHED_BACKWARDS, lambda: None, monkeypatch) == 0
