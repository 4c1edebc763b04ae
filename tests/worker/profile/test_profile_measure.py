"""The facts of one layer: sizes exactly, seconds by the stopwatch, and nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import pipeworker
from pipeworker.facts.layer_facts import LayerFacts
from pipeworker.job.file import JobFile
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.device.device import Stopwatch
from pipeworker.worker.profile import measure
from pipeworker.worker.profile.measure import LayerCall, Settings, measure_layer, measure_loss
from pipeworker.worker.profile.meters import (
    OperationCounter,
    Operations,
    UndisturbedStopwatch,
    stopwatch_of_layers,
)
from pipeworker.worker.stage.layers import StageConfig

CPU = torch.device("cpu")


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


JOB = JobFile(
    model=None, loss=mean_square, optimizer=lambda params: torch.optim.Adam(params, lr=0.1)
)
STAGE = StageConfig(0, 0, 0, CPU)
SETTINGS = Settings(JOB, STAGE, repeats=1)


def measured(
    layer: nn.Module,
    value: Any,
    wants: Sequence[bool] = (True,),
    settings: Settings = SETTINGS,
    **call: Any,
) -> LayerFacts:
    found = LayerCall(0, value, wants, **call)
    return measure_layer(lambda: layer, found, settings, Stopwatch())


def test_the_sizes_of_a_linear_layer() -> None:
    facts = measured(nn.Linear(100, 50), torch.randn(20, 100))
    assert facts.kind == "Linear"
    assert facts.parameters == 100 * 50 + 50
    assert facts.parameter_bytes == facts.gradient_bytes == 4 * facts.parameters
    assert facts.optimizer_bytes == 2 * facts.parameter_bytes + 2 * 4  # two counts of steps
    assert 4 * 100 * 50 <= facts.update_bytes <= 2 * 4 * 100 * 50  # one parameter after the other
    assert facts.deferred_bytes == 0  # the gradient of the output was received
    assert facts.output_bytes == 4 * 20 * 50
    assert (facts.saved_bytes, facts.saved_output_bytes) == (0, 0)
    assert facts.saved_input_bytes == 4 * 20 * 100
    # The gradients of input and parameters, before these are added to what earlier ones left.
    assert facts.working_bytes == 4 * 20 * 100 + facts.gradient_bytes
    assert facts.passes_gradient


@pytest.mark.parametrize("inplace", [False, True])
def test_a_layer_that_keeps_its_output(inplace: bool) -> None:
    facts = measured(nn.ReLU(inplace), torch.randn(20, 100))
    assert (facts.saved_bytes, facts.saved_input_bytes) == (0, 0)
    assert facts.saved_output_bytes == facts.output_bytes == 4 * 20 * 100


def test_what_layers_keep_adds_up_to_what_they_keep_together() -> None:
    layers = [nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 50), nn.GELU(), nn.Tanh()]
    whole = measured(nn.Sequential(*layers), torch.randn(8, 30))
    value, found = torch.randn(8, 30), []
    for layer in layers:
        found.append(measured(layer, value))
        value = layer(value).detach()
    between = [
        max(one.saved_output_bytes, other.saved_input_bytes) for one, other in pairwise(found)
    ]
    assert whole.saved_bytes == sum(one.saved_bytes for one in found) + sum(between)
    assert whole.saved_output_bytes == found[-1].saved_output_bytes > 0
    assert whole.saved_input_bytes == found[0].saved_input_bytes > 0


def test_a_large_buffer_takes_no_memory_beside_the_layer() -> None:
    """Buffers are compared before and after the first forward, without a copy."""
    layer = nn.BatchNorm1d(4)
    layer.register_buffer("large", torch.zeros(1_000_000))
    assert measured(layer, torch.randn(8, 4)).working_bytes < 100_000


def test_operations_are_those_of_torchs_own_counter() -> None:
    layer = nn.Sequential(nn.Conv1d(3, 8, 5), nn.GELU(), nn.Flatten(), nn.Linear(8 * 12, 7))
    value = torch.randn(4, 3, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        layer(value).sum().backward()
    assert measured(layer, value.detach()).flops == counter.get_total_flops() > 0
    alone = nn.Linear(100, 50)
    assert measured(alone, torch.randn(20, 100), (False,)).flops == 2 * 2 * 20 * 100 * 50
    assert measured(alone, torch.randn(20, 100)).flops == 3 * 2 * 20 * 100 * 50
    assert measured(nn.GELU(), torch.randn(5, 5)).flops == 0


def test_frozen_layers_have_no_gradient() -> None:
    layer = nn.Linear(100, 50).requires_grad_(False)
    first = measured(layer, torch.randn(20, 100), (False,))
    assert (first.gradient_bytes, first.optimizer_bytes, first.update) == (0, 0, 0.0)
    assert (first.backward, first.backward_input) == (0.0, 0.0)
    assert not first.passes_gradient
    later = measured(layer, torch.randn(20, 100))
    assert later.passes_gradient
    assert later.backward == later.backward_input > 0.0
    assert later.saved_input_bytes == 0


def test_a_first_layer_has_no_gradient_of_its_input() -> None:
    facts = measured(nn.Embedding(30, 8), torch.zeros(4, 5, dtype=torch.long), (False,))
    assert facts.backward > 0.0 == facts.backward_input
    assert facts.passes_gradient


def test_a_sparse_gradient_stays_sparse_for_its_optimizer() -> None:
    job = replace(JOB, optimizer=lambda params: torch.optim.SparseAdam(list(params), lr=0.1))
    layer, value = nn.Embedding(30, 8, sparse=True), torch.zeros(4, 5, dtype=torch.long)
    facts = measured(layer, value, (False,), replace(SETTINGS, job=job))
    assert facts.optimizer_bytes == 2 * facts.parameter_bytes == 2 * 4 * 30 * 8
    assert facts.backward > 0.0


class _Scale(torch.autograd.Function):
    """Multiplies by a factor that it gives no gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return value * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def test_a_function_may_give_a_parameter_no_gradient() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.ones(6))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = _Scale.apply(value, self.factor)  # type: ignore
            return scaled

    assert measured(Scaled(), torch.randn(5, 6)).backward > 0.0


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_buffer_counts_with_its_indices(layout: torch.layout) -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("edges", torch.eye(6).to_sparse(layout=layout))

        def forward(self, nodes: torch.Tensor) -> Any:
            return torch.sparse.mm(self.edges, nodes)

    facts = measured(Graph(), torch.randn(6, 5))
    indices = 2 * 6 if layout is torch.sparse_coo else 7 + 6
    assert facts.parameter_bytes == 8 * indices + 4 * 6
    assert facts.output_bytes == 4 * 6 * 5
    assert facts.backward > 0.0


class Pair(nn.Module):
    """Takes and returns a dict; one tensor of it passes through."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        return {**value, "x": self.linear(value["x"]) * value["mask"][:, None]}


def test_nested_inputs_are_measured() -> None:
    value = {"x": torch.randn(4, 6), "mask": torch.ones(4, dtype=torch.bool), "scale": 2.0}
    facts = measured(Pair(), value, (True, False))
    assert facts.output_bytes == 4 * 4 * 6 + 4
    assert facts.backward > 0.0


class Down(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipeworker.stash("x", x.exp())
        return x[:, ::2]


class Up(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 2) * pipeworker.pop("x")


def test_layers_with_skip_connections_are_measured() -> None:
    stashes = measured(Down(), torch.randn(4, 6), stashed=["x"], uses_skips=True)
    assert stashes.output_bytes == 4 * 4 * 3
    assert stashes.saved_bytes == 4 * 4 * 6  # what exp() made
    popped = {"x": (torch.randn(4, 6), True)}
    pops = measured(Up(), torch.randn(4, 3), (False,), popped=popped, uses_skips=True)
    assert pops.backward == pops.backward_input > 0.0
    assert pops.output_bytes == 4 * 4 * 6


class Counting(nn.Module):
    """Changes the indices that it is called with, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.add_(1))  # type: ignore[no-any-return]


def test_a_layer_that_changes_its_input_gets_the_same_each_time() -> None:
    settings = replace(SETTINGS, repeats=5, budget=60.0)
    facts = measured(Counting(), torch.zeros(3, dtype=torch.long), (False,), settings)
    assert facts.output_bytes == 4 * 3 * 2


def test_a_layer_is_dropped_when_it_is_measured() -> None:
    class Cyclic(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.own = [self]

    for kind in (lambda: nn.Linear(4, 4), Cyclic):
        alive: list[weakref.ref[nn.Module]] = []

        def build(kind: Callable[[], nn.Module] = kind) -> nn.Module:
            layer = kind()
            alive.append(weakref.ref(layer))  # noqa: B023 (called before the next turn)
            return layer

        measure_layer(build, LayerCall(0, torch.randn(2, 4), (True,)), SETTINGS, Stopwatch())
        assert [one() for one in alive] == [None]


def test_a_layer_that_raises_is_dropped_too() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        alive.append(weakref.ref(layer))
        return layer

    with pytest.raises(UserCodeError, match="shapes cannot be multiplied"):
        measure_layer(build, LayerCall(0, torch.randn(2, 5), (True,)), SETTINGS, Stopwatch())
    gc.collect()  # the error refers to frames, and these to the error
    assert alive[0]() is None


def test_an_optimizer_that_cannot_train_the_layer_has_no_state() -> None:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise ValueError("only matrices")

    settings = replace(SETTINGS, job=replace(JOB, optimizer=optimizer))
    facts = measured(nn.LayerNorm(6), torch.randn(4, 6), settings=settings)
    assert (facts.optimizer_bytes, facts.update) == (0, 0.0)
    assert facts.backward > 0.0


def test_autocast_is_that_of_training() -> None:
    settings = replace(SETTINGS, stage=replace(STAGE, precision="bf16"))
    facts = measured(nn.Linear(100, 50), torch.randn(20, 100), settings=settings)
    assert facts.output_bytes == 2 * 20 * 50
    assert facts.saved_input_bytes == 0
    assert facts.saved_bytes == 2 * (20 * 100 + 100 * 50)  # input and weight, cast


def test_deferred_batch_norms_are_as_before() -> None:
    layer = nn.BatchNorm1d(6)
    settings = replace(SETTINGS, stage=replace(STAGE, deferred_batch_norm=True))
    facts = measured(layer, torch.randn(4, 6), settings=settings)
    assert facts.backward > 0.0
    assert layer.track_running_stats


def test_repeats_end_with_the_budget_or_their_number() -> None:
    calls = 0

    class Counted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * 2

    for repeats, budget, expected in ((5, 0.0, 2), (3, 60.0, 4)):
        calls = 0
        settings = replace(SETTINGS, repeats=repeats, budget=budget)
        measured(Counted(), torch.randn(2), settings=settings)
        assert calls == expected  # the first one is not timed


def test_a_slow_layer_is_run_once_more_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SLOW_SECONDS", 0.0)
    calls = 0

    class Counted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    facts = measured(Counted(8, 8), torch.randn(4, 8))
    assert calls == 2
    assert facts.backward > facts.backward_input > 0.0


def test_operations_take_the_place_of_seconds() -> None:
    operations = Operations()
    watch = OperationCounter(operations)
    call = LayerCall(0, torch.randn(20, 100), (True,))
    settings = replace(SETTINGS, real=False, budget=0.0)
    with operations:
        facts = measure_layer(lambda: nn.Linear(100, 50), call, settings, watch)
    product = 2 * 20 * 100 * 50
    assert facts.forward == product
    assert 2 * product <= facts.backward <= 2.1 * product  # sums of the bias and of gradients
    assert product <= facts.backward_input <= 1.1 * product
    assert facts.optimizer_bytes == 0


def test_the_loss_is_timed_with_its_backward() -> None:
    output, target = torch.randn(20, 5), torch.randn(20, 5)
    operations = Operations()
    with operations:
        whole = measure_loss(output, (True,), target, SETTINGS, OperationCounter(operations))
        forward_only = measure_loss(
            output, (False,), target, SETTINGS, OperationCounter(operations)
        )
    assert whole.forward > forward_only.forward > 0
    assert output.grad is None
    assert not output.requires_grad


def test_the_stopwatch_stands_still_while_the_thread_waits_for_a_core(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    file.write_text("100 2000000000 3\n")
    watch = UndisturbedStopwatch(str(file))
    start = perf_counter()
    begin = watch.mark()
    while perf_counter() - start < 0.05:
        pass
    file.write_text("100 2030000000 3\n")
    found = watch.seconds([begin, watch.mark()])
    assert 0.0 < found <= perf_counter() - start - 0.03
    file.write_text("100 9000000000 3\n")  # more than has passed
    assert watch.seconds([begin, watch.mark()]) == 0.0
    watch.close()
    missing = UndisturbedStopwatch(str(tmp_path / "none"))
    assert missing.seconds([missing.mark(), missing.mark()]) >= 0.0
    with stopwatch_of_layers(CPU) as real:
        assert real.seconds([real.mark(), real.mark()]) < 5.0


def test_a_loss_may_change_the_output_in_place() -> None:
    def difference(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sub_(target).square().mean()

    settings = replace(SETTINGS, job=replace(JOB, loss=difference))
    output = torch.randn(20, 5)
    assert measure_loss(output, (True,), torch.randn(20, 5), settings, Stopwatch()).forward > 0


def test_a_loss_keeps_what_its_backward_needs() -> None:
    logits, classes = torch.randn(50, 1000), torch.zeros(50, dtype=torch.long)
    size = 4 * 50 * 1000
    for loss, saved, of_output in ((mean_square, size, 0), (nn.functional.cross_entropy, size, 0)):
        settings = replace(SETTINGS, job=replace(JOB, loss=loss), real=False)
        target = logits.clone() if loss is mean_square else classes
        facts = measure_loss(logits, (True,), target, settings, Stopwatch())
        assert facts.saved_bytes == pytest.approx(saved, rel=0.01)
        assert facts.saved_input_bytes == of_output
        assert facts.working_bytes >= size  # the gradient of the output
    settings = replace(SETTINGS, job=replace(JOB, loss=lambda output, _: output.square().sum()))
    facts = measure_loss(logits, (True,), classes, settings, Stopwatch())
    assert (facts.saved_bytes, facts.saved_input_bytes) == (0, size)


def test_a_split_backward_keeps_gradients_of_inner_layers() -> None:
    layers = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 50))
    facts = measured(layers, torch.randn(8, 30))
    assert facts.deferred_bytes == 4 * 8 * 40  # the output's gradient was received


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.linear, x, use_reentrant=True) + self.linear(x)


@pytest.mark.parametrize("slow", [False, True])
def test_a_backward_that_cannot_be_split_is_measured_as_a_whole(
    slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "SLOW_SECONDS", 0.0 if slow else 10.0)
    facts = measured(Reentrant(), torch.randn(4, 8))
    assert not facts.splits
    assert facts.backward == facts.backward_input > 0.0
    assert measured(nn.Linear(8, 8), torch.randn(4, 8)).splits


def test_a_group_norm_in_channels_last_is_not_split() -> None:
    """The second part would end the process, in torch itself."""
    image = torch.randn(2, 8, 6, 6)
    assert measured(nn.GroupNorm(2, 8), image).splits
    assert not measured(nn.GroupNorm(2, 8), image.to(memory_format=torch.channels_last)).splits


class Gradients(nn.Module):
    """Uses torch.func, which rejects hooks on saved tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes: torch.Tensor = torch.func.grad(lambda z: self.linear(z).tanh().sum())(x)
        return slopes + torch.tanh(x)


def test_a_layer_that_rejects_hooks_is_measured_by_the_memory_that_grows() -> None:
    facts = measured(Gradients(), torch.randn(50, 8))
    assert facts.backward > 0.0
    assert facts.saved_bytes >= 4 * 50 * 8  # of both functions
    assert facts.output_bytes == 4 * 50 * 8


def test_what_the_allocator_loses_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bytearray] = []

    class Grows(nn.Module):
        """Takes half as much again as its graph keeps, as holes between tensors would."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept.append(bytearray(b"1") * (x.nbytes // 2))
            return x.exp()

    value = torch.randn(1024, 1024)
    facts = measured(Grows(), value)
    assert facts.saved_bytes == pytest.approx(value.nbytes / 2, rel=0.1)
    settings = replace(SETTINGS, real=False)
    assert measured(Grows(), value, settings=settings).saved_bytes == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())  # as on other systems
    assert measured(Grows(), value).saved_bytes == 0


def test_little_is_lost_of_large_tensors() -> None:
    value = torch.randn(8, 1 << 20)
    assert measured(nn.ReLU(), value).saved_bytes <= value.nbytes / 10
