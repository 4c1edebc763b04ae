"""Code of a cut module that asks for the class of a tensor."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.stage.cut.classes import hide_stand_ins
from support.in_process.cut_modules import Whole, cut, mse, pipeline_of, sgd
from support.in_process.plain_loop import plain
from support.slow import mostly_slow

WIDTH = 8


class Asking(nn.Module):
    """Calls a question at five places, on tensors that may be on another stage."""

    def __init__(self, asks: Callable[[torch.Tensor, torch.Tensor], bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.asks = asks

    def forward(self, x: torch.Tensor) -> Any:
        out = x * 3 if self.asks(x, x) else x
        out = first = self.layers[0](out)
        for layer in self.layers[1:]:
            out = layer(out) + first
            if self.asks(out, x) and self.asks(first, out):
                out = torch.tanh(out)
        return out * self.scale if self.asks(out, x) else out


_FOUND, _GENERIC = {type: 1}, type[Any]
ASKS: dict[str, Callable[[Any, Any], bool]] = {
    "is": lambda one, _: type(one) is torch.Tensor,
    "the same": lambda one, other: type(one) is type(other),
    "among": lambda one, _: type(one) in (torch.Tensor, nn.Parameter),
    "instance": lambda one, other: isinstance(one, type(other)),
    "class": lambda one, _: isinstance(type(one), type) and issubclass(type, type),
    "made": lambda one, _: type("Made", (), {}) is not type(one),  # three arguments: a new class
    "of a class": lambda one, _: type(type(one)) is type and type in (type(int),),
    "key": lambda one, _: type in {type(type(one)): one} and _FOUND[type] == 1,
    "generic": lambda one, _: type[Any] == _GENERIC,
    "none": lambda one, _: type(one) is tuple,
}


def vectors() -> Iterator[Any]:
    torch.manual_seed(4)
    for _ in range(3):
        yield torch.randn(4, WIDTH), torch.randn(4, WIDTH)


@pytest.mark.parametrize("name", mostly_slow(ASKS, 2))
def test_the_class_of_a_tensor_is_the_same_on_every_stage(name: str) -> None:
    torch.manual_seed(3)
    module, batches = Asking(ASKS[name]), list(vectors())
    expected = plain([Whole(copy.deepcopy(module))], mse, batches, 2, sgd)
    for stages in (1, 3):
        pipeline = pipeline_of(module, batches, mse, stages, "always")
        assert pipeline.train(3).losses == expected.losses


class Ending(nn.Module):
    """Asks for an attribute that a stand-in has otherwise, behind the last layer."""

    def __init__(self, *, scaled: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(WIDTH)) if scaled else 3.0

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers[1](self.layers[0](x))
        return out * self.scale if out.__class__ is torch.Tensor else out


@pytest.mark.parametrize(
    ("scaled", "text"),
    [(False, "it has 3 operations in all, and had 2"), (True, "it uses scale, and did not then")],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_forward_that_ends_in_another_way_than_planned_is_an_error(
    stages: int, scaled: bool, text: str
) -> None:
    torch.manual_seed(3)
    with pytest.raises(UsageError, match=f"takes another way than when it was cut, .*: {text}"):
        pipeline_of(Ending(scaled=scaled), list(vectors()), mse, stages, "always").train(1)


class Step(nn.Module):
    """A unit that may return a pair, and may get a value in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, held: Any = None, *, is_pair: bool = False) -> Any:
        out = self.linear(x) + self.bias
        if held is not None:
            out = out + held.value
        return (out, out) if is_pair else out


class Turning(nn.Module):
    """Takes the way that its input specifies; 0 is the one that is planned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Step() for _ in range(3))

    def forward(self, x: torch.Tensor, way: torch.Tensor) -> Any:
        first = self.layers[0](x, is_pair=bool(way[0] == 1))
        first = first[0] if isinstance(first, tuple) else first
        second = self.layers[1](first + 1 if way[0] == 2 else first)
        if way[0] == 3:
            return second
        return self.layers[2](second, types.SimpleNamespace(value=first) if way[0] == 4 else None)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        (1, "layers.0 returns another structure"),
        (2, "it has 3 operations up to layers.1, and had 2"),
        (3, "it ends early"),
        (4, "layers.2 got a value that is elsewhere"),
    ],
)
def test_a_forward_that_takes_another_way_later_is_an_error(way: int, text: str) -> None:
    torch.manual_seed(3)
    ways = (torch.zeros(4), torch.full((4,), way))
    batches = [({"x": x, "way": w}, y) for (x, y), w in zip(vectors(), ways, strict=False)]
    with pytest.raises(UsageError, match=f"takes another way than when it was cut.*: {text}"):
        pipeline_of(Turning(), batches, mse, 3, "always").train(2)


class Skipped(Step):
    """Returns what it is called with in its first two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        return self.linear(x) if self.calls > 2 else x


class Skipping(nn.Module):
    """Has a layer that returns its argument at first, and may use the argument again."""

    def __init__(self, *, adds: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Step(), Skipped(), Step(), Step()])
        self.adds = adds

    def forward(self, x: torch.Tensor) -> Any:
        first = self.layers[0](x)
        second = self.layers[1](first)
        third = self.layers[2](second)
        return self.layers[3](first * second + third if self.adds else third)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_layer_that_returns_its_argument_only_at_first_is_an_error(stages: int) -> None:
    torch.manual_seed(3)
    text = "layers.1 returns a new tensor, and returned then what it was called with"
    with pytest.raises(UsageError, match=text):
        pipeline_of(Skipping(adds=True), [*vectors()], mse, stages, "never").train(2)


def test_a_layer_that_returns_its_argument_at_first_trains_if_that_is_not_used_again() -> None:
    torch.manual_seed(3)
    module = Skipping(adds=False)
    expected = plain([Whole(copy.deepcopy(module))], mse, [*vectors()], 2, sgd)
    for stages in (1, 2, 4):
        trained = pipeline_of(module, [*vectors()], mse, stages, "never").train(3)
        assert trained.losses == expected.losses


class Passing(nn.Module):
    """Has a layer that returns its argument, and compares the two or changes one in place."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Step(), Skipped(), Step()])
        self.scale, self.way = nn.Parameter(torch.ones(WIDTH)), way

    def forward(self, x: torch.Tensor) -> Any:
        with torch.set_grad_enabled(self.way == "is"):
            first = self.layers[0](x)
            second = self.layers[1](first)
        if self.way == "in place":
            second.mul_(self.scale)
        elif second is not first:
            second = torch.tanh(second)
        return self.layers[2](second)


def test_a_forward_that_compares_a_unit_s_argument_and_result_is_refused() -> None:
    with pytest.raises(UsageError, match="depends on whether a unit returns a tensor that it is"):
        cut(Passing("is"), next(vectors()))


def test_what_a_unit_without_a_graph_returns_as_it_was_may_change_in_place() -> None:
    torch.manual_seed(3)
    module, batches = Passing("in place"), [*vectors()][:1]
    expected = plain([Whole(copy.deepcopy(module))], mse, batches, 2, sgd)
    for stages in (1, 3):
        trained = pipeline_of(module, batches, mse, stages, "never").train(1)
        assert trained.losses == expected.losses


class Catching(nn.Module):
    """Catches all exceptions around its units."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__()
        self.layers, self.raises = nn.ModuleList(Step() for _ in range(3)), raises

    def forward(self, x: torch.Tensor) -> Any:
        try:
            for layer in self.layers:
                x = torch.tanh(layer(x))
        except BaseException as error:
            if self.raises:
                raise ValueError("a layer failed") from error
            x = self.layers[1](x * 2)
        return x


def test_a_forward_that_catches_all_exceptions_is_left_or_an_error_that_names_it() -> None:
    torch.manual_seed(3)
    module = Catching(raises=False)
    expected = plain([Whole(copy.deepcopy(module))], mse, [*vectors()], 2, sgd)
    for stages in (1, 3):
        trained = pipeline_of(module, [*vectors()], mse, stages, "never").train(3)
        assert trained.losses == expected.losses
    text = "layer 0 .layers.0.: the model's forward catches .* ValueError: a layer failed; have it"
    with pytest.raises(UsageError, match=text):
        pipeline_of(Catching(raises=True), [*vectors()], mse, 3, "never").train(1)


class Casting(nn.Module):
    """Uses an activation, and a cast of it, in its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        first = self.layers[0](x)
        cast = first.float()
        return self.layers[2](self.layers[1](cast) + first * first) + cast


def test_a_cast_that_made_no_tensor_when_planned_is_an_error_where_both_cross() -> None:
    x, y = next(vectors())
    _, layers = cut(Casting(), (x, y))
    parts: Any = layers[:2]
    error = pytest.raises(UsageError, match="a cast makes a tensor, and returned its argument")
    with torch.autocast("cpu", torch.bfloat16), error:
        parts[0].cut.run(parts, [part.unit for part in parts], x)


class Masked(nn.Module):
    """Uses a part of its input behind its layers, if it is there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> Any:
        out = self.layers[1](self.layers[0](x))
        return out if mask is None else out * mask


@pytest.mark.parametrize("stages", [1, 2])
def test_an_input_that_lacks_a_tensor_is_an_error(stages: int) -> None:
    torch.manual_seed(3)
    masks = (torch.ones(4, WIDTH), None)
    batches = [({"x": x, "mask": m}, y) for (x, y), m in zip(vectors(), masks, strict=False)]
    text = "its input lacks a tensor" if stages == 2 else "it has 2 operations in all, and had 3"
    with pytest.raises(UsageError, match=f"takes another way than when it was cut.*: {text}"):
        pipeline_of(Masked(), batches, mse, stages, "always").train(2)


def test_the_code_of_torch_is_left_alone() -> None:
    module = Asking(ASKS["is"])
    pipeline_of(module, list(vectors()), mse, 1, "always")
    assert "type" not in vars(torch.nn.modules.module)


def test_type_takes_the_place_of_the_builtin() -> None:
    namespace: dict[str, Any] = {"nn": nn, "__name__": "job"}
    exec("class Layer(nn.Module):\n    def forward(self, x): return x", namespace)
    hide_stand_ins(namespace["Layer"]())
    hidden = namespace["type"]
    assert hidden(nn.Module) is hidden
    assert hidden[int] == type[int]
    meta = types.new_class("Meta", (hidden,))
    assert isinstance(meta("Made", (), {}), meta)
    assert not isinstance(nn.Module, meta)
    assert not issubclass(type, meta)
