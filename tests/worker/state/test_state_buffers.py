"""The buffers before a step, restored after one that failed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pipeworker.worker.state.buffers import BufferGuard, PassGuard


class Averages(nn.Module):
    """Changes one buffer in place, replaces another, and leaves a third as it is."""

    placed: torch.Tensor
    replaced: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("placed", "replaced", "constant"):
            self.register_buffer(name, torch.zeros(3))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.placed += 1
        self.replaced = self.replaced + 1
        return x


def state(layers: list[nn.Module]) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in nn.Sequential(*layers).named_buffers()}


def test_what_a_failed_step_has_changed_is_restored() -> None:
    layers = [nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), Averages()]
    net, guard = nn.Sequential(*layers), BufferGuard(layers)
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


def test_a_whole_step_stays() -> None:
    layers: list[nn.Module] = [nn.BatchNorm1d(3)]
    guard = BufferGuard(layers)
    guard.begin()
    layers[0](torch.randn(4, 3))
    guard.end()
    whole = state(layers)
    assert guard.restore() == ""
    after = state(layers)
    assert all(torch.equal(whole[key], after[key]) for key in whole)
    assert whole["0.num_batches_tracked"] == 1


def test_a_buffer_that_no_step_before_has_changed_cannot_be_restored() -> None:
    layers: list[nn.Module] = [Averages()]
    guard = BufferGuard(layers)
    guard.begin()
    layers[0](torch.zeros(1))
    assert guard.restore() == "Averages.placed"


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


def test_what_an_interrupted_pass_has_changed_is_restored() -> None:
    """Its first pass as well: no step has shown which buffers change."""
    layer = Counts()
    net = nn.Sequential(layer, nn.BatchNorm1d(3)).eval()
    net(torch.randn(2, 3))
    before = state([net])
    guard = PassGuard([net])
    for _ in range(2):
        net(torch.randn(4, 3))
    assert layer.calls == [2, 4, 4]
    guard.restore()
    assert layer.calls == [2]
    after = state([net])
    assert all(torch.equal(before[key], after[key]) for key in before)
