"""Many floats become a few with the same exact sum, where they are a tensor."""

from __future__ import annotations

import math

import torch

SHORT = 512
"""Up to so many terms ``math.fsum``, which is called next, is as quick."""
_MOST = 1023  # the exponent of the largest power of two


def condensed(terms: torch.Tensor) -> list[float]:
    """Floats with the exact sum of `terms`: a few, unless `terms` are short or of odd numbers.

    A power of two is added to all terms and subtracted again, which cuts them off at one bit. It is
    chosen so that what is above this bit is added without rounding, in whatever order; what is
    below is left for the next round (Rump, Ogita and Oishi 2008, "Accurate floating-point
    summation, part I": ExtractVector).

    Args:
        terms: a vector of float64, on any device.
    """
    terms = terms.cpu()
    if len(terms) <= SHORT:
        return list(terms.tolist())
    found: list[float] = []
    while largest := float(terms.abs().max()):
        exponent = math.frexp(largest)[1] + len(terms).bit_length()
        if not math.isfinite(largest) or exponent > _MOST:
            return [*found, *terms.tolist()]
        cut = math.ldexp(1.0, exponent)
        above = (terms + cut).sub_(cut)
        found.append(float(above.sum()))
        terms = terms - above
    return found
