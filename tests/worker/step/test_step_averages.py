"""Averages of losses and metrics over an evaluation pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeworker.errors import UsageError
from pipeworker.worker.step.averages import Averages


def _target_as_loss(output: Any, target: Any) -> Any:
    """Return the target as the loss."""
    return target


def test_means_are_weighted_by_samples_exactly() -> None:
    averages = Averages(_target_as_loss, lambda output, target: {"sum": output.sum(), "two": 2})
    for value, samples in ((1.0, 3), (2.0**-60, 1), (-1.0, 3)):
        averages.add(torch.ones(samples), torch.tensor(value).double(), samples)
    assert averages.result(3).row() == {"loss": 2.0**-60 / 7, "sum": (9 + 1 + 9) / 7, "two": 2.0}


def test_losses_with_counts_are_divided_by_the_total() -> None:
    averages = Averages(_target_as_loss)
    averages.add(None, (torch.tensor(6.0), 2), 5)
    averages.add(None, (torch.tensor(1.0), torch.tensor(5)), 1)
    assert averages.result(3).row() == {"loss": 1.0}


def test_metrics_with_counts_are_divided_by_the_total() -> None:
    averages = Averages(_target_as_loss, lambda output, target: {"hit": output, "mean": 2})
    averages.add((torch.tensor(6.0), 2), torch.tensor(1.0), 5)
    averages.add([torch.tensor(1.0), torch.tensor(5)], torch.tensor(1.0), 1)
    assert averages.result(3).row() == {"loss": 1.0, "hit": 1.0, "mean": 2.0}


def test_figures_are_those_of_the_time_at_which_they_were_returned() -> None:
    loss, count, figure = torch.tensor(6.0), torch.tensor(2), torch.tensor(1.0)
    averages = Averages(
        lambda output, target: (loss, count),
        lambda output, target: {"it": figure, "pair": (figure, count)},
    )
    averages.add(None, None, 1)
    for value in (loss, count, figure):
        value += 2
    averages.add(None, None, 1)
    assert averages.result(3).row() == {"loss": 14 / 6, "it": 2.0, "pair": 4 / 6}


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the reads of a tensor's number, each of which waits for its device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_figures_are_not_read_one_by_one() -> None:
    averages = Averages(_target_as_loss, lambda output, target: {"it": target[0], "two": 2})
    for value in (0.1, 0.2, 0.7):
        averages.add(None, (torch.tensor([value], dtype=torch.bfloat16), torch.tensor(2)), 5)
    with _Reads() as reads:
        found = averages.result(3).row()
    assert reads.count == 0
    expected = [float(torch.tensor(value, dtype=torch.bfloat16)) for value in (0.1, 0.2, 0.7)]
    assert found == {"loss": sum(expected) / 6, "it": sum(5 * x for x in expected) / 15, "two": 2.0}


def test_sets_have_averages_of_their_own() -> None:
    averages = Averages(_target_as_loss, lambda output, target: {"two": 2 * target})
    assert math.isnan(averages.result(3).loss)
    for value, name in ((1.0, "val"), (3.0, "val"), (5.0, "test")):
        averages.add(None, torch.tensor(value), 1, name)
    assert averages.result(3).row() == {
        "loss": 2.0,
        "val/loss": 2.0,
        "val/two": 4.0,
        "test/loss": 5.0,
        "test/two": 10.0,
    }
    averages = Averages(_target_as_loss, lambda output, target: {"two": 2 * target})
    averages.add(None, torch.tensor(1.0), 1)
    assert averages.result(3).row() == {"loss": 1.0, "two": 2.0}


def test_the_average_of_no_samples_is_nan() -> None:
    assert math.isnan(Averages(_target_as_loss).result(3).loss)


@pytest.mark.parametrize(
    ("values", "average"),
    [
        ((math.inf,), math.inf),
        ((1.0, -math.inf), -math.inf),
        ((math.inf, -math.inf), math.nan),
        ((1.0, math.nan), math.nan),
        ((1e308, 1e308), math.inf),  # the sum is too large
    ],
)
def test_averages_that_are_not_finite(values: tuple[float, ...], average: float) -> None:
    averages = Averages(_target_as_loss, lambda output, target: {"it": target})
    for value in values:
        averages.add(None, torch.tensor(value, dtype=torch.float64), 1)
    assert [*map(str, averages.result(3).row().values())] == [str(average)] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3, "returned an int; return a dict of scalars"),
        ({"loss": 1}, "named a value 'loss'"),
        ({3: 1}, "named a value 3"),
        ({"x": "y"}, "returned a str under 'x'"),
        ({"x": torch.ones(2)}, r"returned a Tensor of shape \(2,\) under 'x'"),
        ({"x": (1, "y")}, r"returned a str under 'x'; return a scalar, or a pair \(sum, count\)"),
        ({"x": (1, 2, 3)}, "returned a tuple under 'x'"),
    ],
)
def test_metrics_must_be_named_scalars(values: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Averages(_target_as_loss, lambda output, target: values).add(None, torch.tensor(1.0), 1)
