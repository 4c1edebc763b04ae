"""Layers that share a buffer."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.model.model import check_buffers


def test_layers_that_share_a_buffer_must_be_on_one_stage() -> None:
    a, b = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    b.running_mean = a.running_mean
    layers: list[Any] = [nn.ReLU(), a, nn.ReLU, b, a]
    check_buffers(layers, 1, 5)
    check_buffers(layers, 0, 1)
    both = r"layer 1 \(BatchNorm1d\) and layer 3 \(BatchNorm1d\): share a buffer"
    for first, stop in ((0, 2), (3, 4), (3, 5)):
        with pytest.raises(UsageError, match=rf"{both} but .* put layers 1 to 4 on one stage"):
            check_buffers(layers, first, stop)
