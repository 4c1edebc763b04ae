"""How the figures of a step read, and which of them a narrow terminal keeps."""

from __future__ import annotations

import dataclasses

import pytest

from pipeworker.session.show.figures import (
    GAP,
    Figure,
    Pace,
    Worth,
    clock,
    evaluated,
    figures,
    fitting,
    number,
)
from pipeworker.wire.messages.evaluation import Evaluation
from pipeworker.wire.messages.step import StepResult

ROW = StepResult(
    step=12,
    loss=0.75,
    samples=32,
    seconds=0.5,
    samples_per_second=64.0,
    grad_norm=1.5,
    lr=3e-4,
    bubble=0.25,
    epoch=2,
)


def line(width: int, *, total: int | None = 100, verbose: bool = False) -> str:
    found = figures(ROW, total, "0:44 left", verbose=verbose)
    return GAP.join(figure.text for figure in fitting(found, width))


def test_the_figures_of_a_step() -> None:
    short = "step 12/100  loss 0.7500  lr 0.0003  64.0 samples/s  bubble 25.0%"
    assert line(200) == f"{short}  0:44 left"
    assert line(200, total=None).startswith("step 12  loss")
    assert line(200, verbose=True) == f"{short}  gradient norm 1.5000  epoch 2  0:44 left"
    scaled = figures(dataclasses.replace(ROW, loss_scale=1024.0), None, verbose=True)
    assert scaled[-1].text == "loss scale 1024"


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    seen = [line(width) for width in (200, 76, 75, 62, 51, 50, 34, 33, 22, 1)]
    assert seen == [
        "step 12/100  loss 0.7500  lr 0.0003  64.0 samples/s  bubble 25.0%  0:44 left",
        "step 12/100  loss 0.7500  lr 0.0003  64.0 samples/s  bubble 25.0%  0:44 left",
        "step 12/100  loss 0.7500  lr 0.0003  64.0 samples/s  0:44 left",
        "step 12/100  loss 0.7500  lr 0.0003  64.0 samples/s  0:44 left",
        "step 12/100  loss 0.7500  64.0 samples/s  0:44 left",
        "step 12/100  loss 0.7500  0:44 left",
        "step 12/100  loss 0.7500",
        "step 12/100  loss 0.7500",
        "step 12/100",
        "step 12/100",
    ]


def test_what_fits_is_as_wide_as_it_may_be() -> None:
    found = [Figure("abc", Worth.STEP), Figure("de", Worth.LOSS)]
    assert fitting(found, 7) == found
    assert fitting(found, 6) == found[:1]
    assert fitting([], 3) == []


def test_an_evaluation_is_a_line_of_its_own() -> None:
    said = Evaluation(20, 0.5, ("accuracy",), (0.75,))
    assert evaluated(said) == "evaluation after step 20  loss 0.5000  accuracy 0.7500"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12.3456789, "12.3457"),
        (0.001, "0.0010"),
        (0.00012345, "1.234e-04"),
        (-0.0001, "-1.000e-04"),
        (0.0, "0.0000"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_small_number_keeps_its_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0:00"), (62.0, "1:02"), (3723.0, "1:02:03"), (360000.0, "100:00:00")],
)
def test_a_time(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_what_is_left_is_told_by_the_last_steps() -> None:
    pace = Pace(100)
    assert pace.left(0.0) is None
    pace.seen(1, 10.0)  # the start is no step
    assert pace.left(10.0) is None
    pace.seen(2, 12.0)
    assert pace.left(12.0) == 98 * 2
    assert pace.left(13.0) == 98 * 2 - 1
    for step in range(3, 80):
        pace.seen(step, 12.0 + step)
    assert pace.left(12.0 + 79) == pytest.approx(21)  # steps of long ago were slower
    assert pace.left(1000.0) == 0.0


def test_nobody_knows_what_is_left_of_data_that_may_end() -> None:
    pace = Pace(None)
    for step in range(1, 4):
        pace.seen(step, float(step))
    assert pace.left(4.0) is None
