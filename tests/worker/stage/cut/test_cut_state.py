"""State that the units of a cut module leave for each other: refused where it changes a number."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.stage.cut.part import plan_of
from pipeworker.worker.transport.structure import NO_TYPES

WIDTH = 8


class Scaled(nn.Module):
    """A unit that uses a factor of its own, or of an object that it shares with others."""

    def __init__(self, shared: Any) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.factor, self.shared, self.calls, self.noted = 1.0, shared, 0, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        self.shared.seen = self.calls
        factor = self.shared.deep["all"][0].factor
        return self.linear(x) * (self.factor * self.shared.factor * factor) + self.bias


class Factor:
    """An object without a dict."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Shared:
    """An object that is no module."""

    def __init__(self) -> None:
        self.factor, self.seen = 1.0, 0
        self.deep = {"all": [Factor()]}


class Positions(nn.Module):
    """A cache of numbers that depend on lengths alone, which all units have."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.waves = 0, torch.zeros(0)

    def forward(self, length: int) -> torch.Tensor:
        if length > self.longest:
            self.longest = length
            self.waves = torch.arange(length * 1.0).sin()
        return self.waves[:length]


class Placed(nn.Module):
    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.positions = positions

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) * self.positions(x.shape[-1]) + self.bias


class Stateful(nn.Module):
    """Units and objects beside each other, and a forward that is given."""

    def __init__(self, way: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.shared, self.steps, self.heard = Shared(), 0, 1.0
        self.l = nn.ModuleList(Scaled(self.shared) for _ in range(3))
        self.apart = nn.ModuleList(Scaled(Shared()) for _ in range(3))
        self.adding = nn.ModuleList(Adding() for _ in range(2))
        self.telling = nn.ModuleList(Telling() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self, x)

    def hear(self, *_: Any) -> None:
        self.heard = 2.0


def read_from_a_unit(m: Any, x: torch.Tensor) -> Any:
    return m.head(m.apart[0](x) * m.apart[0].calls)


def read_from_an_object(m: Any, x: torch.Tensor) -> Any:
    return m.head(m.apart[0](x) * m.apart[0].shared.seen)


def set_by_a_hook(m: Any, x: torch.Tensor) -> Any:
    return m.head(m.apart[0](x) * m.heard)


def read_before_it_runs(m: Any, x: torch.Tensor) -> Any:
    out = m.apart[0](x)
    return m.apart[1](out * m.apart[1].calls)


def counted(m: Any, x: torch.Tensor) -> Any:
    m.steps += 1
    return m.head(m.apart[0](x) * m.steps)


def set_on_a_unit(m: Any, x: torch.Tensor) -> Any:
    m.apart[1].factor = 0.5
    return m.apart[1](m.apart[0](x))


def switched(m: Any, x: torch.Tensor) -> Any:
    out = m.apart[0](x)
    m.apart[1].shared.factor = 0.5
    return m.apart[1](out)


def switched_further_down(m: Any, x: torch.Tensor) -> Any:
    out = m.apart[0](x)
    m.apart[1].shared.deep["all"][0].factor = 0.5
    return m.apart[1](out)


def told_by_another(m: Any, x: torch.Tensor) -> Any:
    m.l[0](x)
    m.shared.factor = m.shared.seen * 2.0
    return m.l[1](x)


def set_for_the_next(m: Any, x: torch.Tensor) -> Any:
    out = m.apart[0](x)
    m.apart[0].factor = 0.5
    return m.apart[1](out)


def reset_behind(m: Any, x: torch.Tensor) -> Any:
    x = m.apart[0](x * (m.steps + 1))
    m.steps = 1
    x = m.apart[2](m.apart[1](x))
    m.steps = 0
    return m.head(x)


def reset_in_a_clause(m: Any, x: torch.Tensor) -> Any:
    x = m.apart[0](x * (m.steps + 1))
    try:
        m.steps = 1
        x = m.apart[2](m.apart[1](x))
    finally:
        m.steps = 0
    return m.head(x)


def counted_by_layer(m: Any, x: torch.Tensor) -> Any:
    for step, layer in enumerate((*m.apart, m.head)):
        m.steps = step
        x = layer(x) * (m.steps + 1)
    return x


def set_by_another_for_the_next(m: Any, x: torch.Tensor) -> Any:
    out = m.l[1](m.l[0](x))
    m.shared.factor = 0.5
    return out


class Adding(nn.Module):
    """A unit that adds its last output to its next one, and can be reset."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.linear(x) * self.calls + self.bias


class Telling(nn.Module):
    """A unit that calls a function that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, tell: Callable[[], int]) -> Any:
        return self.linear(x) * tell() + self.bias


def told_by_an_object(m: Any, x: torch.Tensor) -> Any:
    def tell(told: Any) -> int:
        told.names.add(f"{len(told.names)}")
        return len(told.names)

    method = MethodType(tell, SimpleNamespace(names=set()))
    return m.telling[1](m.telling[0](x, method), method)


def told_by_bytes(m: Any, x: torch.Tensor) -> Any:
    def tell(told: bytearray) -> int:
        told[0] += 1
        return told[0]

    function = partial(tell, bytearray(1))
    return m.telling[1](m.telling[0](x, function), function)


def told_by_a_closure(m: Any, x: torch.Tensor) -> Any:
    calls = 0

    def tell() -> int:
        nonlocal calls
        calls += 1
        return calls

    return m.telling[1](m.telling[0](x, tell), tell)


def reset_first(m: Any, x: torch.Tensor) -> Any:
    for one in m.adding:
        one.calls = 0
    return m.adding[1](m.adding[0](x))


def set_from_the_second_on(m: Any, x: torch.Tensor) -> Any:
    if m.steps:
        m.apart[0].factor = 0.5
    m.steps += 1
    return m.apart[1](m.apart[0](x))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (
            read_from_a_unit,
            "depends on what a unit leaves .* another stage, mul gets other arguments",
        ),
        (
            read_from_an_object,
            "depends on what a unit leaves .* another stage, mul gets other arguments",
        ),
        (set_by_a_hook, "depends on what a unit leaves .* another stage, mul gets other arguments"),
        (read_before_it_runs, "an earlier forward leaves .* in a second run mul gets other"),
        (counted, "what an earlier forward leaves .* in a second run mul gets other arguments"),
        (set_on_a_unit, "sets 'factor' of apart.1"),
        (switched, "sets 'shared' of apart.1"),
        (switched_further_down, "sets 'shared' of apart.1"),
        (told_by_another, "sets 'shared' of l.1"),
        (told_by_an_object, "depends on what a unit leaves .* telling.1 gets other arguments"),
        (told_by_bytes, "depends on what a unit leaves .* telling.1 gets other arguments"),
        (told_by_a_closure, "depends on what a unit leaves .* telling.1 gets other arguments"),
        (reset_first, "layer 0 .*sets 'calls' of adding.0 for the next forward"),
        (set_from_the_second_on, "sets 'factor' of apart.0 for the next forward"),
        (set_for_the_next, "layer 0 .*sets 'factor' of apart.0 for the next forward"),
        (reset_behind, "layer 0 .* what a stage that ends behind apart.1 leaves .* its next run"),
        (set_by_another_for_the_next, "sets 'shared' of l.0 for the next forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_another_stage_would_not_see_is_refused(way: Any, message: str) -> None:
    module = Stateful(way)
    module.apart[0].register_forward_hook(module.hear)
    with pytest.raises(UsageError, match=message):
        plan_of(module, NO_TYPES, torch.randn(4, WIDTH))


@pytest.mark.parametrize("way", [reset_in_a_clause, counted_by_layer])
def test_state_that_is_as_before_when_a_stage_ends_is_no_reason_to_refuse(way: Any) -> None:
    module = Stateful(way)
    assert len(plan_of(module, NO_TYPES, torch.randn(4, WIDTH))) == 4


def test_a_hook_that_holds_the_module_is_refused() -> None:
    module = Stateful(set_by_a_hook)
    module.apart[0].register_forward_hook(lambda *_: setattr(module, "heard", 2.0))
    with pytest.raises(UsageError, match="a hook or another function holds the module, and sets"):
        plan_of(module, NO_TYPES, torch.randn(4, WIDTH))


class Noting(nn.Module):
    """A unit that calls another unit, and notes something on it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.other: Any = [other]

    def forward(self, x: torch.Tensor) -> Any:
        out = self.linear(self.other[0](x)) + self.bias
        self.other[0].noted += 1
        return out


def test_what_is_noted_on_a_unit_is_no_reason_to_refuse() -> None:
    module = Stateful(lambda m, x: m.noting(m.head(x) + m.apart[0](x)))
    module.noting = Noting(module.apart[0])
    plan = plan_of(module, NO_TYPES, torch.randn(4, WIDTH))
    assert plan.units == ["head", "apart.0", "noting"]


def test_state_that_changes_no_number_is_no_reason_to_refuse() -> None:
    positions = Positions()
    module = Stateful(lambda m, x: m.l[2](m.placed[1](m.placed[0](m.l[1](m.l[0](x))))))
    module.placed = nn.ModuleList(Placed(positions) for _ in range(2))
    module.register_forward_pre_hook(lambda m, _: setattr(m, "steps", m.steps + 1))
    plan = plan_of(module, NO_TYPES, torch.randn(4, WIDTH))
    assert plan.units == ["l.0", "l.1", "placed.0", "placed.1", "l.2"]


class Child(nn.Linear):
    """A unit that uses an attribute of the module that it is in."""

    def __init__(self, parent: nn.Module) -> None:
        super().__init__(WIDTH, WIDTH)
        self.parent: list[Any] = [parent]

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.parent[0].factor


class Parent(nn.Module):
    """A forward that sets the attribute, or leaves it as it is."""

    def __init__(self, *, sets: bool) -> None:
        super().__init__()
        self.factor, self.sets = 1.0, sets
        self.layers = nn.ModuleList(Child(self) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers[0](x)
        if self.sets:
            self.factor = 2.0
        return self.layers[1](out)


def test_an_attribute_of_a_module_around_a_unit_that_the_unit_uses_is_not_set() -> None:
    assert len(plan_of(Parent(sets=False), NO_TYPES, torch.randn(2, WIDTH))) == 2
    with pytest.raises(UsageError, match=r"sets 'parent\.factor' of layers\.1"):
        plan_of(Parent(sets=True), NO_TYPES, torch.randn(2, WIDTH))
