"""Layers that share a buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.facts.connections import SharedBuffer
from pipeworker.worker.model.model import shared_buffers
from pipeworker.worker.model.survey import Survey


def test_a_shared_buffer_is_found_by_identity() -> None:
    a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    b.running_mean = a.running_mean
    layers: list[Any] = [nn.ReLU(), a, nn.ReLU, b, a, nn.BatchNorm1d(2)]
    assert shared_buffers(layers) == (SharedBuffer(1, 4),)
    assert shared_buffers([b, nn.Sequential(a), b]) == (SharedBuffer(0, 2),)


class Scaled(nn.Module):
    """Multiplies by a table."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.table(x)
        return scaled


class Table(nn.Module):
    """Multiplies by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.ones(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.get_buffer("cos")


class Counted(Table):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.get_buffer("calls").add_(1)
        return super().forward(x)


class Assigned(Table):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.get_buffer("calls") + 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("shared", "changes"),
    [
        (Table(), False),
        (Counted(), True),
        (Assigned(), True),
        (nn.BatchNorm1d(2), True),
        (nn.BatchNorm1d(2).eval(), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_may_be_parted_if_no_forward_changes_what_they_share(
    shared: nn.Module, changes: bool
) -> None:
    layers = [nn.Linear(2, 2), Scaled(shared), nn.Tanh(), Scaled(shared)]
    found = Survey(layers, 0, torch.device("cpu")).on_fakes(torch.ones(4, 2))
    assert shared_buffers(layers) == (SharedBuffer(1, 3),)
    assert shared_buffers(layers, found["changing"]) == (SharedBuffer(1, 3),) * changes
    assert shared_buffers(layers, found["changing"][:3]) == (SharedBuffer(1, 3),)
