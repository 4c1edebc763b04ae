"""Buffers outside of the units of a cut module: each forward may overwrite one, and use it then."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from support.in_process.cut_modules import WIDTH, Whole, mse, pipeline_of, sgd
from support.in_process.plain_loop import plain


class Rotary(nn.Module):
    """Overwrites its table for each input, as transformers does for `longrope`."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.ones(WIDTH), persistent=False)
        self.short = torch.linspace(0.5, 1.5, WIDTH)
        self.long: torch.Tensor | None = None

    def forward(self, far: torch.Tensor) -> Any:
        if self.long is None:
            self.long = torch.linspace(1.5, 0.5, WIDTH)
        self.table.copy_(torch.where(far.max() > 0, self.long, self.short))
        return self.table * 2


class Grows(Rotary):
    """Keeps another table behind an input that it has not had before."""

    def forward(self, far: torch.Tensor) -> Any:
        if far.max() > 0:
            self.table = self.table * 3
        return self.table * 2


class Sometimes(Rotary):
    """Overwrites its table for some inputs."""

    def forward(self, far: torch.Tensor) -> Any:
        if far.max() == 0:
            self.table.copy_(self.short)
        return self.table * 2


class Adds(Rotary):
    """Reads its table to overwrite it."""

    def forward(self, far: torch.Tensor) -> Any:
        return self.table.copy_(self.table + 1)


class Viewed(Rotary):
    """Has a view of its table, which the copies that stages make of the module would not change."""

    def __init__(self) -> None:
        super().__init__()
        self.view = self.table[:WIDTH]


class Model(nn.Module):
    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rotary = rotary

    def forward(self, x: torch.Tensor, far: torch.Tensor) -> Any:
        table = self.rotary(far)
        for layer in self.layers:
            x = torch.tanh(layer(x) * table)
        return x


def batches_of(*fars: int) -> Iterator[tuple[Any, torch.Tensor]]:
    for far in fars:
        x = {"x": torch.randn(4, WIDTH), "far": torch.full((4,), far)}
        yield x, torch.randn(4, WIDTH)


@pytest.mark.parametrize("mode", ["never", "always"])
@pytest.mark.parametrize("stages", [1, 3])
def test_a_forward_may_overwrite_a_buffer_before_it_uses_it(stages: int, mode: str) -> None:
    torch.manual_seed(3)
    module, batches = Model(Rotary()), list(batches_of(0, 1, 0))
    expected = plain([Whole(copy.deepcopy(module))], mse, batches, 2, sgd)
    assert pipeline_of(module, batches, mse, stages, mode).train(3).losses == expected.losses


@pytest.mark.parametrize(
    ("rotary", "fars", "message"),
    [
        (Grows(), (0, 1), "its forward changes the buffer 'rotary.table' outside of the modules"),
        (Adds(), (0, 0), "its forward changes the buffer 'rotary.table' outside of the modules"),
        (Viewed(), (0, 0), "its forward changes the buffer 'rotary.table' outside of the modules"),
        (Sometimes(), (0, 1), "it uses the buffer 'rotary.table' before it overwrites it"),
    ],
)
@pytest.mark.parametrize("stages", [1, 3])
def test_a_buffer_that_keeps_something_for_the_next_forward_is_refused(
    rotary: nn.Module, fars: tuple[int, ...], message: str, stages: int
) -> None:
    torch.manual_seed(3)
    with pytest.raises(UsageError, match=message):
        pipeline_of(Model(rotary), list(batches_of(*fars)), mse, stages, "always").train(2)
