"""The squares of a stage's gradient as a few terms with the same exact sum."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.exact_sum import partials, total
from pipeworker.worker.update.update import SHORT, condensed


def vector(terms: list[float]) -> torch.Tensor:
    return torch.tensor(terms, dtype=torch.float64)


# Long vectors of few kinds of numbers: hypothesis need not draw a thousand.
kinds = st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=20)


@given(kinds, st.integers(SHORT + 1, 2000))
def test_the_exact_sum_stays(few: list[float], length: int) -> None:
    terms = (few * length)[:length]
    found = condensed(vector(terms))
    assert sum(map(Fraction, found)) == sum(map(Fraction, terms))
    assert len(found) <= 60


@pytest.mark.parametrize("spread", [0, 8, 150])
def test_what_the_coordinator_adds_up_has_the_same_bits(spread: int) -> None:
    """Norms of gradients differ by so many orders of magnitude."""
    generator = torch.Generator().manual_seed(spread)
    terms = torch.randn(5000, dtype=torch.float64, generator=generator).square()
    terms *= 10.0 ** (-2 * spread * torch.rand(5000, dtype=torch.float64, generator=generator))
    expected = math.fsum(terms.tolist())
    for cut in (0, 1, 100, 2500, 4999):
        parts = [partials(condensed(part)) for part in (terms[:cut], terms[cut:])]
        assert total(part for found in parts for part in found) == expected


def test_subnormal_terms() -> None:
    terms = [5e-324] * 1000 + [1.0] + [2.5e-323] * 1000
    assert condensed(vector(terms)) == [1.0, 6000 * 5e-324]


def test_short_ones_stay_as_they_are() -> None:
    assert condensed(vector([1.0, 1e-30])) == [1.0, 1e-30]
    assert len(condensed(torch.ones(SHORT, dtype=torch.float64))) == SHORT
    assert condensed(torch.ones(SHORT + 1, dtype=torch.float64)) == [SHORT + 1.0]
    assert condensed(torch.zeros(SHORT + 1, dtype=torch.float64)) == []


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, 1e308])
def test_odd_ones_stay_as_they_are(odd: float) -> None:
    """fsum computes their sum: it does not overflow while the sum is finite."""
    terms = [1.0] * 1000 + [odd]
    assert str(condensed(vector(terms))) == str(terms)
