"""Buffers and tied weights that change later, or in another way, than in the first mini-batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.step import Update
from support.in_process.pipelines import MODES, Pipeline, filled
from support.in_process.plain_loop import assert_equal, plain

WIDTH = 8


def mse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def batches_of(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(5)
    return [(torch.randn(4, WIDTH), torch.randn(4, WIDTH)) for _ in range(count)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class WarmsUp(nn.Module):
    """Changes its scale in each forward, and uses it from the third mini-batch on."""

    forwards: torch.Tensor
    scale: torch.Tensor

    def __init__(self, *, is_traced: bool = True) -> None:
        super().__init__()
        self.is_traced = is_traced
        self.register_buffer("forwards", torch.zeros(()))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        (self.scale if self.is_traced else self.scale.data).mul_(0.9)
        return x * self.scale if self.forwards > 4 else x * 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_traced", [True, False])
def test_a_graph_may_begin_to_save_a_buffer_that_forwards_change(
    is_traced: bool, mode: str
) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), WarmsUp(is_traced=is_traced), nn.Linear(WIDTH, WIDTH)]
    batches = batches_of(4)
    expected = plain(copy.deepcopy(layers), mse, batches, 2, sgd)
    way = filled(Placement.identity(2), mode)
    pipeline = Pipeline(layers, mse, batches, way, microbatches=2, optimizer=sgd)
    assert_equal(pipeline.train(4), expected)


class MakesANorm(nn.Linear):
    """Makes a batch norm in a forward."""

    forwards: torch.Tensor
    norm: nn.Module | None

    def __init__(self, first: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.first, self.norm = first, None
        self.register_buffer("forwards", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = super().forward(x)
        if self.forwards >= self.first:
            self.norm = self.norm or nn.BatchNorm1d(WIDTH, affine=False)
            x = self.norm(x)
        return x


class Scale(nn.Module):
    """Has a number and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = 0.5
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * self.scale


class MakesAScale(MakesANorm):
    """Makes a module with a number in a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm = self.norm or Scale()
        y: torch.Tensor = self.norm(nn.Linear.forward(self, x))
        return y


class RegistersABuffer(MakesANorm):
    """Registers a buffer in a forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == self.first:
            self.register_buffer("late", torch.full((WIDTH,), 0.25))
        x = nn.Linear.forward(self, x)
        if self.forwards >= self.first:
            x = x + self.get_buffer("late")
            self.get_buffer("late").mul_(0.8)
        return x


@pytest.mark.parametrize("mode", ["always", "except_first"])
@pytest.mark.parametrize(
    "layer", [MakesANorm(1), MakesANorm(4), MakesAScale(1), RegistersABuffer(4)]
)
def test_a_recompute_leaves_alone_what_a_forward_has_made(layer: nn.Module, mode: str) -> None:
    batches, layers = batches_of(4), [nn.Linear(WIDTH, WIDTH), copy.deepcopy(layer)]
    plain_layers = copy.deepcopy(layers)
    expected = plain(plain_layers, mse, batches, 2, sgd)
    way = filled(Placement.identity(1), mode)
    pipeline = Pipeline(layers, mse, batches, way, microbatches=2, optimizer=sgd)
    assert_equal(pipeline.train(4), expected)
    found = dict(pipeline.layers[1].named_buffers())
    wanted = dict(plain_layers[1].named_buffers())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Scales(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@pytest.mark.parametrize("mode", MODES)
def test_a_change_of_a_buffer_by_code_that_holds_it_is_seen(mode: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), Scales(), nn.Linear(WIDTH, WIDTH)]
    batches, way = batches_of(3), filled(Placement.identity(1), mode)
    pipeline = Pipeline(layers, mse, batches, way, microbatches=2, optimizer=sgd)
    held = [buffer for layer in pipeline.layers for buffer in layer.buffers()]
    for step in range(1, 4):
        pipeline.step(step, last=step == 3)
        pipeline.updaters[0].apply(Update(step, divisor=1.0))
        for buffer in held:
            buffer.mul_(0.5)
    assert pipeline.layers[1].get_buffer("scale") == 0.125


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_may_save_an_expanded_buffer(mode: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Scales(), nn.Linear(WIDTH, WIDTH)]
    layers[1].register_buffer("scale", torch.full((), 0.5).expand(WIDTH))
    batches = batches_of(3)
    expected = plain(copy.deepcopy(layers), mse, batches, 2, sgd)
    way = filled(Placement.identity(2), mode)
    pipeline = Pipeline(layers, mse, batches, way, microbatches=2, optimizer=sgd)
    assert_equal(pipeline.train(3), expected)


class Assigns(torch.optim.SGD):
    """Assigns new tensors to its parameters."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data - 0.1 * parameter.grad


class Turns(torch.optim.SGD):
    """Assigns views of the same memory to its matrices."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data = parameter.data.t()


def tied(first: nn.Module, last: nn.Module) -> list[nn.Module]:
    vars(last)["_parameters"]["weight"] = first.get_parameter("weight")
    return [first, nn.Linear(WIDTH, WIDTH), last]


@pytest.mark.parametrize("kind", [Assigns, Turns])
@pytest.mark.parametrize("stages", [1, 3])
def test_an_optimizer_may_assign_tensors_to_tied_weights(
    stages: int, kind: type[torch.optim.SGD]
) -> None:
    torch.manual_seed(0)
    layers = tied(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    batches, way = batches_of(3), filled(Placement.identity(stages))
    expected = plain(copy.deepcopy(layers), mse, batches, 1, lambda ps: kind(ps, lr=0.1))
    made = Pipeline(
        layers, mse, batches, way, microbatches=1, optimizer=lambda ps: kind(ps, lr=0.1)
    )
    assert made.train(3).losses == expected.losses


class Freezes(nn.Linear):
    """Freezes its weight, or lets it be trained, in its third forward."""

    forwards: torch.Tensor

    def __init__(self, *, is_frozen: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_frozen = is_frozen
        self.weight.requires_grad_(not is_frozen)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.weight.requires_grad_(self.is_frozen == bool(self.forwards >= 3))
        return super().forward(x)


class Renorms(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x[:, 0] > 0).long())


def train(layers: Sequence[nn.Module], stages: int) -> None:
    batches, way = batches_of(3), filled(Placement.identity(stages))
    Pipeline(layers, mse, batches, way, microbatches=2, optimizer=sgd).train(3)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_forward_that_freezes_one_place_of_a_tied_weight_is_refused(
    is_frozen: bool, stages: int
) -> None:
    layers = tied(Freezes(is_frozen=is_frozen), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(UsageError, match=r"tied: requires_grad of 0\.weight was changed within a"):
        train(layers, stages)


def test_a_forward_that_changes_one_of_two_copies_of_a_tied_weight_is_refused() -> None:
    with pytest.raises(UsageError, match=r"tied: 0\.weight was changed in place within a step, as"):
        train(tied(Renorms(), nn.Linear(WIDTH, WIDTH)), 2)


@pytest.mark.parametrize("stages", [1, 2])
def test_an_update_may_freeze_a_tied_weight(stages: int) -> None:
    torch.manual_seed(0)
    layers = tied(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    batches, way = batches_of(2), filled(Placement.identity(stages))
    pipeline = Pipeline(layers, mse, batches, way, microbatches=2, optimizer=sgd)
    for step in (1, 2):
        pipeline.step(step, last=step == 2)
        assert (pipeline.grads()["2.weight"] is None) == (step == 2)
        for index, updater in pipeline.updaters.items():
            for _, parameter in pipeline.ties[index].owners if index in pipeline.ties else ():
                parameter.requires_grad_(False)
            updater.apply(Update(step, divisor=1.0))
