"""Sums of floats that do not depend on how their terms are grouped.

``math.fsum`` rounds the exact sum once, so the order of the terms does not matter; but it needs all
terms in one place. A process with many terms sends *partials* instead: a few floats, each at most
half the last bit of the one before, whose exact sum is that of the terms (Shewchuk 1997, "Adaptive
precision floating-point arithmetic"; CPython's fsum is Hettinger's recipe of it). A process that
receives partials from several others adds them up as if they were terms, and gets the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MOST = 40
"""The largest number of partials: they share the 2,098 bits of a finite float's range, 53 or more
each."""


def partials(terms: Iterable[float]) -> tuple[float, ...]:
    """Return at most MOST floats whose exact sum is that of `terms`, the largest first, none zero.

    ``(inf,)`` or ``(nan,)`` if that is what :func:`total` returns.
    """
    rest, found = list(terms), []
    # Each partial is the rest, rounded. The rest is a multiple of 2^-1074, as all floats are, so
    # below 2^-1021 at the latest it is a float itself, and then nothing is left.
    while rounded := total(rest):
        if not math.isfinite(rounded):
            return (rounded,)
        found.append(rounded)
        rest.append(-rounded)
    return tuple(found)


def total(terms: Iterable[float]) -> float:
    """Return the exact sum, rounded once; infinite if it is too large or a term is, or NaN."""
    terms = list(terms)
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # too large, or both infinities
        return sum(terms)
