"""The number of tokens of a mini-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeworker.errors import UsageError
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.data.reader import Reader
from pipeworker.worker.data.tokens import count_tokens

IDS = torch.zeros(4, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (IDS, 24),
        (IDS.to(torch.uint8), 24),
        ({"input_ids": IDS, "attention_mask": IDS.bool()}, 24),
        ({"ids": IDS}, 0),
        (IDS.float(), 0),
        (IDS.bool(), 0),
        (IDS[0], 0),
        (IDS[None], 0),
        ((IDS, IDS), 0),
    ],
)
def test_ids_are_recognized_by_dtype_and_shape(value: Any, count: int) -> None:
    assert count_tokens((value, None), None) == count


def test_the_jobs_function_is_given_the_whole_mini_batch() -> None:
    reader = Reader([(IDS, IDS)], microbatches=2, seed=0, epochs=1, tokens=lambda b: b[1].shape[1])
    read = reader.read()
    assert read is not None
    assert read.batch.tokens == 6
    assert count_tokens((IDS, IDS), lambda batch: (batch[0] == 0).sum()) == 24
    assert reader.split((IDS, None), whole=True).batch.tokens == 0  # a prediction has no target


@pytest.mark.parametrize("wrong", [-1, 0.5, True, None, IDS, torch.tensor(1.5)])
def test_a_wrong_number_is_an_error(wrong: Any) -> None:
    with pytest.raises(UsageError, match=r"tokens\(batch\) returned .*; return a number of tokens"):
        count_tokens((IDS, IDS), lambda _: wrong)


def test_an_exception_is_blamed_on_the_function() -> None:
    with pytest.raises(UserCodeError, match=r"tokens\(\) raised AttributeError"):
        count_tokens((IDS, IDS), lambda batch: batch[0].sizes)


def test_a_tensor_that_is_no_integer_is_named_by_its_dtype() -> None:
    text = r"returned a tensor of torch.float32 and shape \(\); return a number"
    with pytest.raises(UsageError, match=text):
        count_tokens((IDS, IDS), lambda _: torch.tensor(3.0))
