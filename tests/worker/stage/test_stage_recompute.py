"""Buffers change once, though the forward runs twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from torch import nn

import pipeworker
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.stage.recompute import Buffers


class Counter(nn.Module):
    """Counts its forwards, and gives the count."""

    count: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.arange(3.0))
        self.register_buffer("nothing", None)

    def forward(self) -> float:
        self.count += 1
        return self.count.item()


class Replacing(Counter):
    """The same by assignment."""

    def forward(self) -> float:
        self.count = self.count + 1
        return self.count.item()


def microbatches(count: int) -> list[MicroBatch]:
    return [MicroBatch(m) for m in range(count)]


def run_twice(
    layer: Callable[[], float], buffers: Buffers, count: int
) -> tuple[list[float], list[float]]:
    """Return what the forwards of a mini-batch give, and what they give when they are repeated."""
    mbs, first, second = microbatches(count), [], []
    for mb in mbs:
        with buffers.first_forward(mb):
            first.append(layer())
    for mb in mbs:
        with buffers.second_forward(mb):
            second.append(layer())
    return first, second


@pytest.mark.parametrize("kind", [Counter, Replacing])
def test_the_second_forward_sees_what_the_first_saw(kind: type[Counter]) -> None:
    layer = kind()
    buffers = Buffers([layer])
    for step in range(3):
        first, second = run_twice(layer, buffers, 4)
        assert first == second == [4.0 * step + m + 1 for m in range(4)]
        assert layer.count.item() == 4 * (step + 1)


class Registering(nn.Module):
    """Registers its buffer in its first forward."""

    count: torch.Tensor

    def forward(self) -> float:
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(()))
        self.count += 1
        return self.count.item()


@pytest.mark.parametrize("kept", [0, 1])
def test_a_buffer_may_be_registered_in_the_very_first_forward(kept: int) -> None:
    layer = Registering()
    buffers = Buffers([layer])
    for _ in range(kept):
        layer()  # the graphs of these are not recomputed
    for step in range(2):
        first, second = run_twice(layer, buffers, 3)
        assert first == second == [kept + 3.0 * step + m + 1 for m in range(3)]
        assert layer.count.item() == kept + 3 * (step + 1)


def test_only_what_changes_or_is_small_is_copied() -> None:
    layer = Counter()
    layer.table = torch.arange(2.0**15)
    buffers = Buffers([layer])
    table = layer.table
    mbs = microbatches(2)
    for mb in mbs:
        with buffers.first_forward(mb):
            layer()
        assert mb.buffers_before is not None
        assert [slot[1] for slot, _ in mb.buffers_before] == ["count"]
    for mb in mbs:
        with buffers.second_forward(mb):
            assert layer.table is table
            layer()
    assert [mb.buffers_before for mb in mbs] == [None, None]


def test_batch_norm_is_found_though_it_leaves_no_trace() -> None:
    norm = nn.BatchNorm1d(2)
    buffers = Buffers([nn.Sequential(nn.Linear(2, 2), norm)])
    x = torch.randn(5, 2)
    mb = MicroBatch(0)
    with buffers.first_forward(mb):
        norm(x)
    after = {name: value.clone() for name, value in norm.named_buffers()}
    with buffers.second_forward(mb):
        assert norm.running_mean is not None
        assert norm.running_mean.tolist() == [0, 0]
        norm(x)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 1
    for name, value in norm.named_buffers():
        assert torch.equal(value, after[name])


def assert_counted_once(
    norm: nn.Module, plain: nn.Module, buffers: Buffers, x: torch.Tensor
) -> None:
    """Run a norm forward and again: its statistics are those of a plain one after one forward."""
    mb = MicroBatch(0)
    with buffers.first_forward(mb):
        norm(x)
    with buffers.second_forward(mb):
        norm(x)
    plain(x)
    for name, value in plain.named_buffers():
        assert torch.equal(norm.get_buffer(name), value)


def test_a_mean_that_the_very_first_forward_leaves_at_zero_is_restored_later() -> None:
    norm, plain = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    buffers = Buffers([norm])
    for x in (torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.randn(5, 2)):
        assert_counted_once(norm, plain, buffers, x)


class Every(Counter):
    """Its table changes in each third forward; it gives that, too."""

    rows: torch.Tensor | None

    def __init__(self, start: int) -> None:
        super().__init__()
        self.count += start
        self.register_buffer("rows", None)

    def forward(self) -> float:
        if self.count % 3 == 2:
            self.change()
        return super().forward() + float(self.table.sum())

    def change(self) -> None:
        self.table *= 2


class Making(Every):
    """The same by assignment, of what was not there."""

    def change(self) -> None:
        self.rows = torch.ones(2) if self.rows is None else self.rows * 2
        self.table = self.rows


@pytest.mark.parametrize("kind", [Every, Making])
@pytest.mark.parametrize("start", [0, 1, 2])
def test_a_buffer_may_begin_to_change_at_any_time(kind: type[Every], start: int) -> None:
    """As after a resume, whose first forward is another one."""
    layer = kind(start)
    buffers = Buffers([layer])
    for _ in range(3):
        first, second = [], []
        mbs = microbatches(4)
        for mb in mbs:
            with buffers.first_forward(mb):
                first.append(layer())
        after = layer.table.clone()
        for mb in mbs:
            with buffers.second_forward(mb):
                second.append(layer())
        assert first == second
        assert torch.equal(layer.table, after)


def test_a_buffer_that_others_change_between_two_forwards_is_seen_so() -> None:
    layer = Every(0)
    buffers = Buffers([layer])
    with buffers.first_forward(MicroBatch(0)):
        layer()
    layer.table += 1
    mbs = microbatches(2)
    first = []
    for mb in mbs:
        with buffers.first_forward(mb):
            first.append(layer())
    for mb in mbs:
        with buffers.second_forward(mb):
            assert layer() == first[mb.number]


class Large(Counter):
    """Changes a large table, which is not copied before, in its third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.ones(1 << 15)

    def forward(self) -> float:
        if self.count == 2:
            self.change()
        return super().forward() + (0.0 if self.table is None else float(self.table[0]))

    def change(self) -> None:
        self.table *= 2


class Dropping(Large):
    """Has none any more."""

    def change(self) -> None:
        self.table = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Large, Dropping])
@pytest.mark.parametrize("kept", [0, 1])
def test_a_large_buffer_may_begin_to_change_while_forwards_wait(
    kind: type[Large], kept: int
) -> None:
    """The forward that changes it keeps its graph, or is recomputed as the ones before."""
    layer, plain = kind(), kind()
    buffers, first, second = Buffers([layer]), [], []
    mbs = microbatches(3 - kept)
    for mb in mbs:
        with buffers.first_forward(mb):
            first.append(layer())
    for _ in range(kept):
        layer()
    for mb in mbs:
        with buffers.second_forward(mb):
            second.append(layer())
    assert first == second == [plain() for _ in mbs]
    assert (layer.table is None) is (kind is Dropping)
    assert layer.table is None or layer.table[0] == 2


class Scaling(nn.Module):
    """Multiplies by what others have set, if they have."""

    def __init__(self, *, declared: bool) -> None:
        super().__init__()
        if declared:
            vars(self)["scale"] = None

    def forward(self) -> float:
        scale = vars(self).get("scale")
        return 1.0 if scale is None else float(scale[0])


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("size", [1, 1 << 15])
def test_an_attribute_that_others_set_between_two_steps_is_seen(
    size: int, *, declared: bool
) -> None:
    layer = Scaling(declared=declared)
    buffers = Buffers([layer])
    assert run_twice(layer, buffers, 2) == ([1.0] * 2, [1.0] * 2)
    layer.scale = torch.full((size,), 7.0)
    buffers.begin()
    assert run_twice(layer, buffers, 2) == ([7.0] * 2, [7.0] * 2)


def test_a_batch_norm_may_begin_to_train_at_any_time() -> None:
    """Its count alone leaves a trace."""
    norm, plain = nn.BatchNorm1d(2).eval(), nn.BatchNorm1d(2)
    buffers = Buffers([norm])
    x = torch.randn(5, 2)
    with buffers.first_forward(MicroBatch(0)):
        norm(x)
    norm.train()
    for _ in range(2):
        assert_counted_once(norm, plain, buffers, x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_batch_norm_is_restored() -> None:
    norm = torch.jit.script(nn.BatchNorm1d(2))
    buffers, (mb,) = Buffers([norm]), microbatches(1)
    x = torch.randn(4, 2)
    with buffers.first_forward(mb):
        norm(x)
    after = norm.running_mean.clone()
    with buffers.second_forward(mb):
        norm(x)
    assert torch.equal(norm.running_mean, after)
    assert int(norm.num_batches_tracked) == 1


def test_a_module_shared_by_two_layers_is_kept_once() -> None:
    layer = Counter()
    buffers = Buffers([layer, nn.Sequential(layer)])
    mb = MicroBatch(0)
    with buffers.first_forward(mb):
        first = [layer(), layer()]
    with buffers.second_forward(mb):
        assert [layer(), layer()] == first
    assert layer.count.item() == 2


def test_buffers_come_back_after_an_error() -> None:
    layer = Counter()
    buffers = Buffers([layer])
    mbs = microbatches(2)
    for mb in mbs:
        with buffers.first_forward(mb):
            layer()

    def fail() -> None:
        with buffers.second_forward(mbs[0]):
            layer()
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert layer.count.item() == 2


def test_without_buffers_nothing_is_kept() -> None:
    buffers = Buffers([nn.Linear(2, 2)])
    mb = MicroBatch(0)
    with buffers.first_forward(mb):
        pass
    assert mb.buffers_before is None
    with buffers.second_forward(mb):
        pass
    assert mb.buffers_before is None


def test_a_layer_can_ask_whether_it_is_recomputed() -> None:
    values: list[bool] = []

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            values.append(pipeworker.is_recomputing())
            return x

    layers = [Asks(), nn.Linear(2, 2)]
    buffers = Buffers(layers)
    layers[0](torch.ones(1))
    mb = MicroBatch(0)
    with buffers.first_forward(mb):
        layers[0](torch.ones(1))
    with suppress(KeyError), buffers.second_forward(mb):
        layers[0](torch.ones(1))
        raise KeyError
    layers[0](torch.ones(1))
    assert values == [False, False, True, False]


def test_a_buffer_of_two_modules_stays_one() -> None:
    first, second = Counter(), Counter()
    second.count = first.count
    buffers = Buffers([first, second])
    drawn = []
    mbs = microbatches(2)
    for mb in mbs:
        with buffers.first_forward(mb):
            drawn.append((first(), second()))
    for mb in mbs:
        with buffers.second_forward(mb):
            assert (first(), second()) == drawn[mb.number]
    assert drawn == [(1.0, 2.0), (3.0, 4.0)]
    assert first.count is second.count


def test_a_large_nested_tensor_may_be_in_an_attribute() -> None:
    """It has no shape."""
    layer = Counter()
    layer.parts = torch.nested.nested_tensor([torch.ones(2**15), torch.ones(1)])
    first, second = run_twice(layer, Buffers([layer]), 2)
    assert first == second == [1, 2]
