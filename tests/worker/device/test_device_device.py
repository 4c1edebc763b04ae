"""Values on a device."""

from __future__ import annotations

import torch

from pipeworker.worker.device.device import to_device


def test_a_value_is_moved_with_all_its_tensors() -> None:
    value = {"x": torch.ones(2)}
    assert to_device(value, torch.device("cpu")) is value
    moved = to_device(value, torch.device("meta"))
    assert moved["x"].is_meta
