"""Sums of floats that do not depend on how the terms are grouped.

``math.fsum`` rounds the exact sum once, so the order of the terms does not show; but it needs them
all. What it keeps of them is enough: a few floats, each at most half the last bit of the one
before, whose exact sum is that of the terms (Shewchuk 1997, "Adaptive precision floating-point
arithmetic"; CPython's fsum is Hettinger's recipe of it). Who has many terms sends such *partials*;
who receives them from several adds them up as if they were the terms, and gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST = 40
"""Partials: they share the 2,098 bits of a finite float's range, 53 or more each."""


def partials(terms: Iterable[float]) -> tuple[float, ...]:
    """A few floats with the exact sum of `terms`, the largest first, none of them zero.

    There are at most MOST.

    Returns:
        ``(nan,)`` where :func:`total` is NaN.
    """
    rest, found = list(terms), []
    # Each is the rest, rounded. The rest is a multiple of 2^-1074, as all floats are, so at the
    # latest below 2^-1021 it is a float itself, and then nothing is left.
    while rounded := total(rest):
        if math.isnan(rounded):
            return (math.nan,)
        found.append(rounded)
        rest.append(-rounded)
    return tuple(found)


def total(terms: Iterable[float]) -> float:
    """The exact sum, rounded once; NaN where a term is not finite, or the sum is too large."""
    try:
        rounded = math.fsum(terms)
    except (OverflowError, ValueError):  # too large, or of both infinities
        return math.nan
    return rounded if math.isfinite(rounded) else math.nan
