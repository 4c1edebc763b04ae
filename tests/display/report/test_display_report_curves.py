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
SVG = "{http://www.w3.org/2000/svg}"


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
    for path in picture.iter(f"{SVG}path"):
        for x, y in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= width
            assert 0 <= float(y) <= height


def test_a_picture_has_the_curve_its_band_its_dots_and_numbers_at_its_axes() -> None:
    curve = Curve("loss", [10, 20], [1.0, 2.0], [2.0, 3.0], [3.0, 4.0], {10: 1.5, 21: 2.0}, "eval")
    picture = ElementTree.fromstring(curve.svg())
    left, right = (float(picture.attrib[f"data-{side}"]) for side in ("left", "right"))
    drawn = {
        path.attrib["class"]: re.findall(r"[\d.]+", path.attrib["d"])
        for path in picture.iter(f"{SVG}path")
    }
    top, bottom = float(drawn["band"][3]), float(drawn["band"][7])
    assert bottom - top > 100

    def at(step: float, value: float) -> list[str]:
        x, y = left + (step - 10) / 10 * (right - left), top + (4 - value) / 3 * (bottom - top)
        return [f"{x:.1f}", f"{y:.1f}"]

    assert drawn["band"] == [*at(10, 3), *at(20, 4), *at(20, 2), *at(10, 1)]
    assert drawn["mean"] == [*at(10, 2), *at(20, 3)]
    assert [[dot.attrib["cx"], dot.attrib["cy"]] for dot in picture.iter(f"{SVG}circle")] == [
        at(10, 1.5)
    ]
    labels = {label.text: label.attrib for label in picture.iter(f"{SVG}text")}
    assert [float(labels[str(n)]["y"]) for n in (1, 2, 3, 4)] == pytest.approx(
        [float(at(10, n)[1]) + 4 for n in (1, 2, 3, 4)]
    )
    assert [labels[str(n)]["x"] for n in (10, 14, 20)] == [at(n, 1)[0] for n in (10, 14, 20)]
    assert (picture.findtext(f"{SVG}title"), picture.findtext(f".//{SVG}tspan")) == (
        "loss: 2.0000 at step 10, 3.0000 at step 20",
        "●",
    )


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (0.0, "-0.1 -0.05 0 0.05 0.1"),
        (5.0, "4.6 4.8 5 5.2 5.4"),
        (-3e9, "-3.2e+09 -3e+09 -2.8e+09"),
    ],
)
def test_a_flat_curve_is_in_the_middle(value: float, labels: str) -> None:
    curve = Curve.of("loss", [1, 2], [value, value])
    assert curve is not None
    picture = ElementTree.fromstring(curve.svg())
    _, *texts = [text.text for text in picture.iter(f"{SVG}text")]
    assert texts == [*labels.split(), "1", "2"]
    assert not picture.findall(f"{SVG}path[@class='band']")
