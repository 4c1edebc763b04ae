"""The figures of a step, and their choice on a narrow terminal."""

from __future__ import annotations

import dataclasses

import pytest

from pipeworker.display.figures import (
    GAP,
    Figure,
    Pace,
    Rank,
    evaluating,
    evaluation_line,
    figures,
    fitting,
)
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire.lines import Activity

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


def test_the_memory_is_of_the_verbose_figures() -> None:
    memory = (5 << 20, 0)
    found = figures(ROW, None, "0:44 left", verbose=True, memory=memory)
    assert [figure.text for figure in found][-2:] == ["memory 5, ? MB", "0:44 left"]
    assert figures(ROW, None, memory=memory) == figures(ROW, None)


@pytest.mark.parametrize(
    ("activity", "text"),
    [
        (Activity(), ""),
        (Activity((1,), 0), "evaluating 0"),
        (Activity((1,), 12), "evaluating 12"),
        (Activity((), 12, 60), "evaluating 12/60"),
    ],
)
def test_the_mini_batches_of_an_evaluation(activity: Activity, text: str) -> None:
    assert evaluating(activity) == text


def test_a_narrow_terminal_shows_the_most_important_figures() -> None:
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


def test_fitting_uses_the_whole_width() -> None:
    found = [Figure("abc", Rank.STEP), Figure("de", Rank.LOSS)]
    assert fitting(found, 7) == found
    assert fitting(found, 6) == found[:1]
    assert fitting([], 3) == []


def test_evaluation_line() -> None:
    evaluation = Evaluation(20, 0.5, ("accuracy",), (0.75,))
    assert evaluation_line(evaluation) == "evaluation after step 20  loss 0.5000  accuracy 0.7500"


def test_remaining_time_follows_the_most_recent_steps() -> None:
    pace = Pace(100)
    assert pace.remaining(0.0) is None
    pace.add(1, 10.0)  # not a whole step: it includes the start
    assert pace.remaining(10.0) is None
    pace.add(2, 12.0)
    assert pace.remaining(12.0) == 98 * 2
    assert pace.remaining(13.0) == 98 * 2 - 1
    for step in range(3, 80):
        pace.add(step, 12.0 + step)
    assert pace.remaining(12.0 + 79) == pytest.approx(21)  # the earliest steps no longer count
    assert pace.remaining(1000.0) == 0.0


def test_remaining_time_is_unknown_without_a_total() -> None:
    pace = Pace(None)
    for step in range(1, 4):
        pace.add(step, float(step))
    assert pace.remaining(4.0) is None
