"""Which stash meets which pop, and what crosses between stages."""

from __future__ import annotations

import pytest

from pipeworker.errors import ScheduleError, SkipError
from pipeworker.plan.proof import prove
from pipeworker.plan.schedule import Kind, Schedule, build, edges, parse, parse_actions
from pipeworker.plan.skips import Skip, between_stages, match, pairs

CLASSES = ("A", "B", "C", "D")
PAIRS = ((0, 1), (0, 3), (1, 2))


def events(*by_layer: str) -> list[list[tuple[str, str]]]:
    """``"+x -y"``: a layer that stashes x and pops y."""
    kinds = {"+": "stash", "-": "pop"}
    return [[(kinds[word[0]], word[1:]) for word in done.split()] for done in by_layer]


def test_stashes_meet_their_pops() -> None:
    found = match(events("+x +y", "-y +z", "", "-x -z"), CLASSES)
    assert found == (Skip(0, 1, "y"), Skip(0, 3, "x"), Skip(1, 3, "z"))


def test_a_name_is_free_again_once_popped() -> None:
    found = match(events("+x", "-x +x", "+y -y", "-x"), CLASSES)
    assert found == (Skip(0, 1, "x"), Skip(1, 3, "x"), Skip(2, 2, "y"))


@pytest.mark.parametrize(
    ("done", "message"),
    [
        (("", "-x"), r"layer 1 \(B\) pops 'x', which no layer before it stashes"),
        (("+x", "-x", "-x"), r"layer 2 \(C\) pops 'x', which layer 1 \(B\) has popped already"),
        (("+x", "", ""), r"layer 0 \(A\) stashes 'x', which no layer after it pops"),
        (("+x", "+x"), r"layer 1 \(B\) stashes 'x', which layer 0 \(A\) has stashed and nobody"),
        (("-x", "+x"), r"layer 0 \(A\) pops 'x', which no layer before"),
    ],
)
def test_what_does_not_match_is_named(done: tuple[str, ...], message: str) -> None:
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
def test_a_schedule_with_skips_is_proven_and_reads_as_text(
    recompute: str, microbatches: int
) -> None:
    built = build("gpipe", 4, microbatches, recompute, PAIRS)
    prove(built)
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


def test_long_skips_do_not_hold_up_the_fill() -> None:
    """The makespan is that of the schedule without skips, whatever they span."""
    plain = prove(build("gpipe", 12, 24, "never")).makespan
    assert prove(build("gpipe", 12, 24, "never", ((0, 11), (1, 10)))).makespan == plain


def without(schedule: Schedule, stage: int, word: str) -> Schedule:
    (action,) = parse_actions(word)
    stages = list(schedule.stages)
    stages[stage] = tuple(a for a in stages[stage] if a != action)
    return Schedule(schedule.name, schedule.microbatches, tuple(stages), schedule.skips)


@pytest.mark.parametrize(
    ("stage", "word"), [(0, ">S1@3"), (3, "<S1@0"), (3, ">H1@0"), (0, "<H1@3")]
)
def test_a_missing_send_or_receive_is_found(stage: int, word: str) -> None:
    built = build("gpipe", 4, 2, "never", PAIRS)
    with pytest.raises(ScheduleError, match=rf"stage {stage}"):
        prove(without(built, stage, word))


def test_a_skip_must_belong_to_the_schedule() -> None:
    built = build("gpipe", 4, 2, "never", PAIRS)
    with pytest.raises(ScheduleError, match="belongs to no skip connection"):
        prove(Schedule(built.name, 2, built.stages, PAIRS[:-1]))
    with pytest.raises(ScheduleError, match="does not lead to a later stage"):
        prove(Schedule(built.name, 2, built.stages, ((3, 1),)))


@pytest.mark.parametrize("word", ["F0@1", ">S0", "<S0@", ">A0@2"])
def test_only_skips_name_a_stage(word: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_actions(word)


def test_a_skip_arrives_before_its_forward() -> None:
    built = build("gpipe", 4, 2, "always", PAIRS)
    kinds = [(a.kind, a.microbatch, a.peer) for a in built.stages[3]]
    assert kinds.index((Kind.RECEIVE_SKIP, 1, 0)) < kinds.index((Kind.FORWARD, 1, -1))
    assert kinds.index((Kind.BACKWARD, 1, -1)) < kinds.index((Kind.SEND_SKIP_GRADIENT, 1, 0))
