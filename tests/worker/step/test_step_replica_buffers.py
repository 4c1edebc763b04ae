"""Buffers of replicas: those of replica 0, on all of them."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.placement import Placement
from pipeworker.worker.step.replica_buffers import ReplicaBuffers
from support.devices.device import LateDevice
from support.in_process.layers import adam, data, mse
from support.in_process.pipelines import Pipeline, filled
from support.in_process.plain_loop import assert_equal
from support.slow import slow


@pytest.mark.parametrize(
    ("replicas", "deferred"),
    [(2, False), (3, True), *(pytest.param(*case, marks=slow) for case in ((2, True), (3, False)))],
)
def test_all_replicas_have_the_same_running_statistics(*, replicas: int, deferred: bool) -> None:
    """The statistics are replica 0's or, if deferred, those of the whole mini-batch."""
    torch.manual_seed(2)
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)]
    batches = data(12, 8, 12, out=6)
    found = []
    for stages in (1, 4):
        way = filled(Placement.identity(stages, replicas), "always")
        pipeline = Pipeline(
            copy.deepcopy(layers),
            mse,
            batches,
            way,
            microbatches=4,
            optimizer=adam,
            deferred=deferred,
        )
        trained = pipeline.train(3)  # which asserts that replicas are equal
        found.append((trained, [b.clone() for layer in pipeline.layers for b in layer.buffers()]))
    (one, its_buffers), (four, buffers) = found
    assert_equal(four, one)
    assert all(torch.equal(a, b) for a, b in zip(buffers, its_buffers, strict=True))
    single = Pipeline(
        copy.deepcopy(layers[:2]),
        mse,
        batches,
        filled(Placement.identity(1, 1)),
        microbatches=4,
        deferred=True,
    )
    single.train(1)
    replicated = Pipeline(
        copy.deepcopy(layers[:2]),
        mse,
        batches,
        filled(Placement.identity(2, replicas)),
        microbatches=4,
        deferred=True,
    )
    replicated.train(1)
    pairs = zip(single.layers[1].buffers(), replicated.layers[1].buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class Table(nn.Module):
    """A layer with a large buffer, which it writes for some inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(1 << 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0, 0] > 100:
            self.table += float(x[0, 1])
        return x


@pytest.mark.parametrize(("which", "changes"), [(0, True), (5, False)])
def test_a_large_buffer_is_broadcast_if_any_replica_changes_it(
    which: int, *, changes: bool
) -> None:
    """Changes by replica 0 remain; changes by other replicas are overwritten."""
    batches = data(6, 6)
    batches[0][0][which, 0] = 1000.0
    way = filled(Placement.identity(1, 2))
    pipeline = Pipeline([Table(), nn.Linear(6, 2)], mse, batches, way, microbatches=6)
    pipeline.train(2)  # which asserts that replicas are equal
    (table,) = pipeline.layers[0].buffers()
    assert bool(table.any()) is changes


class MakesANorm(nn.Module):
    """A layer that makes a batch norm in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> Any:
        self.norm = self.norm or nn.BatchNorm1d(6, affine=False)
        return self.norm(x)


def test_buffers_of_a_module_that_a_forward_makes_are_those_of_replica_0() -> None:
    layers = [MakesANorm(), nn.Linear(6, 2)]
    way = filled(Placement.identity(1, 2), "never")
    pipeline = Pipeline(layers, mse, data(8, 8, 8), way, microbatches=4)
    pipeline.train(3)  # which asserts that replicas are equal
    assert len([*pipeline.layers[0].buffers()]) == 3


class Untraced(nn.Module):
    """A layer that changes a large buffer without a trace from its forward of a number on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.zeros(1 << 15))
        self.first, self.forwards = first, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards >= self.first:
            self.table.data += x[0, 1].detach()
        return x


def test_a_large_buffer_that_begins_to_change_without_a_trace_later_is_rejected() -> None:
    """From the first mini-batch on, it is made equal; later, replicas had different ones."""

    def train(first: int, samples: int = 6) -> None:
        way = filled(Placement.identity(1, 2), "never")
        layers = [nn.Linear(6, 6), nn.Sequential(Untraced(first)), nn.Linear(6, 2)]
        batches = data(samples, 6, 6, 6)
        Pipeline(layers, mse, batches, way, microbatches=2, limit=5.0).train(4)

    train(1)  # which asserts that replicas are equal
    train(1, 1)  # where the second replica has no samples first
    with pytest.raises(UsageError, match=r"^stage 0, layer 1: .* the buffer `0\.table` with"):
        train(4)


class Lazy(nn.Module):
    """A layer that registers its only buffer in its first forward."""

    mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(x.shape[1]))
        self.mean += x.detach().mean(0)
        return x


def test_a_buffer_that_the_first_forward_registers_is_made_equal_at_once() -> None:
    way = filled(Placement.identity(1, 2))
    pipeline = Pipeline([Lazy(), nn.Linear(6, 2)], mse, data(6), way, microbatches=6)
    pipeline.train(1)  # which asserts that replicas are equal
    (mean,) = pipeline.layers[0].buffers()
    assert bool(mean.any())


class Graph(nn.Module):
    """A layer with a sparse buffer, which it changes from its forward of a number on."""

    def __init__(self, first: float) -> None:
        super().__init__()
        self.edges: torch.Tensor
        self.register_buffer("edges", torch.eye(6).to_sparse(), persistent=False)
        self.first, self.forwards = first, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.forwards += 1
        if self.forwards >= self.first:
            self.edges = 2 * self.edges
        return torch.sparse.mm(self.edges, x.T).T


@pytest.mark.parametrize("first", [1, 6, math.inf])
def test_a_sparse_buffer_may_not_change(first: float) -> None:
    way = filled(Placement.identity(1, 2), "never")
    layers = [nn.Linear(6, 6), nn.Sequential(Graph(first)), nn.Linear(6, 2)]
    pipeline = Pipeline(layers, mse, data(6, 6, 6), way, microbatches=4, limit=5.0)
    refused = pytest.raises(
        UsageError, match=r"^stage 0, layer 1: .* buffer `0\.edges`, which is sp"
    )
    with refused if first < math.inf else nullcontext():
        pipeline.train(3)


def test_buffers_that_differ_wait_for_a_device_twice_however_many_they_are() -> None:
    norms = [nn.BatchNorm1d(2) for _ in range(4)]
    buffers, device = ReplicaBuffers(0, nn.ModuleList(norms)), LateDevice()
    buffers.begin()
    buffers.choose([])
    sent = buffers.pack(torch.device("cpu"))
    with torch.no_grad():
        for norm in norms[1:]:
            norm.running_mean.fill_(2.0)  # type: ignore[union-attr]
    device.move(norms)
    with device.active():
        buffers.unpack(device.put(sent), {})
    assert len(device.waits) == 2
    for norm in norms:
        assert norm.running_mean is not None
        assert device.read(norm.running_mean).tolist() == [0.0, 0.0]


class Turned(nn.Module):
    """A layer whose first forward replaces a buffer by one that lies column by column."""

    basis: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.randn(6, 6))
        self.register_buffer("again", self.basis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.basis.is_contiguous():
            self.basis = self.basis.t().contiguous().t()
            self.again = self.basis
        return x @ self.basis


def test_a_replica_without_micro_batches_gets_the_strides_of_buffers() -> None:
    """A run that resumes gives all replicas the strides of replica 0."""
    layers = [nn.Linear(6, 6), Turned(), nn.Linear(6, 2)]
    pipeline = Pipeline(
        copy.deepcopy(layers),
        mse,
        data(1),
        filled(Placement.identity(1, 2)),
        microbatches=2,
        optimizer=adam,
    )
    pipeline.train(1)
    for one in pipeline.copies:
        turned = one.layers[1]
        assert turned.get_buffer("basis").stride() == (1, 6)
        assert turned.get_buffer("again") is turned.get_buffer("basis")


@pytest.mark.parametrize("shape", [(3, 2), (1, 3, 2)])
def test_a_buffer_that_has_another_shape_on_one_replica_is_an_error(shape: tuple[int, ...]) -> None:
    """A replica without a micro-batch would have the elements in another order."""
    layers = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    replicas = [ReplicaBuffers(0, layer) for layer in layers]
    for layer in layers:
        layer.running_mean = torch.ones(3, 2)
    layers[0].running_mean = torch.ones(shape).transpose(-1, -2)
    for buffers in replicas:
        buffers.begin()
        buffers.choose([])
    packed, strides = replicas[0].pack(torch.device("cpu")), replicas[0].strides()
    with pytest.raises(UsageError, match=r"^stage 0: its buffers have other sizes on another"):
        replicas[1].unpack(packed, strides)
