"""A module with a habit of libraries is cut into layers: the bits are those of its own forward."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeworker.plan.placement import Placement
from support.draws import some
from support.in_process.cut_modules import (
    WIDTH,
    Whole,
    assert_same_tensors,
    cut,
    mse,
    pipeline_of,
    sgd,
    vectors,
)
from support.in_process.layers import noisy
from support.in_process.pipelines import Pipeline, filled
from support.in_process.plain_loop import assert_equal, plain
from support.slow import mostly_slow


class Biased(nn.Module):
    """A saved buffer is used outside of its layers, as BART's bias of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.bias: torch.Tensor
        self.register_buffer("bias", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.bias


class Shifting(nn.Module):
    """Changes a view of what a layer returned, and a table that it fills from a saved buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.base: torch.Tensor
        self.register_buffer("base", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers[0](x)
        out[:, :3] += x[:, :3]
        out = self.layers[1](out)
        table = torch.zeros(2, WIDTH)
        table[0] = self.base
        table[1, 2:] = self.base[2:] * 2
        return self.layers[2](out) + table.sum(dim=0)


class Turned(nn.Linear):
    """Returns a transposed view, and one of a part of its memory; it may need numbers for that."""

    def __init__(self, looks: bool) -> None:
        super().__init__(WIDTH, 2 * WIDTH)
        self.looks = looks

    def forward(self, x: torch.Tensor) -> Any:
        whole = super().forward(x)
        if self.looks and whole.sum().item() == 0.5:
            return whole, whole
        return whole[:, :WIDTH].view(len(x), 2, -1).transpose(1, 2), whole[:, 1 : WIDTH + 1]


class Strided(nn.Module):
    """Does what depends on the strides of what a layer has returned."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.first, self.gain = Turned(looks), nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        turned, part = self.first(x)
        made, plain = turned.contiguous(), part.contiguous()
        out = self.layers[0](turned.transpose(1, 2).reshape(len(x), -1) * self.gain)
        back = turned.transpose(1, 2)
        return self.layers[1](out + made.view(len(x), -1) + plain) + back.flatten(1) + part


class HookedBackward(Biased):
    """Has hooks on its units that are called before their backward."""

    def __init__(self) -> None:
        super().__init__()
        first, middle, last = self.layers
        for unit in (middle, last):
            unit.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 0.5,))
        first.register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,))


class Disabling(Biased):
    """Disables gradients around units, and enables them behind."""

    def forward(self, x: torch.Tensor) -> Any:
        first, middle, last = self.layers
        hidden = first(x)
        torch.set_grad_enabled(False)
        factor = torch.tanh(middle(hidden))
        torch.set_grad_enabled(True)
        return last(hidden) * factor


class Filling(Biased):
    """Fills memory without numbers, wholly and in parts, beside calls that make no tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        first, middle, last = self.layers
        hidden, whole = first(x), torch.empty(len(x), WIDTH)
        hidden[:, :3] = 1
        whole[:] = hidden if len(hidden) else x
        parts, total = torch.empty(len(x), 2, WIDTH), torch.empty(len(x), 1)
        parts[:, 0] = middle(whole)
        parts[:, 1] = whole
        with torch.no_grad():
            same = torch.sum(whole.detach(), 1, keepdim=True, out=total)
        return last(parts.sum(1) + same) + total


class Keeping(nn.Module):
    """Keeps what it computes in the part of a cache that is its own, and reads it there."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(WIDTH, WIDTH), index

    def forward(self, x: torch.Tensor, cache: Any) -> Any:
        cache.parts[self.index] = self.linear(x)
        return torch.tanh(cache.parts[self.index])


class Cached(nn.Module):
    """Calls all of its layers with one object, as XLM does with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeping(index) for index in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        cache = SimpleNamespace(parts={})
        for layer in self.layers:
            x = layer(x, cache)
        return x


class Located(Biased):
    """Reads the device, the dtype and the shape of a buffer of a unit, as libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_buffer("dummy", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        dummy = self.layers[0].get_buffer("dummy")
        places = torch.arange(WIDTH, device=dummy.device, dtype=dummy.dtype)
        return super().forward(x) * places * len(dummy) + dummy.shape[0]


class Measured(nn.Linear):
    """Returns lengths, which depend on the input alone, beside an activation."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), input.argmax(1) // 2


class Padded(nn.Module):
    """Compares numbers of its own with those that a layer has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Measured(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        places = torch.arange(WIDTH)
        for layer in self.layers:
            x, lengths = layer(x)
            x[places >= lengths[:, None]] = 0.0
            x = x + (places > lengths[:, None]) + (places == lengths[:, None]) * 2
            x = x + (places != lengths[:, None]) * 3
        return x


class Selecting(nn.Module):
    """Selects what its layers return by masks of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        rows, numbers = x[:, 0] > 0, x > 0.5
        x = torch.tanh(self.layers[0](x))
        some = torch.tanh(self.layers[1](x[rows]))
        even = some[:, torch.arange(WIDTH) % 2 == 0]
        return self.layers[3](self.layers[2](x) * x[numbers].sum() + even.sum())


class Calling(nn.Linear):
    """Does more in its call than in its forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def __call__(self, x: torch.Tensor, factor: float) -> Any:
        return super().__call__(x * 2) * factor


class Called(nn.Module):
    """Has units with a call of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Calling() for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x, place + 2.0))
        return x


class Watch(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
        return x


class Watched(nn.Module):
    """A unit returns its argument, which has a hook and is used again."""

    def __init__(self) -> None:
        super().__init__()
        kinds = nn.Linear, nn.Linear, Watch, nn.Linear
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH) for kind in kinds)

    def forward(self, x: torch.Tensor) -> Any:
        first, second, watch, last = self.layers
        before = second(first(x))
        return last(watch(before)) + before


@pytest.mark.parametrize(
    "make",
    mostly_slow(
        [
            Biased,
            Called,
            Cached,
            Disabling,
            Shifting,
            Filling,
            HookedBackward,
            Located,
            Padded,
            Selecting,
            Watched,
            partial(Strided, looks=False),
            partial(Strided, looks=True),
        ],
        3,
    ),
)
def test_a_module_with_a_habit_equals_its_own_forward(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    module, batches = make(), list(vectors())
    expected = plain([Whole(copy.deepcopy(module))], mse, batches, 2, sgd)
    for stages, mode in some(((2, "never"), (1, "always"), (3, "always")), 2):
        trained = pipeline_of(module, batches, mse, stages, mode).train(3)
        assert trained.losses == expected.losses
        assert_same_tensors(trained.weights, expected.weights)


class Banked(nn.Module):
    """A unit that needs numbers, and has a module that is a unit itself."""

    def __init__(self, bank: nn.Module) -> None:
        super().__init__()
        self.linear, self.bank = nn.Linear(WIDTH, WIDTH), bank

    def forward(self, x: torch.Tensor) -> Any:
        assert x.isfinite().all().item()
        return self.linear(x) + self.bank(x)


class Bank(nn.Module):
    """A frozen module, which units share."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.layers = nn.ModuleList(Banked(self.bank) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_unit_that_needs_numbers_may_have_another_unit() -> None:
    torch.manual_seed(3)
    module, batches = Bank(), list(vectors())
    expected = plain([Whole(copy.deepcopy(module))], mse, batches, 2, sgd)
    for stages in (1, 3):
        trained = pipeline_of(module, batches, mse, stages, "never").train(3)
        assert trained.losses == expected.losses


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", mostly_slow(["spectral_norm", "weight_norm"], 2))
def test_a_deprecated_norm_of_weights_equals_its_own_forward(norm: str) -> None:
    """torch copies no module with it: the weight is an attribute with a graph."""

    def make() -> nn.Module:
        torch.manual_seed(3)
        module = Shifting()
        for layer in module.layers[:2]:
            getattr(nn.utils, norm)(layer)
        module(torch.randn(2, WIDTH))
        return module

    batches = list(vectors())
    expected = plain([Whole(make())], mse, batches, 2, sgd)
    for stages, mode in ((1, "never"), (3, "always")):
        plan, layers = cut(make(), batches[0])
        way = filled(Placement.identity(stages), mode)
        pipeline = Pipeline(
            layers, mse, batches, way, microbatches=2, skips=plan.skips(), optimizer=sgd
        )
        trained = pipeline.train(3)
        assert trained.losses == expected.losses
        assert_same_tensors(trained.weights, expected.weights)


class Drawing(nn.Module):
    """Numbers of the input are drawn behind numbers of activations, as BART drops its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)), 0.3, self.training)
            x = x * (1 + torch.rand(())) + random.random() * torch.rand(WIDTH)
        return F.alpha_dropout(x, 0.2, self.training)


def test_random_numbers_between_layers_do_not_depend_on_the_number_of_stages() -> None:
    torch.manual_seed(3)
    module, batches = Drawing(), list(vectors())
    plan, _ = cut(copy.deepcopy(module), batches[0])
    assert len(plan.random) == 4
    found = []
    for stages, mode in some(((1, "never"), (1, "always"), (3, "always"), (2, "never")), 2):
        found.append(pipeline_of(module, batches, mse, stages, mode).train(3))
    for trained in found[1:]:
        assert_equal(trained, found[0])
    assert len({loss for losses in found[0].losses for loss in losses}) == 6


class Touching(nn.Module):
    """Changes its own input before it uses it: on every stage again."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.change = change

    def forward(self, x: torch.Tensor) -> Any:
        self.change(x)
        out = x
        for layer in self.layers:
            out = layer(out) + x
        return out


@pytest.mark.parametrize("change", [lambda x: x.mul_(2), lambda x: x.data.mul_(2)])
def test_a_change_of_the_input_is_made_once(change: Callable[[torch.Tensor], Any]) -> None:
    torch.manual_seed(3)
    module, batches = Touching(change), list(vectors())
    plan, _ = cut(copy.deepcopy(module), copy.deepcopy(batches[0]))
    assert plan.touched == [0]
    expected = plain([Whole(copy.deepcopy(module))], mse, copy.deepcopy(batches), 2, sgd)
    for stages, mode in some(((1, "always"), (2, "always"), (3, "never")), 2):
        pipeline = pipeline_of(module, copy.deepcopy(batches), mse, stages, mode)
        assert pipeline.train(3).losses == expected.losses


class NoisyUnit(nn.Linear):
    """Adds noise to the gradients of its input and its output."""

    def __init__(self, index: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index % 2:  # the other layers return their argument
            return noisy(x)
        return noisy(super().forward(noisy(x)))


class NoisyUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NoisyUnit(index) for index in range(6))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def test_hooks_of_units_draw_the_same_for_any_number_of_stages() -> None:
    torch.manual_seed(3)
    module, batches = NoisyUnits(), list(vectors())
    first, *others = [
        pipeline_of(module, batches, mse, stages, mode).train(3)
        for stages, mode in ((1, "never"), (2, "always"), (3, "never"), (6, "always"))
    ]
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(first.weights[name], other.weights[name]) for name in first.weights)
