"""Tied weights: their places, and the stages that exchange gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipeworker.errors import ScheduleError, UsageError
from pipeworker.facts.connections import Tie
from pipeworker.plan.actions import parse_actions
from pipeworker.plan.check import check
from pipeworker.plan.text import parse
from pipeworker.plan.ties import check_declared, declared, pairs, placed
from support.pure.orders import build

RANGES = [(0, 2), (2, 4), (4, 5)]


def test_declared_ties_are_in_model_order() -> None:
    found = declared([("10.weight", "2.weight", "2.again"), ("0.a.b", "3.c")], 11)
    assert found == (Tie(("2.again", "2.weight", "10.weight")), Tie(("0.a.b", "3.c")))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([("0.weight",)], "make it a tuple of two or more parameter names"),
        ([("0.weight", "0.weight")], "make it a tuple of two or more"),
        (["0.weight"], "make it a tuple"),
        ([(1, 2)], "make it a tuple"),
        ([("0.weight", "5.weight")], "of 5 layers"),
        ([("0.weight", "weight")], "tied: names 'weight'"),
        ([("0.weight", "-1.weight")], "tied: names '-1.weight'"),
        ([("0.weight", "1.")], "tied: names '1.'"),
        ([("0.a", "1.a"), ("0.a", "2.a")], "tied: names '0.a' twice"),
    ],
)
def test_mistakes_are_named(groups: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        declared(groups, 5)


def test_layers_that_were_built_with_one_parameter_are_tied_or_an_error() -> None:
    groups = [{"10.weight", "2.weight"}, {"2.bias"}, {"2.a", "3.a"}]
    ties = [Tie(("2.weight", "10.weight", "11.weight"), (0, 1, 1)), Tie(("2.a", "3.a"), (0, 0))]
    check_declared(groups, ties)
    with pytest.raises(
        UsageError, match=r"layers 2 and 10: .* tied = \[\('2.weight', '10.weight'\)\]"
    ):
        check_declared(groups, ties[1:])
    many = [(f"0.{index}", f"1.{index}") for index in range(5)]
    with pytest.raises(UsageError, match=r"layers 0 and 1: .*\('0.3', '1.3'\), …\], or build"):
        check_declared(many, ())


def test_stages_with_places_of_a_weight_exchange_gradients() -> None:
    ties = placed([Tie(("0.w", "1.w", "4.w")), Tie(("2.w", "4.v"))], RANGES)
    assert [tie.stages for tie in ties] == [(0, 0, 2), (1, 2)]
    assert pairs(ties) == ((0, 2), (1, 2), (2, 0), (2, 1))
    assert pairs(placed([Tie(("0.w", "2.w", "4.w"))], RANGES)) == (
        *((0, 1), (0, 2), (1, 0)),
        *((1, 2), (2, 0), (2, 1)),
    )


def test_a_stage_with_all_places_of_a_weight_is_paired_with_itself() -> None:
    """It adds up gradients and exchanges none."""
    assert pairs(placed([Tie(("2.w", "3.w"))], RANGES)) == ((1, 1),)


@pytest.mark.parametrize("microbatches", [1, 5])
def test_the_exchange_is_checked(microbatches: int) -> None:
    built = build("gpipe", 3, microbatches, "always", (), ((0, 2), (1, 1), (2, 0)))
    check(built)
    assert parse(str(built)) == built
    assert [str(a) for a in built.workers[0][-3:]] == ["0>TIE0@2", "0<TIE0@2", "0TIE0"]
    assert str(built.workers[1][-1]) == "1TIE0"
    first, second, third = built.workers
    for index, what in ((-1, "2TIE0"), (-2, "2<TIE0@0"), (-3, "2>TIE0@0")):
        lacking = tuple(a for a in third if a != third[index])
        with pytest.raises(ScheduleError, match=rf"worker 2: .*{what}"):
            check(replace(built, workers=(first, second, lacking)))
    with pytest.raises(ScheduleError, match="worker 1: 1TIE0 is missing"):
        check(replace(built, workers=(first, second[:-1], third)))
    with pytest.raises(ScheduleError, match="0>TIE0@2 has nothing at its other end"):
        check(replace(built, ties=()))
    with pytest.raises(ScheduleError, match="tie 0>2 has no 2>0"):
        check(replace(built, ties=((0, 2),)))


@pytest.mark.parametrize("word", ["0>TIE0@1", "0TIE0"])
def test_the_exchange_comes_after_the_last_backward(word: str) -> None:
    built = build("gpipe", 2, 2, "never", (), ((0, 1), (1, 0)))
    (early,) = parse_actions(word)
    first = tuple(a for a in built.workers[0] if a != early)
    with pytest.raises(ScheduleError, match=f"{word} comes before the last backward"):
        check(replace(built, workers=((early, *first), built.workers[1])))


def test_tied_gradients_are_added_when_all_have_arrived() -> None:
    built = build("gpipe", 2, 2, "never", (), ((0, 1), (1, 0)))
    *rest, receive, add = built.workers[0]
    with pytest.raises(ScheduleError, match="0TIE0 comes before its 0<TIE0@1"):
        check(replace(built, workers=((*rest, add, receive), built.workers[1])))
