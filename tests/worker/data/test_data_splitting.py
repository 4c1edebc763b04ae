"""Outputs of micro-batches, concatenated."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.data.splitting import concatenate_outputs


def test_nested_outputs_of_micro_batches_are_concatenated() -> None:
    parts = [{"y": (torch.full((n, 2), n), None), "scale": 2.0} for n in (3, 2)]
    whole = concatenate_outputs(parts)
    assert torch.equal(whole["y"][0], torch.cat([torch.full((3, 2), 3), torch.full((2, 2), 2)]))
    assert whole["y"][1] is None
    assert whole["scale"] == 2.0


def test_the_output_of_one_micro_batch_may_have_any_value() -> None:
    array = numpy.zeros(2)
    _, *found = concatenate_outputs([(torch.zeros(1), array, math.nan)])
    assert found[0] is array
    assert math.isnan(found[1])


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.tensor(1.0)], "a tensor without dims"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"not of one size .* \[3\] and \[4\]"),
        ([(torch.zeros(1), 1), (torch.zeros(1), 2)], "an int that is not the same"),
        ([(torch.zeros(1), 1), (torch.zeros(1), 1.0)], "an int that is not the same"),
        ([(torch.zeros(1), None), (torch.zeros(1),) * 2], "a NoneType that is not the same"),
        ([(torch.zeros(1),) * 2, (torch.zeros(1), None)], "a NoneType that is not the same"),
        ([(torch.zeros(1), numpy.zeros(2))] * 2, "a ndarray that is not the same"),
        ([[torch.zeros(1)], [torch.zeros(1)] * 2], "another structure in each micro-batch"),
    ],
)
def test_outputs_that_cannot_be_concatenated_are_rejected(outputs: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        concatenate_outputs(outputs)
