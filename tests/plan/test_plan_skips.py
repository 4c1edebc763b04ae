"""Skips: which stash belongs to which pop, and which skips lead between stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeworker.errors import ScheduleError, SkipError
from pipeworker.facts.connections import Skip
from pipeworker.plan.actions import Kind, parse_actions
from pipeworker.plan.check import check
from pipeworker.plan.schedule import Schedule, edges
from pipeworker.plan.simulate import simulate
from pipeworker.plan.skips import between_stages, match, pairs
from pipeworker.plan.text import parse
from support.pure.orders import build

CLASSES = ("A", "B", "C", "D")
PAIRS = ((0, 1), (0, 3), (1, 2))


def events(*by_layer: str) -> list[list[tuple[str, str]]]:
    """Read ``"+x -y"``: a layer that stashes x and pops y."""
    kinds = {"+": "stash", "-": "pop"}
    return [[(kinds[word[0]], word[1:]) for word in done.split()] for done in by_layer]


def test_stashes_are_matched_with_pops() -> None:
    found = match(events("+x +y", "-y +z", "", "-x -z"), CLASSES)
    assert found == (Skip(0, 1, "y"), Skip(0, 3, "x"), Skip(1, 3, "z"))


def test_a_name_may_be_stashed_again_once_popped() -> None:
    found = match(events("+x", "-x +x", "+y -y", "-x"), CLASSES)
    assert found == (Skip(0, 1, "x"), Skip(1, 3, "x"), Skip(2, 2, "y"))


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (("", "-x"), r"layer 1 \(B\) pops 'x', which no layer before it stashes"),
        (("+x", "-x", "-x"), r"layer 2 \(C\) pops 'x', which layer 1 \(B\) has popped already"),
        (("+x", "", ""), r"layer 0 \(A\) stashes 'x', which no layer after it pops"),
        (("+x", "+x"), r"layer 1 \(B\) stashes 'x', which layer 0 \(A\) has stashed and no"),
        (("-x", "+x"), r"layer 0 \(A\) pops 'x', which no layer before"),
    ],
)
def test_a_mismatch_is_named(done: tuple[str, ...], message: str) -> None:
    with pytest.raises(SkipError, match=message):
        match(events(*done), CLASSES)


def test_between_stages() -> None:
    skips = (Skip(0, 3, "x"), Skip(1, 2, "y"), Skip(0, 1, "z"), Skip(0, 2, "w"))
    assert between_stages(skips, [(0, 2), (2, 4)]) == (
        Skip(0, 0, "z"),
        Skip(0, 1, "w"),
        Skip(0, 1, "x"),
        Skip(0, 1, "y"),
    )
    assert pairs(between_stages(skips, [(0, 2), (2, 4)])) == ((0, 1),)
    assert pairs(between_stages(skips, [(0, 4)])) == ()


@pytest.mark.parametrize("recompute", ["always", "never", "except_first"])
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_a_schedule_with_skips_is_legal_and_round_trips(recompute: str, microbatches: int) -> None:
    built = build("gpipe", 4, microbatches, recompute, PAIRS)
    check(built)
    assert parse(str(built)) == built
    names = [str(edge) for edge in edges(built) if "skip" in edge.payload]
    assert names == [
        "0>1/skip",
        "0>3/skip",
        "1>0/skip-gradient",
        "1>2/skip",
        "2>1/skip-gradient",
        "3>0/skip-gradient",
    ]


def test_long_skips_do_not_stall_the_fill() -> None:
    """The makespan equals that of the schedule without skips, however long they are."""
    plain = simulate(build("gpipe", 12, 24, "never")).makespan
    assert simulate(build("gpipe", 12, 24, "never", ((0, 11), (1, 10)))).makespan == plain


def without(schedule: Schedule, worker: int, word: str) -> Schedule:
    (action,) = parse_actions(word)
    workers = list(schedule.workers)
    workers[worker] = tuple(a for a in workers[worker] if a != action)
    return replace(schedule, workers=tuple(workers))


@pytest.mark.parametrize("word", ["0>S1@3", "3<S1@0", "3>H1@0", "0<H1@3"])
def test_a_missing_send_or_receive_is_found(word: str) -> None:
    built = build("gpipe", 4, 2, "never", PAIRS)
    with pytest.raises(ScheduleError, match=rf"worker {word[0]}: .*{word[1:]}"):
        check(without(built, int(word[0]), word))


def test_a_skip_must_belong_to_the_schedule() -> None:
    built = build("gpipe", 4, 2, "never", PAIRS)
    with pytest.raises(ScheduleError, match="1>S0@2 has nothing at its other end"):
        check(replace(built, skips=PAIRS[:-1]))
    with pytest.raises(ScheduleError, match="does not lead to a later stage"):
        check(replace(built, skips=((3, 1),)))


def test_a_skip_arrives_before_its_forward() -> None:
    built = build("gpipe", 4, 2, "always", PAIRS)
    kinds = [(a.kind, a.microbatch, a.peer) for a in built.workers[3]]
    assert kinds.index((Kind.RECEIVE_SKIP, 1, 0)) < kinds.index((Kind.FORWARD, 1, -1))
    assert kinds.index((Kind.BACKWARD, 1, -1)) < kinds.index((Kind.SEND_SKIP_GRADIENT, 1, 0))
