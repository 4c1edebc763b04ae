"""Containers in the forward of a module that is cut: arguments of layers, and what it returns."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_pytree_node

from support.draws import some
from support.in_process.cut_modules import (
    WIDTH,
    Whole,
    assert_same_tensors,
    mse,
    pipeline_of,
    sgd,
    vectors,
)
from support.in_process.plain_loop import plain


def assert_equals_its_own_forward(
    make: Callable[[], nn.Module], loss: Any, ways: Sequence[tuple[int, str]]
) -> None:
    """Compare a module with the plain loop, for numbers of stages and recompute modes."""
    torch.manual_seed(3)
    module, batches = make(), list(vectors())
    expected = plain([Whole(copy.deepcopy(module))], loss, batches, 2, sgd)
    for stages, mode in ways:
        trained = pipeline_of(module, batches, loss, stages, mode).train(3)
        assert trained.losses == expected.losses
        assert_same_tensors(trained.weights, expected.weights)


class Remembering(nn.Module):
    """A layer that keeps what it computes in a container that all layers get."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(WIDTH, WIDTH), place

    def forward(self, x: torch.Tensor, kept: Any) -> Any:
        out = torch.tanh(self.linear(x))
        if isinstance(kept, list):
            out = out + (kept[-1][0] if kept else 0)
            kept.append([out])
        else:
            out = out + kept.get(self.place - 1, 0)
            kept[self.place] = out
        return out


class Remembered(nn.Module):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.layers, self.make = nn.ModuleList(Remembering(i) for i in range(5)), make

    def forward(self, x: torch.Tensor) -> Any:
        kept = self.make()
        for layer in self.layers:
            x = layer(x, kept)
        last = kept[-1][0] if isinstance(kept, list) else kept[len(self.layers) - 2]
        return x + last


class Registry(UserDict[int, Any]):
    """A dict of which torch's pytree does not know what it holds."""


@pytest.mark.parametrize("make", [dict, list, Registry])
def test_a_container_that_layers_fill_holds_what_later_layers_read(make: Any) -> None:
    ways = ((1, "always"), (2, "never"), (3, "always"), (5, "never"))
    turn = 0 if make is list else 1
    assert_equals_its_own_forward(lambda: Remembered(make), mse, some(ways, 2, turn))


class Ordered(nn.Module):
    """Returns a dict whose order of keys is not that of its copies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        out = Sorted(z=self.layers[0](x))
        out["a"] = self.layers[1](out["z"])
        self.layers[2](next(iter(out.values())))
        return out


class Sorted(dict[str, Any]):
    """A dict that pytree copies with its keys in alphabetical order."""


register_pytree_node(
    Sorted,
    lambda d: ([d[key] for key in sorted(d)], sorted(d)),
    lambda values, keys: Sorted(zip(keys, values, strict=True)),
)


def first(output: Any, target: torch.Tensor) -> Any:
    return mse(next(iter(output.values())), target)


def test_a_returned_dict_keeps_the_order_of_its_keys() -> None:
    assert_equals_its_own_forward(Ordered, first, ((1, "never"), (2, "never"), (3, "never")))


class Exchanging(nn.Module):
    """Each layer replaces an entry of a list that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Exchange(i % 2) for i in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        both = [x, x * 2]
        for layer in self.layers:
            layer(both)
        return torch.sin(both[0]) + both[1]


class Exchange(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.linear, self.place = nn.Linear(WIDTH, WIDTH), place

    def forward(self, both: list[torch.Tensor]) -> None:
        both[self.place] = torch.tanh(self.linear(both[self.place]) + both[1 - self.place])


def test_a_layer_may_replace_what_a_list_holds() -> None:
    assert_equals_its_own_forward(Exchanging, mse, ((1, "always"), (2, "never"), (3, "always")))


class Outputs(NamedTuple):
    last: torch.Tensor
    more: list[torch.Tensor]


class Auxiliary(nn.Module):
    """Returns outputs of early layers in a named tuple, as GoogLeNet does in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> Outputs:
        more = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            more.append(x)
        return Outputs(x, more)


def all_outputs(output: Outputs, target: torch.Tensor) -> Any:
    assert type(output) is Outputs
    return mse(output.last, target) + sum(mse(one, target) for one in output.more)


def test_outputs_of_several_stages_are_returned_in_a_named_tuple() -> None:
    assert_equals_its_own_forward(
        Auxiliary, all_outputs, ((1, "never"), (2, "always"), (4, "never"))
    )
