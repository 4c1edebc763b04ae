"""Layers that share a buffer."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeworker.facts.connections import SharedBuffer
from pipeworker.worker.model.model import shared_buffers


def test_a_shared_buffer_is_found_by_identity() -> None:
    a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    b.running_mean = a.running_mean
    layers: list[Any] = [nn.ReLU(), a, nn.ReLU, b, a, nn.BatchNorm1d(2)]
    assert shared_buffers(layers) == (SharedBuffer(1, 4),)
    assert shared_buffers([b, nn.Sequential(a), b]) == (SharedBuffer(0, 2),)
