"""Tensors that a layer keeps in attributes or changes late are as in the first forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeworker.errors import UsageError
from pipeworker.plan.placement import Placement
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.recompute import Buffers
from support.in_process.pipelines import Pipeline, filled


def run_twice(
    layer: Callable[[float], float], buffers: Buffers, values: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return what the forwards of a mini-batch give, and what they give when they are repeated."""
    mbs, first, second = [MicroBatch(m) for m in range(len(values))], [], []
    buffers.begin()
    for mb, value in zip(mbs, values, strict=True):
        with buffers.first_forward(mb):
            first.append(layer(value))
    for mb, value in zip(mbs, values, strict=True):
        with buffers.second_forward(mb):
            second.append(layer(value))
    buffers.end()
    return first, second


class Remembering(nn.Module):
    """Keeps a tensor for its next forward in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.sum: torch.Tensor | float = 0.0

    def forward(self) -> float:
        self.sum = torch.ones(()) + self.sum
        return float(self.sum)


class Adding(Remembering):
    """Changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = torch.zeros(())

    def forward(self) -> float:
        assert isinstance(self.sum, torch.Tensor)
        return float(self.sum.add_(1))


class Caching(nn.Module):
    """Makes a table in its first forward, and keeps what only a log needs."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def forward(self) -> float:
        if not hasattr(self, "table"):
            self.table = torch.arange(3.0)
        self.last = self.table * 2
        return float(self.last.sum())


class KeyedTable(nn.Module):
    """Makes a table again when another length is asked for, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.length: int | None = None
        self.table: torch.Tensor | None = None

    def forward(self, length: float) -> float:
        if self.length != int(length):
            self.length = int(length)
            self.table = torch.arange(length)
        assert self.table is not None
        return float(self.table.sum())


class GrowingTable(KeyedTable):
    """Has a first table from the start, and makes longer ones alone."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.table = 2, torch.arange(2.0)

    def forward(self, length: float) -> float:
        assert self.length is not None
        assert self.table is not None
        if length > self.length:
            super().forward(length)
        return float(self.table[: int(length)].sum())


@pytest.mark.parametrize("kind", [KeyedTable, GrowingTable])
@pytest.mark.parametrize("lengths", [(3.0, 3.0), (2.0, 2.0, 5.0, 4.0), (4.0, 2.0, 4.0)])
def test_a_table_and_its_length_are_as_in_the_first_forward(
    kind: type[nn.Module], lengths: tuple[float, ...]
) -> None:
    layer = kind()
    buffers = Buffers([nn.Sequential(nn.ReLU(), layer)])
    for at in range(3):
        now = [length + at for length in lengths]
        first, second = run_twice(layer, buffers, now)
        assert first == second == [sum(range(int(length))) for length in now]


class LongTable(KeyedTable):
    """Has a large table; only a long input makes another one."""

    size = 1 << 15

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.length = length
        if length:
            self.table = torch.arange(float(length)).expand(self.size, length).clone()

    def forward(self, length: float) -> float:
        if length < 3:
            return length
        if length > (self.length or 0):
            self.length = int(length)
            self.table = torch.arange(length).expand(self.size, self.length).clone()
        assert self.table is not None
        return float(self.table[0, : int(length)].sum())


@pytest.mark.parametrize("length", [2, 0, None])
def test_the_length_of_a_large_table_is_as_in_the_first_forward(length: int | None) -> None:
    layer, plain = LongTable(length), LongTable(length)
    buffers = Buffers([layer])
    for lengths in ((1.0, 2.0), (2.0, 4.0, 3.0), (5.0, 4.0, 6.0)):
        first, second = run_twice(layer, buffers, lengths)
        assert first == second == [plain(length) for length in lengths]
        assert layer.length == plain.length


class Counter(nn.Module):
    """Counts its forwards in a number; beside it there is no tensor."""

    count = 0
    is_even = True

    def forward(self) -> None:
        self.count += 1
        self.is_even = not self.is_even


class Falling(nn.Module):
    """Has a momentum that falls with the number of its forwards, and a hook since the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.counter, self.norm = Counter(), nn.BatchNorm1d(1)
        self.seen: tuple[torch.Tensor, ...] = (torch.zeros(2, 1),)
        self.hooks = [0]

    def forward(self, x: float) -> float:
        self.counter()
        if self.counter.count == 1:
            self.hooks[0] += 1
        self.norm.momentum = 1 / (self.counter.count + self.counter.is_even)
        self.norm(torch.tensor([[x], [-x]]))
        seen, self.seen = self.seen, (torch.full((2, 1), x),)
        return float(seen[0].sum())


class FallingLate(nn.Module):
    """Has a momentum that falls in every third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.norm = nn.BatchNorm1d(1)

    def forward(self, x: float) -> float:
        count = self.get_buffer("count").add_(1)
        assert self.norm.momentum is not None
        if count % 3 == 0:
            self.norm.momentum *= 0.5
        self.norm(torch.tensor([[x], [-x]]))
        return self.norm.momentum


def test_a_momentum_that_a_later_forward_changes_is_as_in_the_first_forward() -> None:
    layer, plain = FallingLate(), FallingLate()
    buffers = Buffers([layer])
    for values in ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)):
        first, second = run_twice(layer, buffers, values)
        assert first == second == [plain(value) for value in values]
        assert torch.equal(layer.norm.running_var, plain.norm.running_var)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 3])
def test_a_recompute_advances_no_counter_and_does_nothing_once_more(count: int) -> None:
    layer, plain = Falling(), Falling()
    buffers = Buffers([layer])
    for step in range(3):
        values = [1.0 + step + number for number in range(count)]
        first, second = run_twice(layer, buffers, values)
        assert first == second == [plain(value) for value in values]
        assert torch.equal(layer.norm.running_var, plain.norm.running_var)  # type: ignore[arg-type]
        assert vars(layer.counter)["count"] == plain.counter.count
        assert layer.counter.is_even == plain.counter.is_even
        assert layer.norm.momentum == plain.norm.momentum
    assert layer.hooks == [1]


class Waiting(nn.Module):
    """Counts the forwards whose backward is to come."""

    count = 0
    weight = 0.0
    since = 0
    is_idle = True

    def forward(self) -> None:
        self.count += 1
        self.weight += 0.5
        self.since += 1
        self.is_idle = False

    def end_backward(self) -> None:
        self.count -= 1
        self.weight -= 0.5
        self.since = 0
        self.is_idle = True


@pytest.mark.parametrize("microbatches", [1, 3])
def test_what_a_hook_on_the_backward_counts_remains(microbatches: int) -> None:
    layer = Waiting()
    buffers = Buffers([layer])
    for _ in range(2):
        mbs = [MicroBatch(number) for number in range(microbatches)]
        buffers.begin()
        for mb in mbs:
            with buffers.first_forward(mb):
                layer()
        assert layer.count == layer.since == microbatches
        for mb in mbs:
            with buffers.second_forward(mb):
                layer()
            layer.end_backward()
        buffers.end()
        assert (layer.count, layer.weight, layer.since) == (0, 0.0, 0)
        assert layer.is_idle


class KeepsScale(nn.Module):
    """Keeps a number of its input for its backward."""

    scale = 0.0

    def forward(self, x: float) -> float:
        self.scale = x
        return x


def test_a_backward_finds_the_numbers_that_its_recompute_has_set() -> None:
    layer = KeepsScale()
    buffers = Buffers([layer])
    mbs = [(MicroBatch(m), float(m)) for m in range(3)]
    buffers.begin()
    for mb, value in mbs:
        with buffers.first_forward(mb):
            layer(value)
    for mb, value in mbs:
        with buffers.second_forward(mb):
            layer(value)
        assert layer.scale == value
    buffers.end()
    assert layer.scale == 2


@pytest.mark.parametrize("kind", [Remembering, Adding, Caching])
def test_tensors_in_attributes_are_as_in_the_first_forward(kind: type[nn.Module]) -> None:
    layer, plain = kind(), kind()
    buffers = Buffers([nn.Sequential(nn.ReLU(), layer)])
    for _ in range(3):
        first, second = run_twice(lambda _: layer(), buffers, (0.0,) * 3)
        assert first == second == [plain() for _ in range(3)]


class Observer(nn.Module):
    """Keeps the largest number that it has seen, without a trace in any version."""

    def __init__(self, kept: torch.Tensor, *, as_buffer: bool) -> None:
        super().__init__()
        if as_buffer:
            self.register_buffer("largest", kept)
        else:
            self.largest = kept

    def forward(self, x: float) -> float:
        largest = (
            self.largest
            if self.largest.layout is torch.strided
            else self.largest.coalesce().values()
        )
        largest.data.clamp_(min=x)
        return float(largest.max())


@pytest.mark.parametrize("as_buffer", [True, False])
@pytest.mark.parametrize("kept", [torch.zeros(2), torch.eye(2).to_sparse()])
def test_a_small_tensor_may_begin_to_change_without_a_trace(
    kept: torch.Tensor, as_buffer: bool
) -> None:
    """As the observers of quantization: the very first forward leaves the same numbers."""
    layer, plain = (Observer(kept.clone(), as_buffer=as_buffer) for _ in range(2))
    buffers = Buffers([layer])
    for values in ((0.0, 0.0, 0.0), (0.0, 2.0, 3.0), (4.0, 5.0, 5.0)):
        first, second = run_twice(layer, buffers, values)
        assert first == second == [plain(value) for value in values]


class Late(nn.Module):
    """Keeps its last input from its fifth forward on, in an attribute that is None or not there."""

    count: torch.Tensor

    def __init__(self, size: int, *, declared: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.size = size
        if declared:
            self.last: torch.Tensor | None = None

    def forward(self, x: float) -> float:
        self.count += 1
        last = getattr(self, "last", None)
        if self.count >= 5:
            self.last = torch.full((self.size,), x)
        return x + (0.0 if last is None else float(last[0]))


class Table(nn.Module):
    """Makes another table in its fifth forward."""

    count: torch.Tensor

    def __init__(self, size: int, *, requires_grad: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.table = torch.ones(size, requires_grad=requires_grad)

    def forward(self, x: float) -> float:
        self.count += 1
        if self.count == 5:
            self.change()
        table: Any = self.table
        return x * (table if isinstance(table, float) else float(table.detach()[0]))

    def change(self) -> None:
        self.table = self.table * 7  # with a graph behind it, as an output that is kept


class Scaled(Table):
    """Changes its table in place."""

    def change(self) -> None:
        self.table *= 7


class Dropping(Table):
    """Has a number in the place of its table."""

    def change(self) -> None:
        self.table = 3.0  # type: ignore[assignment]


class Deleting(Table):
    """Has no table any more."""

    def forward(self, x: float) -> float:
        self.count += 1
        if self.count == 5:
            del self.table
        return x if hasattr(self, "table") else -x


class Zero(Table):
    """Has a number before it has a table."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size, self.table = size, 0.0  # type: ignore[assignment]

    def change(self) -> None:
        self.table = torch.ones(self.size)


class Lazy(Table):
    """Makes its table in its first forward, and then changes it in place."""

    def __init__(self, size: int, start: int) -> None:
        super().__init__(size)
        self.size, self.start = size, start
        del self.table

    def forward(self, x: float) -> float:
        self.count += 1
        if self.count == 1:
            self.table = torch.ones(self.size)
        elif self.count >= self.start:
            self.table.mul_(1.5)
        return x * float(self.table[0])


@pytest.mark.parametrize("size", [1, 1 << 15])
@pytest.mark.parametrize(
    "make",
    [
        Scaled,
        Dropping,
        Deleting,
        Zero,
        partial(Lazy, start=2),
        partial(Lazy, start=5),
        lambda size: Late(size, declared=True),
        lambda size: Late(size, declared=False),
        Table,
        partial(Table, requires_grad=True),
    ],
)
def test_an_attribute_that_is_assigned_late_is_as_in_the_first_forward(
    make: Callable[[int], nn.Module], size: int
) -> None:
    layer, plain = make(size), make(size)
    buffers = Buffers([layer])
    for values in ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0)):
        first, second = run_twice(layer, buffers, values)
        assert first == second == [plain(value) for value in values]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Freezing(nn.Linear):
    """Freezes itself in one of its forwards."""

    def __init__(self, at: int) -> None:
        super().__init__(2, 2)
        self.left = at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        self.requires_grad_(self.left >= 0)
        return super().forward(x)


@pytest.mark.parametrize("at", [2, 3])
def test_a_layer_freezes_itself_between_mini_batches_only(at: int) -> None:
    batches = [(torch.randn(4, 2), torch.randn(4, 2)) for _ in range(2)]
    plan = filled(Placement.identity(1), "never")
    made = [Freezing(at), nn.Linear(2, 2)]
    pipeline = Pipeline(made, functional.mse_loss, batches, plan, microbatches=2, optimizer=sgd)
    if at == 2:  # the first forward of the second mini-batch
        pipeline.train(2)
        return
    with pytest.raises(UsageError, match=r"^stage 0: a layer has called requires_grad_\(\) behind"):
        pipeline.train(2)


def popping(output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    """A loss that takes its target apart, in place."""
    return functional.mse_loss(output, target.pop("y").sub_(1))


def test_a_loss_may_change_its_target_although_it_runs_twice() -> None:
    batches = [(torch.randn(4, 2), {"y": torch.randn(4, 2)}) for _ in range(2)]
    losses = []
    for mode in ("never", "always"):
        torch.manual_seed(0)
        made, plan = [nn.Linear(2, 2), nn.Linear(2, 2)], filled(Placement.identity(2), mode)
        pipeline = Pipeline(made, popping, batches, plan, microbatches=2, optimizer=sgd)
        losses.append(pipeline.train(2).losses)
    assert losses[0] == losses[1]
