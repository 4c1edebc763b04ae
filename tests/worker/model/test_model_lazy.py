"""Lazy layers are rejected before anything else is done with the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.wire.messages.plan import StageRange
from pipeworker.worker.model.model import Model
from pipeworker.worker.model.survey import Survey

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Sequential(nn.LazyLinear(4))

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x))


def model(made: Any) -> Model:
    def plan_of(module: nn.Module) -> Any:
        raise AssertionError("a lazy module is cut")

    optimizer = torch.optim.SGD
    job = JobFile(model=lambda: made, loss=nn.functional.mse_loss, optimizer=optimizer)
    return Model(job, 0, CPU, Tracker(), plan_of)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ([nn.ReLU(), nn.LazyLinear(4), nn.LazyLinear(4)], r"layer 1 \(LazyLinear\): has"),
        (nn.Sequential(nn.ReLU(), nn.LazyBatchNorm1d()), r"layer 1 \(LazyBatchNorm1d\): has"),
        ([nn.Linear(4, 4), Net()], r"layer 1 \(Net\): has"),
        (Net(), r"model\(\): its last.0 \(LazyLinear\) has"),
    ],
)
def test_the_first_lazy_layer_is_named(made: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=f"^{expected} parameters without sizes; pass the sizes"):
        model(made)


def test_a_lazy_layer_that_has_had_an_input_is_a_layer() -> None:
    layer = nn.LazyLinear(4)
    layer(torch.zeros(2, 3))
    assert model([layer]).classes == ("Linear",)


def test_a_lazy_layer_that_a_callable_returns_is_named_when_it_is_built() -> None:
    made = model([nn.ReLU(), lambda: nn.LazyLinear(4)])
    with pytest.raises(UsageError, match=r"^layer 1 \(LazyLinear\): has parameters without sizes"):
        made.build(StageRange(0, 0, 2), ())
    with pytest.raises(UsageError, match=r"^layer 1 \(LazyLinear\): has parameters without sizes"):
        Survey(made.entries, 0, CPU).on_real_tensors(torch.zeros(2, 3), Tracker())
