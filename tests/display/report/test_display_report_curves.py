"""Curves of a run: few points stand for many steps, and no peak is lost."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeworker.display.report.curves import MOST_POINTS, Curve

NUMBERS = st.floats(-1e30, 1e30, allow_nan=False)


def test_a_peak_of_one_step_of_a_hundred_thousand_is_seen() -> None:
    values = [1.0] * 100_000
    values[54_321] = 50.0
    curve = Curve.of("loss", range(1, 100_001), values)
    assert curve is not None
    assert len(curve.steps) <= MOST_POINTS
    assert curve.steps[-1] == 100_000
    assert max(curve.high) == 50.0
    assert min(curve.low) == 1.0
    assert sum(curve.mean) / len(curve.mean) == pytest.approx(sum(values) / len(values))


def test_few_steps_are_points_of_their_own() -> None:
    curve = Curve.of("loss", [1, 2, 5], [3.0, math.nan, 1.0], {2: 2.5, 3: math.inf})
    assert curve is not None
    assert (curve.steps, curve.mean) == ([1, 5], [3.0, 1.0])
    assert curve.low == curve.mean == curve.high
    assert curve.others == {2: 2.5}


def test_a_figure_without_a_number_has_no_curve() -> None:
    assert Curve.of("gradient norm", [1, 2], [math.nan, math.inf]) is None
    assert Curve.of("loss", [], []) is None


@example([5e-324], 0)
@given(st.lists(NUMBERS, min_size=1, max_size=30), st.integers(0, 1 << 40))
def test_any_curve_is_drawn_within_its_picture(values: list[float], first: int) -> None:
    curve = Curve.of("loss & more", range(first, first + len(values)), values, {first: values[0]})
    assert curve is not None
    picture = ElementTree.fromstring(curve.svg())
    width, height = map(float, picture.attrib["viewBox"].split()[2:])
    for path in picture.iter("{http://www.w3.org/2000/svg}path"):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height
