"""The layers of a model: found, checked, and built one at a time."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job.layers import build, entries, is_sequence


class Own(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.ModuleList([nn.Linear(1, 1)]),
            r"model\(\) returned a ModuleList; return a list of layers: list\(layers\)$",
        ),
        (
            lambda: nn.ModuleDict({"a": nn.Linear(1, 1)}),
            r"returned a ModuleDict; return a list of layers: list\(layers\.values\(\)\)$",
        ),
        (lambda: None, r"model\(\) returned a NoneType; return an nn.Module or a list"),
        (
            lambda: torch.compile(nn.Sequential(nn.ReLU())),
            "returned an OptimizedModule, which cannot be divided; return the module itself, "
            "before torch.compile, and use --compile",
        ),
        (
            lambda: torch.jit.script(nn.Sequential(nn.ReLU())),
            r"model\(\) returned a RecursiveScriptModule, which cannot be divided",
        ),
        (list, "returned no layers; return at least one for each stage"),
        (nn.Sequential, "returned no layers"),
        (
            lambda: [nn.ReLU(), 3],
            r"layer 1 of model\(\) is an int; make it an nn.Module or a function",
        ),
    ],
)
def test_a_model_that_is_no_sequence_of_layers(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        entries(make())


def test_a_sequential_whose_forward_was_replaced_is_no_sequence() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert is_sequence(model)
    model.forward = lambda x: 2 * x  # type: ignore[method-assign]
    assert not is_sequence(model)


def test_a_module_with_a_forward_of_its_own_is_cut() -> None:
    layers: dict[str, nn.Module] = {"one": nn.ReLU()}
    for model in (Own(nn.ReLU()), nn.Linear(1, 1)):
        found: list[nn.Module] = []

        def cut(module: nn.Module, found: list[nn.Module] = found) -> dict[str, nn.Module]:
            found.append(module)
            return layers

        assert entries(model, cut) == layers
        assert found == [model]


def test_entries_are_the_layers_in_order() -> None:
    layers = [nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)]
    for model in (layers, tuple(layers), nn.Sequential(*layers)):
        assert entries(model) == dict(zip("012", layers, strict=True))
    named = nn.Sequential(OrderedDict(embed=layers[0], head=layers[2]))
    assert entries(named) == {"embed": layers[0], "head": layers[2]}


def test_callables_are_built_only_when_asked() -> None:
    built = []

    def make() -> nn.Module:
        built.append(1)
        return nn.ReLU()

    (entry,) = entries([make]).values()
    assert built == []
    assert isinstance(build(entry, 0), nn.ReLU)
    assert built == [1]
    module = nn.ReLU()
    assert build(module, 0) is module


def test_a_callable_that_builds_something_else() -> None:
    with pytest.raises(UsageError, match=r"layer 4 of model\(\) was built as an int"):
        build(lambda: 3, 4)  # type: ignore[arg-type,return-value]
    with pytest.raises(UsageError, match=r"layer 4 of model\(\) was built as a dict; build an"):
        build(dict, 4)  # type: ignore[arg-type]


def test_a_function_of_one_argument_is_a_layer() -> None:
    given = [nn.Linear(2, 2), torch.relu, lambda x: x.flatten(1), nn.ReLU]
    found = list(entries(given).values())
    assert [type(one).__name__ for one in found[:3]] == ["Linear", "relu", "lambda"]
    assert found[3] is nn.ReLU
    assert isinstance(found[1], nn.Module)
    assert found[1](torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    # A class builds a layer, also if it has one argument.
    for wrong in (lambda x, y: x, nn.Linear, nn.LayerNorm, operator.add):
        with pytest.raises(UsageError, match=r"layer 0 of model\(\)"):
            entries([wrong])
