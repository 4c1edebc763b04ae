"""The number of examples of property tests: few in each run, many every night."""

from __future__ import annotations

import os

FACTOR = float(os.environ.get("DRAWS", "1"))
"""The variable ``DRAWS`` multiplies the number of examples of every property test."""


def draws(count: int) -> int:
    """Return the number of examples of a test that draws `count` in an ordinary run."""
    return max(1, round(count * FACTOR))
