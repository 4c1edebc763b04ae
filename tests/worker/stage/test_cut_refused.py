"""A module that stages would not compute as one process does is refused when it is cut."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.stage.cut.part import plan_of
from pipeworker.worker.transport.structure import NO_TYPES

WIDTH = 8


class Counts(nn.Module):
    """Changes a buffer outside of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls.add_(1)
        return self.layers[1](self.layers[0](x))


class Assigns(Counts):
    """Assigns a buffer outside of its units."""

    def forward(self, x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        return self.layers[1](self.layers[0](x))


class Fills(Counts):
    """Fills a buffer outside of its units with what a unit returns."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.layers[0](x)
        self.calls.copy_(hidden.detach().mean())
        return self.layers[1](hidden)


class Views(nn.Module):
    """Changes a tensor of which another layer has a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        out = self.layers[0](x).clone()
        part = out[:, :2]
        other = self.layers[1](x)
        out.add_(1)
        return self.layers[2](other + part.sum() + out)


class Halved(nn.Linear):
    """Needs numbers, and returns views of the same memory."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        assert out.isfinite().all().item()
        return out, out[:, :2]


class ViewsOfUnit(Views):
    """Changes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = Halved(), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        out, part = self.first(x)
        other = self.layers[1](out * self.gain)
        part.add_(1)
        return self.layers[2](other + out)


class Packs(nn.Module):
    """Packs a sequence, whose kernel reads the lengths, outside of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        sequences = self.first(x).unsqueeze(1)
        lengths = torch.ones(len(x), dtype=torch.int64)
        packed = nn.utils.rnn.pack_padded_sequence(sequences, lengths, batch_first=True)
        return self.last(packed.data)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Counts(), "its forward changes the buffer 'calls' outside of the modules"),
        (Assigns(), "its forward changes the buffer 'calls' outside of the modules"),
        (Fills(), "its forward changes the buffer 'calls' outside of the modules"),
        (
            Views(),
            "changes a tensor in place at .*, of which another layer has",
        ),
        (ViewsOfUnit(), "changes a tensor in place at .*, of which another layer has"),
        (nn.ReLU(), "its forward calls no module with parameters"),
        (Packs(), r"layer 1 \(behind first\): .* depends on the numbers of an activation"),
    ],
)
def test_what_cannot_be_cut_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(module, NO_TYPES, torch.randn(2, WIDTH))


class Keeping(nn.Module):
    """A unit that keeps a value in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        out = torch.tanh(self.linear(x))
        self.kept = out.mean()
        return out


class KeepingByNumbers(Keeping):
    """One that runs on numbers, because it needs them, and that makes the attribute."""

    def __init__(self) -> None:
        super().__init__()
        del self.kept

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out if out.sum() > 0 else out * 2


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class Popping(nn.Module):
    """A unit that takes values out of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, values: list[torch.Tensor]) -> Any:
        return self.scale * self.linear(x + values.pop())


class Applying(nn.Module):
    """A unit that calls a module that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, module: nn.Module) -> Any:
        return self.scale * module(self.linear(x))


class Any3(nn.Module):
    """Three layers, a batch norm, and a forward that is given."""

    def __init__(self, way: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.l = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kept = nn.ModuleList(Keeping() for _ in range(2))
        self.pop, self.apply_it = Popping(), Applying()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.way = way

    def forward(self, x: torch.Tensor) -> Any:
        return self.way(self, x)


def kept(m: Any, x: torch.Tensor) -> Any:
    return m.l[0](m.kept[1](m.kept[0](x))) + m.kept[0].kept


def function(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](Square.apply(m.l[0](x)))  # type: ignore[no-untyped-call]


def checkpointed(m: Any, x: torch.Tensor) -> Any:
    return torch.utils.checkpoint.checkpoint(m.l[1], m.l[0](x), use_reentrant=False)


def decided_by_a_buffer(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](m.l[0](x)) if m.mean.sum() > 1 else m.l[0](x)


def statistics(m: Any, x: torch.Tensor) -> Any:
    return m.l[1](m.norm(m.l[0](x)) - m.norm.running_mean)


def filled_by_a_view(m: Any, x: torch.Tensor) -> Any:
    out = torch.zeros(len(x), WIDTH)
    hidden = m.l[0](x)
    out[:, 0].copy_(hidden[:, 0])
    return m.l[1](hidden) + out


def in_place(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    view = hidden[:, :4]
    other = m.l[1](hidden.clone())
    F.relu(hidden, inplace=True)
    return m.l[2](hidden + other) + view.sum()


def averaged(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    with torch.no_grad():
        m.l[2].weight.mul_(0.9).add_(m.l[0].weight, alpha=0.1)
    return m.l[2](hidden)


def clamped(m: Any, x: torch.Tensor) -> Any:
    m.l[0].weight.data.clamp_(-1, 1)
    return m.l[0](x)


def averaged_together(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    with torch.no_grad():
        torch._foreach_lerp_(list(m.l[2].parameters()), list(m.l[0].parameters()), 0.1)
    return m.l[2](hidden)


def reshaped(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x).clone()
    hidden.unsqueeze_(1)
    return m.l[1](hidden)


def freezing(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[1](m.l[0](x))
    m.l[1].requires_grad_(requires_grad=False)
    return m.l[1](hidden)


def frozen_by_an_attribute(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    m.l[2].bias.requires_grad = False
    return m.l[2](hidden)


def given(m: Any, x: torch.Tensor) -> Any:
    return m.apply_it(m.l[0](x), m.l[1])


def iterated(m: Any, x: torch.Tensor) -> Any:
    return m.apply_it(m.l[0](x), iter([torch.tanh]))


def drawn(m: Any, x: torch.Tensor) -> Any:
    chances = torch.sigmoid(m.l[0](x))
    return m.l[1](torch.bernoulli(chances, generator=torch.Generator()))


def popped(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    return m.pop(m.l[1](hidden), [hidden])


def hooked_late(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    other = m.l[1](hidden)
    hidden.register_hook(lambda grad: grad * 2)
    return m.l[2](other + hidden)


def differentiated(m: Any, x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    energy = m.l[1](torch.tanh(m.l[0](x))).sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def trained(m: Any, x: torch.Tensor) -> Any:
    m.l[0](x).sum().backward()
    return m.l[1](x)


def branching(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    return m.l[1](hidden) if bool((hidden > 0).any()) else m.l[2](hidden)


def selecting(m: Any, x: torch.Tensor) -> Any:
    hidden = m.l[0](x)
    return m.l[1](hidden[x[:, 0] > 0])


def replaced(m: Any, x: torch.Tensor) -> Any:
    halves = {name: p * 0.5 for name, p in m.l[1].named_parameters()}
    return torch.func.functional_call(m.l[1], halves, (m.l[0](x),))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        (kept, "uses a tensor that a unit keeps in an attribute"),
        (function, "calls the autograd.Function Square between its layers"),
        (checkpointed, "makes a checkpoint"),
        (decided_by_a_buffer, "depends on the numbers of a buffer"),
        (statistics, "uses the buffer 'norm.running_mean' outside"),
        (filled_by_a_view, "fills a tensor that is a view or has one"),
        (in_place, "changes a tensor in place"),
        (averaged, "changes the parameter 'l.2.weight'"),
        (averaged_together, "changes the parameter 'l.2.weight'"),
        (clamped, "changes the parameter 'l.0.weight'"),
        (reshaped, "calls unsqueeze_ on an activation"),
        (
            freezing,
            r"calls requires_grad_ on the parameter 'l.1.weight', at .*; do it in model\(\)",
        ),
        (frozen_by_an_attribute, "sets an attribute of the parameter 'l.2.bias'"),
        (given, "calls a unit with a module"),
        (iterated, "calls a function or a module with a list_iterator"),
        (drawn, "calls a function or a module with a Generator"),
        (popped, "removes what is in a list"),
        (hooked_late, "registers a hook on a tensor that an earlier layer has used"),
        (differentiated, "takes a gradient through its layers, at test_cut_refused.py"),
        (trained, "takes a gradient through its layers, at test_cut_refused.py"),
        (branching, "depends on the numbers of an activation, at test_cut_refused.py"),
        (selecting, "depends on the numbers of an activation, at test_cut_refused.py"),
        (replaced, "replaces the parameters of a unit"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_stages_would_compute_otherwise_is_refused(way: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(Any3(way), NO_TYPES, torch.randn(4, WIDTH))


def test_a_line_of_code_without_a_file_is_named_as_such() -> None:
    made: dict[str, Any] = {}
    exec("def way(m, x):\n    hidden = m.l[0](x)\n    assert hidden.sum().item() > 0\n", made)
    line = r"at line 3 of code that has no file \(<string>, in way\): an if"
    with pytest.raises(UsageError, match=r"^layer 1 \(.*\): .* " + line):
        plan_of(Any3(made["way"]), NO_TYPES, torch.randn(4, WIDTH))


def test_a_line_of_no_user_is_not_that_of_the_process() -> None:
    code = "from pipeworker.worker.stage.cut.calls import line_of_the_user as f; print(f())"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "an unknown line\n"


def test_a_unit_that_needs_numbers_keeps_a_value_too() -> None:
    module = Any3(kept)
    module.kept[0] = KeepingByNumbers()
    with pytest.raises(UsageError, match="uses a tensor that a unit keeps in an attribute"):
        plan_of(module, NO_TYPES, torch.randn(4, WIDTH))


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
        (set_by_another_for_the_next, "sets 'shared' of l.0 for the next forward"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_state_that_another_stage_would_not_see_is_refused(way: Any, message: str) -> None:
    module = Stateful(way)
    module.apart[0].register_forward_hook(module.hear)
    with pytest.raises(UsageError, match=message):
        plan_of(module, NO_TYPES, torch.randn(4, WIDTH))


def test_a_hook_that_holds_the_module_is_refused() -> None:
    module = Stateful(set_by_a_hook)
    module.apart[0].register_forward_hook(lambda *_: setattr(module, "heard", 2.0))
    with pytest.raises(UsageError, match="a hook or another function holds the module, and sets"):
        plan_of(module, NO_TYPES, torch.randn(4, WIDTH))


class Squared(nn.Module):
    """A unit that calls an autograd.Function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return Square.apply(self.linear(x)) + self.bias  # type: ignore[no-untyped-call]


def test_a_function_within_a_unit_is_no_reason_to_refuse() -> None:
    module = Any3(lambda m, x: m.l[1](m.squared(m.l[0](x))))
    module.squared = Squared()
    plan = plan_of(module, NO_TYPES, torch.randn(4, WIDTH))
    assert plan.units == ["l.0", "squared", "l.1"]


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


class OfFixedSize(nn.Module):
    """A network whose forward has the size of the mini-batch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).view(8, -1))
        return out


def test_an_error_of_forward_shows_the_samples_of_the_micro_batch() -> None:
    message = (
        r"in layer 1 \(behind first\), on a micro-batch of 2 samples without numbers, raised Run"
    )
    with pytest.raises(UserCodeError, match=message):
        plan_of(OfFixedSize(), NO_TYPES, torch.zeros(2, 3))
