"""State that units of a cut module leave within classes and global variables."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.stage.cut.common import CommonVariables
from pipeworker.worker.stage.cut.part import plan_of
from pipeworker.worker.transport.structure import NO_TYPES
from support.slow import mostly_slow

WIDTH = 8


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
    mostly_slow(
        [
            lambda: _BASE.add_(1.0),
            lambda: _NOTES.__iadd__(1.0),
            lambda: setattr(_SLOTTED, "own", _SLOTTED.own + 1),
            lambda: next(_IDS),
        ],
        2,
    ),
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


class Unhashable(type):
    """A metaclass whose classes have no hash."""

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("no truth value")

    __hash__ = None  # type: ignore[assignment]


class Term(metaclass=Unhashable):
    """One of these classes."""


_TERM = Term()


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
