"""Forwards that a backward repeats leave no trace: the schedule decides what comes before them."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from pipeworker.errors import UsageError
from pipeworker.plan.placement import Placement
from pipeworker.worker.stage.repeated_forwards import RepeatedForwards
from support.in_process.layers import data, mse
from support.in_process.pipelines import Pipeline, Way, filled
from support.in_process.plain_loop import Trained, assert_equal, plain

TWO = filled(Placement.identity(2), "except_first")


SELECTIVE = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
"""The products are kept, and all else is computed again."""


class Checkpointed(nn.Module):
    """Repeats the forward of another module in the backward, instead of keeping its graph."""

    def __init__(self, inner: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inner, self.options = inner, {"use_reentrant": False, **options}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, **self.options)
        return out


def norm(**options: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, **options))


def untraced() -> nn.Module:
    tracking = nn.InstanceNorm1d(2, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), tracking, nn.Tanh(), nn.Flatten())


@pytest.mark.parametrize(
    ("inner", "reentrant", "named"),
    [
        (untraced(), False, r"inner.1 \(InstanceNorm1d\): .* the buffer running_mean "),
        (spectral_norm(nn.Linear(6, 6)), True, r".* \(_SpectralNorm\): .* the buffer _u "),
    ],
    ids=["a change without a trace", "spectral norm"],
)
def test_a_changed_buffer_is_an_error(inner: nn.Module, named: str, *, reentrant: bool) -> None:
    layers = [nn.Linear(6, 6), Checkpointed(inner, use_reentrant=reentrant), nn.Linear(6, 2)]
    pipeline = Pipeline(layers, mse, data(8), TWO, microbatches=4, balance=(2, 1))
    with pytest.raises(UsageError, match=rf"^layer 1 \(Checkpointed\): {named}"):
        pipeline.train(1)


def test_a_compiled_batch_norm_trains_without_a_warning() -> None:
    """Its statistics show that it has run, since the module is not called."""
    inner = norm()
    compiled: Any = torch.compile(inner, backend="eager")
    layer, x = Checkpointed(compiled), torch.randn(4, 6)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        repeated = RepeatedForwards([layer], lambda _: "layer 0")
        for _ in range(2):
            out = layer(x.requires_grad_())
            with repeated.undoing():
                out.sum().backward()
    assert inner[1].num_batches_tracked == 2  # type: ignore[index]
    assert not found


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_batch_norm_of_torchscript_is_an_error() -> None:
    """No hook of a module within one of TorchScript runs."""
    layer = Checkpointed(torch.jit.script(norm()), use_reentrant=True)
    repeated, x = RepeatedForwards([layer], lambda _: "layer 0"), torch.randn(4, 6)
    out = [layer(x.requires_grad_()) for _ in range(2)]
    with repeated.undoing():
        out.pop().sum().backward()
    with pytest.raises(UsageError, match=r"^layer 0: .* running_mean"), repeated.undoing():
        out.pop().sum().backward()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"context_fn": SELECTIVE}])
def test_batch_norm_has_the_statistics_of_the_layer_alone(
    options: dict[str, Any], *, deferred: bool
) -> None:
    inner, batches = norm(), data(8, 8)

    def trained(layer: nn.Module, way: Way) -> tuple[Trained, dict[str, torch.Tensor]]:
        layers = [nn.Linear(6, 6), layer, nn.Linear(6, 2)]
        torch.manual_seed(1)
        for one in layers[::2]:
            one.reset_parameters()  # type: ignore[operator]
        pipeline = Pipeline(layers, mse, batches, way, microbatches=4, deferred=deferred)
        found = pipeline.train(2)
        found.weights = {name.replace("inner.", ""): w for name, w in found.weights.items()}
        found.grads = [
            {name.replace("inner.", ""): g for name, g in grads.items()} for grads in found.grads
        ]
        return found, dict(nn.ModuleList(pipeline.layers).named_buffers())

    expected, statistics = trained(copy.deepcopy(inner), filled(Placement.identity(1)))
    for way in (filled(Placement.identity(1)), TWO):
        layer = Checkpointed(copy.deepcopy(inner), **options)
        found, buffers = trained(layer, way)
        assert_equal(found, expected)
        for one, other in zip(buffers.values(), statistics.values(), strict=True):
            assert torch.equal(one, other)


class LeavesNorm(nn.Linear):
    """Leaves the size of its gradients in a buffer, which no forward reads."""

    size: torch.Tensor

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("size", torch.zeros(()))
        self.register_full_backward_hook(lambda *found: self.size.add_(found[2][0].norm()) and None)


class Counting(nn.BatchNorm1d):
    """Counts its backwards in its statistics, which no forward in training reads."""

    def __init__(self) -> None:
        super().__init__(6)
        self.register_full_backward_hook(Counting.count)  # type: ignore[arg-type]

    def count(self, *_: Any) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(100)


def test_what_a_hook_leaves_in_a_batch_norm_remains() -> None:
    layers = [nn.Linear(6, 6), Counting(), Checkpointed(norm()), nn.Linear(6, 2)]
    pipeline = Pipeline(layers, mse, data(8, 8), TWO, microbatches=4)
    pipeline.train(2)
    (counting,) = (one for one in pipeline.layers if isinstance(one, Counting))
    assert counting.num_batches_tracked == 2 * 4 * (1 + 100)


@pytest.mark.parametrize("inner", [norm(track_running_stats=False), norm().eval(), nn.Dropout(0.3)])
def test_what_leaves_no_buffer_changed_trains(inner: nn.Module) -> None:
    layers = [nn.Linear(6, 6), LeavesNorm(), Checkpointed(inner), nn.Linear(6, 2)]
    batches = data(8, 8)
    expected = plain(copy.deepcopy(layers), mse, batches, 4)
    assert_equal(Pipeline(layers, mse, batches, TWO, microbatches=4).train(2), expected)


class Functional(nn.Module):
    """Normalizes without a call of the module that has the statistics."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.norm, self.repeats = nn.BatchNorm1d(6), repeats

    def part(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.norm.running_mean, self.norm.running_var
        return nn.functional.batch_norm(x, mean, variance, training=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.repeats:
            return self.part(x)
        out: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        return out


@pytest.mark.parametrize("way", [filled(Placement.identity(1)), TWO])
def test_statistics_are_undone_without_a_call_of_their_module(way: Way) -> None:
    """Also behind the first 64 backwards, each of which is checked."""
    batches = data(*[4] * 34)

    def statistics(*, repeats: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = [nn.Linear(6, 6), Functional(repeats=repeats), nn.Linear(6, 2)]
        pipeline = Pipeline(layers, mse, batches, way, microbatches=2)
        pipeline.train(len(batches))
        return [*nn.ModuleList(pipeline.layers).buffers()]

    for one, other in zip(statistics(repeats=True), statistics(repeats=False), strict=True):
        assert torch.equal(one, other)
