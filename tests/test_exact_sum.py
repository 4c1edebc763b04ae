"""Exact sums: equal for any grouping of their terms."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeworker.exact_sum import partials, total

TINY = 5e-324
HUGE = sys.float_info.max

# Of any sign, with room for a sum; and as squares are, up to the largest.
signed = st.floats(-1e300, 1e300)
squares = st.floats(0, HUGE)
groups = st.lists(st.lists(signed)) | st.lists(st.lists(squares))


def bits(value: float) -> str:
    return value.hex()


@given(groups)
@example([[1.0, TINY, -1.0], [TINY]])
@example([[1e300, 1e-300], [-1e300], [], [1e-300, TINY]])
@example([[0.0, -0.0], [-0.0]])
@example([[HUGE], [HUGE]])
def test_the_sum_of_the_partials_of_any_groups_is_that_of_all_terms(
    grouped: list[list[float]],
) -> None:
    together = total(term for group in grouped for term in group)
    apart = total(part for group in grouped for part in partials(group))
    assert bits(apart) == bits(together)


@given(st.lists(signed))
def test_partials_have_the_exact_sum(terms: list[float]) -> None:
    found = partials(terms)
    assert sum(map(Fraction, found)) == sum(map(Fraction, terms))
    assert all(abs(b) <= math.ulp(a) / 2 for a, b in pairwise(found))
    assert 0.0 not in found
    assert len(found) <= 40
    assert found[:1] == tuple(filter(None, [math.fsum(terms)]))


def test_there_are_at_most_forty_partials() -> None:
    """A sum with every second bit of the range is the worst case."""
    terms = [math.ldexp(1.0, exponent) for exponent in range(-1074, 1023, 2)]
    assert 35 < len(partials(terms)) <= 40
    spread = [math.ldexp(1.0, exponent) for exponent in range(-1074, 1024, 54)]
    assert len(partials(spread)) == len(spread) == 39


def test_fifty_thousand_terms_have_few_partials() -> None:
    terms = [(1.0 + n * 1e-4) ** -9 for n in range(50_000)]
    assert len(partials(terms)) <= 4
    assert total(partials(terms)) == math.fsum(terms)


@pytest.mark.parametrize(
    ("terms", "expected"),
    [
        ((math.inf,), "inf"),
        ((-math.inf, 1.0), "-inf"),
        ((math.nan, 1.0), "nan"),
        ((math.inf, -math.inf), "nan"),
        ((math.inf, math.nan), "nan"),
        ((HUGE, HUGE), "inf"),
        ((HUGE, HUGE, math.inf), "inf"),
        ((HUGE, HUGE, math.nan), "nan"),
    ],
    ids=str,
)
def test_a_sum_that_is_not_finite_is_the_same_in_any_grouping(
    terms: tuple[float, ...], expected: str
) -> None:
    assert str(total(terms)) == expected
    for order in (terms, terms[::-1]):
        (only,) = partials(order)
        assert str(only) == expected
        assert str(total([*partials(order[:1]), *partials(order[1:])])) == expected


def test_no_terms_have_no_partials() -> None:
    assert partials([]) == partials([0.0, -0.0]) == partials([1.5, -1.5]) == ()
    assert bits(total([])) == bits(0.0)
