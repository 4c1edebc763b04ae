"""A change of a buffer that other stages have too is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.stage.shared_buffers import SharedBuffers


def layer() -> nn.Module:
    inner = nn.Module()
    inner.register_buffer("cos", torch.ones(3))
    return nn.Sequential(inner)


def change(module: nn.Module) -> None:
    module.get_buffer("0.cos").mul_(2)


def change_without_a_trace(module: nn.Module) -> None:
    module.get_buffer("0.cos").data.mul_(2)


def replace(module: nn.Module) -> None:
    module.get_submodule("0").register_buffer("cos", torch.zeros(3))


def remove(module: nn.Module) -> None:
    module.get_submodule("0").register_buffer("cos", None)


@pytest.mark.parametrize(
    ("changing", "before", "found"),
    [
        (change, 0, 1),
        (change, 4, 5),
        (replace, 4, 5),
        (remove, 4, 5),
        (change_without_a_trace, 0, 1),
        (change_without_a_trace, 1, 2),
        (change_without_a_trace, 4, 8),
    ],
)
def test_a_change_is_found(changing: Callable[[nn.Module], None], before: int, found: int) -> None:
    module = layer()
    buffers = SharedBuffers([nn.Identity(), module], 6, {(7, "0.cos"): "rope.cos"})
    for step in range(1, before + 1):
        buffers.begin()
        buffers.check(step)
    buffers.begin()
    changing(module)
    for step in range(before + 1, found):
        buffers.begin()
        buffers.check(step)
    with pytest.raises(
        UsageError, match=rf"layer 7 \(Seq.*\): the buffer rope.cos .* step {found}"
    ):
        buffers.check(found)


def test_an_equal_buffer_may_take_its_place() -> None:
    module = layer()
    buffers = SharedBuffers([module], 0, {(0, "0.cos"): "rope.cos"})
    buffers.begin()
    module.get_submodule("0").register_buffer("cos", torch.ones(3))
    module.get_buffer("0.cos").copy_(torch.ones(3))
    for step in range(1, 4):
        buffers.check(step)
    change(module)
    with pytest.raises(UsageError, match="step 5"):
        buffers.check(5)
