"""Which parameters are one, and which stages tell each other."""

from __future__ import annotations

from typing import Any

import pytest

from pipeworker.errors import ScheduleError, UsageError
from pipeworker.plan.proof import prove
from pipeworker.plan.schedule import Schedule, build, parse, parse_actions
from pipeworker.plan.ties import Tie, declared, pairs, placed

RANGES = [(0, 2), (2, 4), (4, 5)]


def test_declared_ties_are_in_model_order() -> None:
    found = declared([("10.weight", "2.weight", "2.again"), ("0.a.b", "3.c")], 11)
    assert found == (Tie(("2.again", "2.weight", "10.weight")), Tie(("0.a.b", "3.c")))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("0.weight",)], "each must be a tuple of two or more parameter names"),
        ([("0.weight", "0.weight")], "each must be a tuple of two or more"),
        (["0.weight"], "each must be a tuple"),
        ([(1, 2)], "each must be a tuple"),
        ([("0.weight", "5.weight")], "there are 5 layers"),
        ([("0.weight", "weight")], "tied names 'weight'"),
        ([("0.weight", "-1.weight")], "tied names '-1.weight'"),
        ([("0.weight", "1.")], "tied names '1.'"),
        ([("0.a", "1.a"), ("0.a", "2.a")], "tied names '0.a' twice"),
    ],
)
def test_mistakes_are_named(groups: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(groups, 5)


def test_stages_that_share_tell_each_other() -> None:
    ties = placed([Tie(("0.w", "1.w", "4.w")), Tie(("2.w", "3.w"))], RANGES)
    assert [tie.stages for tie in ties] == [(0, 0, 2), (1, 1)]
    assert pairs(ties) == ((0, 2), (2, 0))
    assert pairs(placed([Tie(("0.w", "2.w", "4.w"))], RANGES)) == (
        *((0, 1), (0, 2), (1, 0)),
        *((1, 2), (2, 0), (2, 1)),
    )


@pytest.mark.parametrize("microbatches", [1, 5])
def test_the_exchange_is_proven(microbatches: int) -> None:
    ties = ((0, 2), (2, 0))
    built = build("gpipe", 3, microbatches, "always", (), ties)
    prove(built)
    assert parse(str(built)) == built
    assert str(built.stages[0][-2]) == ">W0@2"
    broken = list(built.stages)
    broken[2] = broken[2][:-1]
    with pytest.raises(ScheduleError, match="stage 2: <W0@0 is missing"):
        prove(Schedule("gpipe", microbatches, tuple(broken), (), ties))
    with pytest.raises(ScheduleError, match="belongs to no tied weights"):
        prove(Schedule("gpipe", microbatches, built.stages))
    with pytest.raises(ScheduleError, match="tie 0>2 has no 2>0"):
        prove(Schedule("gpipe", microbatches, built.stages, (), ((0, 2),)))


def test_the_exchange_comes_after_the_last_backward() -> None:
    built = build("gpipe", 2, 2, "never", (), ((0, 1), (1, 0)))
    (early,) = parse_actions(">W0@1")
    first = tuple(a for a in built.stages[0] if a != early)
    with pytest.raises(ScheduleError, match="comes before the last backward"):
        prove(Schedule("gpipe", 2, ((early, *first), built.stages[1]), (), built.ties))
