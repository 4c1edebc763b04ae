"""The buffers before a step, restored after one that failed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeworker.worker.state.buffers import StepGuard


class Averages(nn.Module):
    """Changes one buffer in place, replaces another, and leaves a third as it is."""

    constant: torch.Tensor
    placed: torch.Tensor
    replaced: torch.Tensor

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        for name in ("placed", "replaced", "constant"):
            self.register_buffer(name, torch.zeros(size))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.placed += 1
        self.replaced = self.replaced + 1
        return x


def state(layers: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in nn.Sequential(*layers).named_buffers()}


def test_what_a_failed_step_has_changed_is_restored() -> None:
    layers = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Averages()]
    net, guard = nn.Sequential(*layers), StepGuard(layers)
    x = torch.randn(4, 3)
    guard.begin()
    net(x)
    guard.end()
    before = state(layers)
    guard.begin()
    net(x)
    net(x)
    assert guard.restore() == ""
    after = state(layers)
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert guard.restore() == ""  # nothing more to do


def test_a_buffer_that_is_resized_gets_its_size_and_values_again() -> None:
    layer = Averages()
    guard = StepGuard([layer])
    guard.begin()
    placed = layer.get_buffer("placed")
    placed.resize_(7).fill_(2)
    assert guard.restore() == ""
    assert layer.get_buffer("placed") is placed
    assert torch.equal(placed, torch.zeros(3))


def test_a_whole_step_stays() -> None:
    layers: list[nn.Module] = [nn.BatchNorm1d(3)]
    guard = StepGuard(layers)
    guard.begin()
    layers[0](torch.randn(4, 3))
    guard.end()
    whole = state(layers)
    assert guard.restore() == ""
    after = state(layers)
    assert all(torch.equal(whole[key], after[key]) for key in whole)
    assert whole["0.num_batches_tracked"] == 1


def test_a_buffer_that_no_step_before_has_changed_cannot_be_restored() -> None:
    layers: list[nn.Module] = [Averages(20_000)]
    guard = StepGuard(layers)
    guard.begin()
    layers[0](torch.zeros(1))
    assert guard.restore() == "Averages.placed"


def test_a_large_buffer_that_a_step_before_has_changed_is_restored() -> None:
    layers: list[nn.Module] = [Averages(20_000)]
    guard = StepGuard(layers)
    for _ in range(2):
        guard.begin()
        layers[0](torch.zeros(1))
        guard.end()
    before = state(layers)
    guard.begin()
    layers[0](torch.zeros(1))
    assert guard.restore() == ""
    after = state(layers)
    assert all(torch.equal(before[key], after[key]) for key in before)


class Counts(Averages):
    """Also counts its calls, in its extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(x))
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.calls

    def set_extra_state(self, state: Any) -> None:
        self.calls = state


class Hidden(Counts):
    """Also changes buffers and weights as no version shows, and fills one that was None."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.constant.data.add_(1)
        self.placed.numpy()[:] += 1
        self.absent = torch.ones(3)
        return super().forward(x)


def test_what_a_failed_first_step_has_changed_is_restored() -> None:
    layer = Hidden()
    guard, before = StepGuard([layer]), state([layer])
    guard.begin()
    layer(torch.zeros(2))
    assert guard.restore() == ""
    after = state([layer])
    assert after.keys() == before.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert layer.calls == []
    guard.begin()
    layer(torch.zeros(2))
    guard.end()
    assert guard.restore() == ""
    assert layer.calls == [2]


def test_weights_that_a_failed_step_has_changed_are_named() -> None:
    layer = nn.Embedding(4, 3, max_norm=0.1)
    guard = StepGuard([layer])
    guard.begin()
    layer(torch.tensor([1]))
    assert guard.restore() == "Embedding.weight"
    guard.begin()
    layer(torch.tensor([1]))
    guard.end()
    with torch.no_grad():
        layer.weight.add_(1)  # the update
    assert guard.restore() == ""


def test_what_an_interrupted_pass_has_changed_is_restored() -> None:
    """Its first pass as well: no step has shown which buffers change, and some are large."""
    layer = Counts()
    net = nn.Sequential(layer, nn.BatchNorm1d(3), Averages(20_000)).eval()
    net(torch.randn(2, 3))
    before = state([net])
    guard = StepGuard([net], copies_all=True)
    guard.begin()
    for _ in range(2):
        net(torch.randn(4, 3))
    assert layer.calls == [2, 4, 4]
    guard.restore()
    assert layer.calls == [2]
    after = state([net])
    assert all(torch.equal(before[key], after[key]) for key in before)
