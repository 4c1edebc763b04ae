"""State that the units of a cut module leave for each other: refused where it changes a number."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.stage.cut.common import CommonVariables
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


class Common(nn.Module):
    """A unit that counts in its class and in a global variable, and that may use the count."""

    count, seen, factor, left = 0, [0], 1.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        self.uses: Callable[[], float] = lambda: 1.0

    def forward(self, x: torch.Tensor) -> Any:
        Common.count += 1
        Common.seen.append(Common.count)
        _COUNTS["all"] = Common.count
        return self.linear(x) * self.uses() + self.bias


_COUNTS = {"all": 0}


def leave() -> float:
    Common.left = 2.0
    return 1.0


class OfCommon(nn.Module):
    """Units of one class, and a forward that may use what they count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Common() for _ in range(3))
        self.uses: Callable[[], float] = lambda: 1.0

    def forward(self, x: torch.Tensor) -> Any:
        for place, layer in enumerate(self.layers):
            Common.factor = place + 1.0  # on each stage
            x = layer(x)
        return x * self.uses()


@pytest.mark.parametrize(
    "read",
    [lambda: Common.count, lambda: len(Common.seen), lambda: _COUNTS["all"]],
    ids=["class", "list of a class", "global variable"],
)
def test_a_value_that_units_leave_in_a_class_or_a_global_variable_is_refused(
    read: Callable[[], float],
) -> None:
    module = OfCommon()
    vars(module.layers[1])["uses"] = read
    with pytest.raises(UsageError, match=r"layer 1 .* sets .*, which each stage has for itself"):
        plan_of(module, NO_TYPES, torch.randn(2, WIDTH))
    module = OfCommon()
    module.uses = read
    with pytest.raises(UsageError, match="depends on what a unit leaves in an attribute"):
        plan_of(module, NO_TYPES, torch.randn(2, WIDTH))


@pytest.mark.parametrize(
    ("leaves", "reads", "message"),
    [
        (1, 2, r"layer 2 .* sets Common.count, which each stage has"),
        (2, 0, r"layer 0 .* sets Common.count for the next forward, and each stage has one"),
    ],
    ids=["a later unit", "an earlier unit in the next forward"],
)
def test_a_value_that_a_unit_leaves_beside_others_is_refused(
    leaves: int, reads: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Common, "left", 1.0)
    module = OfCommon()
    vars(module.layers[leaves])["uses"] = leave
    vars(module.layers[reads])["uses"] = lambda: Common.left
    with pytest.raises(UsageError, match=message):
        plan_of(module, NO_TYPES, torch.randn(2, WIDTH))


def test_states_of_a_variable_that_did_not_change_share_its_copy() -> None:
    """Each unit keeps the states at its last call, and a file may have a list of all its data."""
    common, variable = CommonVariables([Common()]), (Common, "seen")
    before, again = common.states(), common.states()
    assert before[variable] is again[variable]
    Common.seen.append(0)
    assert common.states()[variable] is not before[variable]
    common.restore()
    assert [content for _, content in before[variable][2]] == [Common.seen]


class SetsBehind(nn.Module):
    """A forward that sets an attribute of a class behind its units, and perhaps before them."""

    def __init__(self, *, at_first: bool) -> None:
        super().__init__()
        self.layers, self.at_first = nn.ModuleList(Common() for _ in range(2)), at_first
        vars(self.layers[0])["uses"] = lambda: Common.factor

    def forward(self, x: torch.Tensor) -> Any:
        if self.at_first:
            Common.factor = 1.0
        x = self.layers[1](self.layers[0](x))
        Common.factor = 2.0
        return x


def test_a_value_that_the_forward_leaves_in_a_class_for_an_earlier_unit_is_refused() -> None:
    assert len(plan_of(SetsBehind(at_first=True), NO_TYPES, torch.randn(2, WIDTH))) == 2
    message = r"layer 0 .* sets .* for the next forward, and each stage has one"
    with pytest.raises(UsageError, match=message):
        plan_of(SetsBehind(at_first=False), NO_TYPES, torch.randn(2, WIDTH))


def test_what_units_count_in_a_class_and_do_not_use_is_as_before() -> None:
    module = OfCommon()
    vars(module.layers[2])["uses"] = lambda: Common.factor
    seen, before = Common.seen, (Common.count, [*Common.seen], {**_COUNTS})
    assert len(plan_of(module, NO_TYPES, torch.randn(2, WIDTH))) == 3
    assert (Common.count, Common.seen, _COUNTS) == before
    assert Common.seen is seen


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


class Kept:
    """A class that is no module's."""

    factor = 1.0

    def __init__(self) -> None:
        self.own = 1.0


class Nesting:
    """A class with another one."""

    class Inner:
        """The other one."""

        factor = 1.0


@dataclass(slots=True)
class Slotted:
    """A class whose objects have no dict."""

    own: float = 1.0


_SLOTTED, _IDS, _MANY = Slotted(), itertools.count(1), dict.fromkeys(range(1000), 1.0)
_OBJECT, _NAMESPACE, _NESTED = Kept(), SimpleNamespace(factor=1.0), {"all": {"factor": 1.0}}
_RECENT, _NUMBERS, _TENSOR = deque([1.0]), np.ones(1), torch.ones(1)
_PYTHON, _NUMPY = random.Random(0), np.random.default_rng(0)
_TORCH = torch.Generator().manual_seed(0)
_VARIABLE: ContextVar[float] = ContextVar("factor", default=1.0)


def default(seen: list[int] = [1]) -> list[int]:  # noqa: B006
    return seen


def keeping() -> float:
    keeping.factor += 1.0  # type: ignore[attr-defined]
    return float(keeping.factor)  # type: ignore[attr-defined]


keeping.factor = 1.0  # type: ignore[attr-defined]


def closure() -> Callable[[], int]:
    count = 0

    def called() -> int:
        nonlocal count
        count += 1
        return count

    return called


_count = closure()


@pytest.mark.parametrize(
    ("leaves", "reads"),
    [
        (lambda: setattr(_OBJECT, "own", 2.0), lambda: _OBJECT.own),
        (lambda: setattr(_NAMESPACE, "factor", 2.0), lambda: _NAMESPACE.factor),
        (lambda: setattr(_SLOTTED, "own", 2.0), lambda: _SLOTTED.own),
        (lambda: setattr(Kept, "factor", 2.0), lambda: Kept.factor),
        (lambda: setattr(Nesting.Inner, "factor", 2.0), lambda: Nesting.Inner.factor),
        (lambda: next(_IDS), lambda: next(_IDS)),
        (lambda: _NESTED["all"].update(factor=2.0), lambda: _NESTED["all"]["factor"]),
        (lambda: _MANY.update({999: 2.0}), lambda: _MANY[999]),
        (lambda: _RECENT.append(2.0), lambda: len(_RECENT)),
        (lambda: _NUMBERS.fill(2.0), lambda: float(_NUMBERS[0])),
        (lambda: _TENSOR.fill_(2.0), lambda: _TENSOR),
        (_PYTHON.random, _PYTHON.random),
        (lambda: _NUMPY.random(), lambda: float(_NUMPY.random())),
        (
            lambda: torch.rand(1, generator=_TORCH),
            lambda: torch.rand(1, generator=_TORCH),
        ),
        (lambda: _VARIABLE.set(2.0), _VARIABLE.get),
        (lambda: default().append(1), lambda: len(default())),
        (lambda: keeping(), lambda: keeping()),
        (lambda: _count(), lambda: _count()),
    ],
)
def test_what_a_unit_leaves_within_a_global_variable_is_refused(leaves: Any, reads: Any) -> None:
    module = OfCommon()
    vars(module.layers[0])["uses"] = lambda: (leaves(), 1.0)[1]
    vars(module.layers[2])["uses"] = reads
    with pytest.raises(UsageError, match=r"layer 2 .* sets .*, which each stage has for itself"):
        plan_of(module, NO_TYPES, torch.randn(2, WIDTH))


_BASE, _NOTES = torch.ones(4), np.ones(4)
_EXPANDED, _READ_ONLY = _BASE.expand(3, 4), np.broadcast_to(_NOTES, (3, 4))


@pytest.mark.parametrize(
    "leaves",
    [
        lambda: _BASE.add_(1.0),
        lambda: _NOTES.__iadd__(1.0),
        lambda: setattr(_SLOTTED, "own", _SLOTTED.own + 1),
        lambda: next(_IDS),
    ],
)
def test_what_units_leave_within_a_global_variable_and_do_not_use_is_no_reason_to_refuse(
    leaves: Any,
) -> None:
    module = OfCommon()
    for layer in module.layers:
        vars(layer)["uses"] = lambda: (leaves(), 1.0)[1]
    assert len(plan_of(module, NO_TYPES, torch.randn(2, WIDTH))) == 3
    assert _BASE.equal(torch.ones(4))
    assert _NOTES.tolist() == [1.0] * 4


_CALLED: list[str] = []


class Lazy(OrderedDict[str, Any]):
    """Makes a value when one is asked for, as the activations of transformers."""

    def __getitem__(self, key: str) -> Any:
        _CALLED.append(key)
        return object()


class Forwarding:
    """Looks up attributes in a dict."""

    __slots__ = ("inner",)

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        _CALLED.append(name)
        return self.inner[name]


class Symbolic(type):
    """A metaclass whose classes are compared otherwise."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("no truth value")

    def __hash__(cls) -> int:
        return 1


class Variable(metaclass=Symbolic):
    """One of these classes."""


_LAZY, _SYSTEM = Lazy(tanh=1), random.SystemRandom()
_FORWARDING = Forwarding()
_FUNCTIONS = np.array([lambda: 1, None], dtype=object)
with torch.inference_mode():
    _TABLES = {"all": torch.ones(1)}


def test_the_search_of_global_variables_calls_no_function_of_them() -> None:
    _CALLED.clear()  # pytest looks for tests
    module = OfCommon()
    for layer in module.layers:
        vars(layer)["uses"] = lambda: 1.0
    vars(module)["held"] = _FUNCTIONS
    assert len(plan_of(module, NO_TYPES, torch.randn(2, WIDTH))) == 3
    assert not _CALLED


_RESET: ContextVar[float] = ContextVar("factor", default=1.0)
_STACK = SimpleNamespace(held=[1.0])


class Resets(nn.Module):
    """A forward that changes what is global before a unit, and changes it back behind it."""

    def __init__(self, *, pushes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.pushes = pushes

    def forward(self, x: torch.Tensor) -> Any:
        x = self.layers[0](x) * (len(_STACK.held) * _RESET.get())
        if self.pushes:
            _STACK.held.append(2.0)
        else:
            token = _RESET.set(2.0)
        x = self.layers[1](x)
        if self.pushes:
            _STACK.held.pop()
        else:
            _RESET.reset(token)
        return self.layers[2](x)


@pytest.mark.parametrize("pushes", [False, True])
def test_what_a_stage_that_ends_leaves_within_a_global_variable_is_refused(*, pushes: bool) -> None:
    message = r"layer 1 .* what a stage that ends behind layers.1 leaves .* in its next run"
    with pytest.raises(UsageError, match=message):
        plan_of(Resets(pushes=pushes), NO_TYPES, torch.randn(2, WIDTH))


@lru_cache
def drawn(width: int) -> torch.Tensor:
    return torch.rand(width)


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[1](self.layers[0](x) * drawn(WIDTH))


def test_what_a_function_caches_while_a_module_is_cut_is_forgotten() -> None:
    """Other processes do not cut it, and draw their table in the first forward."""
    assert len(plan_of(Draws(), NO_TYPES, torch.randn(2, WIDTH))) == 2
    assert not drawn.cache_info().currsize


def positions(x: torch.Tensor, known: dict[int, torch.Tensor] = {}) -> torch.Tensor:  # noqa: B006
    if x.shape[1] not in known:
        known[x.shape[1]] = torch.arange(float(x.shape[1]))
    return known[x.shape[1]]


class Counted(nn.Linear):
    """A unit that uses a function."""

    def __init__(self, uses: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.uses = uses

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.uses(x)


class Sharing(nn.Module):
    """Units that use one function."""

    def __init__(self, uses: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(Counted(uses), Counted(uses))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers[1](self.layers[0](x))


def test_a_table_that_one_unit_puts_into_a_cache_of_all_is_no_reason_to_refuse() -> None:
    assert len(plan_of(Sharing(positions), NO_TYPES, torch.randn(2, WIDTH))) == 2


def test_an_iterator_that_units_share_is_a_reason_to_refuse() -> None:
    numbers = itertools.count(1)
    with pytest.raises(UsageError, match=r"sets 'uses' of layers\.1"):
        plan_of(Sharing(lambda _: next(numbers)), NO_TYPES, torch.randn(2, WIDTH))
