"""The number of cases of property tests and loops: few in each run, many every night."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

FACTOR = float(os.environ.get("DRAWS", "1"))
"""The variable ``DRAWS`` multiplies the number of examples of every property test."""


def draws(count: int) -> int:
    """Return the number of examples of a test that draws `count` in an ordinary run."""
    return max(1, round(count * FACTOR))


def some(values: Iterable[T], every: int, turn: int = 0) -> list[T]:
    """Return each `every`-th value in an ordinary run, beginning with number `turn`; else all."""
    found = [*values]
    chosen = found[turn % every :: every] if FACTOR == 1 else found
    assert chosen, "a loop over no value tests nothing"
    return chosen
