"""A change of a buffer that other stages have too is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.stage.shared_buffers import SharedBuffers

LARGE = 1 << 19
"""A number of elements of which not all are looked at in every step."""


def layer(size: int = 3) -> nn.Module:
    inner = nn.Module()
    inner.register_buffer("cos", torch.ones(size))
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
    ("changing", "before", "found", "size"),
    [
        (change, 0, 1, 3),
        (change, 4, 5, 3),
        (replace, 4, 5, 3),
        (remove, 4, 5, 3),
        (change_without_a_trace, 0, 1, LARGE),
        (change_without_a_trace, 1, 2, LARGE),
        (change_without_a_trace, 4, 5, 3),
        (change_without_a_trace, 4, 8, LARGE),
    ],
)
def test_a_change_is_found(
    changing: Callable[[nn.Module], None], before: int, found: int, size: int
) -> None:
    module = layer(size)
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


def test_a_sparse_buffer_may_be_shared_and_a_change_of_it_is_found() -> None:
    module = layer()
    module.get_submodule("0").register_buffer("cos", torch.eye(3).to_sparse(), persistent=False)
    buffers = SharedBuffers([module], 0, {(0, "0.cos"): "graph.edges"})
    for step in range(1, 5):
        buffers.begin()
        buffers.check(step)
    change(module)
    with pytest.raises(UsageError, match=r"the buffer graph\.edges has changed, .* step 5"):
        buffers.check(5)
