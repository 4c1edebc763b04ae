"""Forwards of a cut module that do by their input what the forward of the plan did not do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeworker.errors import UsageError
from support.in_process.cut_modules import WIDTH, Whole, mse, pipeline_of, sgd
from support.in_process.plain_loop import plain
from support.slow import slow

Batches = list[tuple[Any, torch.Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_linear = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.is_linear else torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, far: float) -> Any:
        raise NotImplementedError


class ChangesItsInput(Model):
    def forward(self, x: torch.Tensor, far: float) -> Any:
        if far:
            x.mul_(2)
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + x
        return hidden


class MakesATensor(Model):
    """Uses a tensor, and what a function makes of it or returns as it is."""

    def forward(self, x: torch.Tensor, far: float) -> Any:
        first = self.layers[0](x)
        other = first * 2 if far else first.contiguous()
        second = torch.tanh(self.layers[1](first))
        return self.layers[3](torch.tanh(self.layers[2](second + other))) + first


class SetsAnAttribute(Model):
    def forward(self, x: torch.Tensor, far: float) -> Any:
        for layer in self.layers:
            vars(layer)["is_linear"] = not far
        for layer in self.layers:
            x = layer(x)
        return x


class UsesABufferOfAUnit(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_buffer("scale", torch.ones(WIDTH))
        self.one = torch.ones(WIDTH)

    def forward(self, x: torch.Tensor, far: float) -> Any:
        for layer in self.layers:
            x = layer(x) * (self.layers[1].get_buffer("scale") if far else self.one)
        return x


class SetsTheMode(Model):
    def forward(self, x: torch.Tensor, far: float) -> Any:
        self.layers[1].train(not far)
        for layer in self.layers:
            x = layer(x)
        return x


class HasACopy(MakesATensor):
    """Makes a copy with the same numbers where it returned the tensor."""

    def forward(self, x: torch.Tensor, far: float) -> Any:
        first = self.layers[0](x)
        other = first.clone() if far else first.contiguous()
        second = torch.tanh(self.layers[1](first))
        return self.layers[3](torch.tanh(self.layers[2](second + other))) + first


class Replaces(MakesATensor):
    """Uses what a function makes of a tensor in its place."""

    def forward(self, x: torch.Tensor, far: float) -> Any:
        first = self.layers[0](x)
        first = first * 2 if far else first.contiguous()
        second = torch.tanh(self.layers[1](first))
        return self.layers[3](torch.tanh(self.layers[2](second + first))) + first


class CopiesItsOutput(Model):
    """Returns what its last layer returns, and what a function makes of that at the very end."""

    def forward(self, x: torch.Tensor, far: float) -> Any:
        for layer in self.layers:
            x = layer(x)
        return {"out": x.clone() if far else x.contiguous(), "hidden": x}


def attend(x: torch.Tensor, rate: float) -> torch.Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=rate)


def attend_by_heads(x: torch.Tensor, rate: float) -> torch.Tensor:
    inner, outer = torch.eye(WIDTH).repeat(3, 1), torch.eye(WIDTH)
    weights = inner, torch.zeros(3 * WIDTH), None, None, False, rate, outer, torch.zeros(WIDTH)
    return functional.multi_head_attention_forward(x, x, x, WIDTH, 1, *weights)[0]


class Drops(Model):
    """Draws numbers behind a function with a rate of dropout, for layers of several stages."""

    def __init__(self, drop: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: torch.Tensor, far: float) -> Any:
        x = self.drop(self.layers[0](x), far)
        noise = torch.rand(WIDTH)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) + noise
        return x


class SetsWithoutEffect(Model):
    """Sets an attribute that no unit reads, in its first forward too."""

    def forward(self, x: torch.Tensor, far: float) -> Any:
        for layer in self.layers:
            vars(layer)["last"] = far + x.shape[1]
            x = layer(x)
        return x


def batches_of(*fars: float) -> Batches:
    torch.manual_seed(3)
    return [({"x": torch.randn(4, WIDTH), "far": far}, torch.randn(4, WIDTH)) for far in fars]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ChangesItsInput(), "it changes a tensor of its input in place, and did not then"),
        (MakesATensor(), "a call makes a tensor, and returned its argument then"),
        (HasACopy(), "a call makes a tensor, and returned its argument then"),
        (UsesABufferOfAUnit(), "it uses the buffer 'layers.1.scale' of a unit, and did not then"),
        (SetsAnAttribute(), r"layer 0 \(layers.0\): .* sets 'layers.0.is_linear', and did not"),
        (SetsTheMode(), r"layer 1 \(layers.1\): .* sets 'layers.1.training', and did not"),
    ],
)
def test_what_stages_would_not_compute_alike_is_refused(module: Model, message: str) -> None:
    batches = batches_of(0.0, 0.5)
    with pytest.raises(UsageError, match=message):
        pipeline_of(module, batches, mse, 3, "never").train(2)


@pytest.mark.parametrize("stages", [pytest.param(1, marks=slow), 3])
@pytest.mark.parametrize("module", [Replaces(), SetsWithoutEffect(), CopiesItsOutput()])
def test_what_stages_compute_alike_equals_the_plain_loop(module: Model, stages: int) -> None:
    batches = batches_of(0.0, 0.5, 0.0)
    expected = plain([Whole(copy.deepcopy(module))], mse, batches, 2, sgd)
    assert pipeline_of(module, batches, mse, stages, "always").train(3).losses == expected.losses


@pytest.mark.parametrize(
    "drop", [functional.dropout, pytest.param(attend, marks=slow), attend_by_heads]
)
def test_a_dropout_whose_rate_was_0_draws_for_its_own_stage_alone(drop: Any) -> None:
    module, batches = Drops(drop), batches_of(0.0, 0.5, 0.0)
    one, three = (pipeline_of(module, batches, mse, stages, "never") for stages in (1, 3))
    assert one.train(3).losses == three.train(3).losses
