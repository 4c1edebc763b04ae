"""The figure by which one evaluation is better than another."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipeworker.facts.criterion import Criterion


@pytest.mark.parametrize(
    ("text", "criterion"),
    [
        ("loss", Criterion("loss")),
        ("min:loss", Criterion("loss")),
        ("max:accuracy", Criterion("accuracy", more=True)),
        ("max:val/f1:macro", Criterion("val/f1:macro", more=True)),
        ("top:5", Criterion("top:5")),
    ],
)
def test_a_criterion_is_read_from_text(text: str, criterion: Criterion) -> None:
    assert Criterion.parse(text) == criterion


@pytest.mark.parametrize(
    ("losses", "least", "most"),
    [
        ([], None, None),
        ([3.0, 1.0, 2.0], 2, 1),
        ([2.0, 1, 1.0, 2], 2, 1),  # of equal ones, the first
        ([math.nan, math.inf, -math.inf], None, None),
        ([math.nan, None, "0", 5.0, 10**4000], 4, 5),
    ],
)
def test_the_best_row(losses: list[Any], least: int | None, most: int | None) -> None:
    rows: list[dict[str, Any]] = [{"step": n, "loss": x} for n, x in enumerate(losses, 1)]
    for text, best in (("loss", least), ("max:loss", most)):
        found = Criterion.parse(text).best([{"step": 0}, *rows])
        assert (found and found["step"]) == best
        assert Criterion.parse(text).since_best([{}, *rows]) == len(losses) - (best or -1)
