"""Schedules as data: their text, their channels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import Edge, parse_actions
from pipeworker.plan.connect import connect, forward_only
from pipeworker.plan.orders import ORDERS
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import RECOMPUTE_MODES, recomputed
from pipeworker.plan.schedule import Pairs, Schedule, edges
from pipeworker.plan.text import parse
from support.pure.orders import build, fill_drain

PLACEMENTS = [
    Placement.identity(1),
    Placement.identity(4),
    Placement.looped(2, 2),
    Placement.looped(3, 2),
    Placement(((0, 3), (1, 2))),
    Placement(((1,), (0,))),
    Placement(((0, 1, 2, 3),)),
]

# Placements, skips and ties in their text.


def test_the_head_has_what_differs_from_the_default() -> None:
    v = Placement(((0, 3), (1, 2)))
    orders = fill_drain(v, 1)
    skips, ties = ((0, 2), (1, 2)), ((0, 2), (2, 0))
    made = connect("vee", 1, v, orders, skips, ties)
    assert str(made).splitlines() == [
        "vee stages=4 microbatches=1 placement=0,3/1,2 skips=0>2,1>2 ties=0>2,2>0",
        "0: 0F0 0>A0 0>S0@2 3<A0 3F0 0L0 3B0 3>G0 0<G0 0<H0@2 0B0 0>TIE0@2 0<TIE0@2 0TIE0",
        "1: 1<A0 1F0 2<S0@0 2F0 2>A0 2<G0 2B0 2>H0@0 1B0 1>G0 2>TIE0@0 2<TIE0@0 2TIE0",
    ]
    assert parse(str(made)) == made


def test_the_head_of_a_forward_only_schedule() -> None:
    made = forward_only(Placement.identity(2), ((0, 1),))
    assert str(made).splitlines() == [
        "evaluation stages=2 microbatches=1 skips=0>1 forward-only",
        "0: 0F0 0>A0 0>T0@1 0>S0@1",
        "1: 1<A0 1<T0@0 1<S0@0 1F0",
    ]
    assert parse(str(made)) == made
    assert parse(str(made)).forward_only


def pairs(stages: int) -> st.SearchStrategy[Pairs]:
    """Draw pairs of stages (source, target), source first."""
    several = [(a, b) for b in range(stages) for a in range(b)]
    return (
        st.sets(st.sampled_from(several)).map(lambda found: tuple(sorted(found)))
        if several
        else st.just(())
    )


@given(
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 12),
    mode=st.sampled_from(RECOMPUTE_MODES),
    only=st.booleans(),
    data=st.data(),
)
def test_text_round_trips(
    placement: Placement, microbatches: int, mode: str, only: bool, data: st.DataObject
) -> None:
    skips, some = data.draw(pairs(placement.stages)), data.draw(pairs(placement.stages))
    ties = tuple(sorted({*some, *((b, a) for a, b in some)}))
    if only:
        schedule = forward_only(placement, skips)
    else:
        orders = fill_drain(placement, microbatches, mode)
        schedule = connect("any", microbatches, placement, orders, skips, ties)
    assert parse(str(schedule)) == schedule
    assert parse(f"\n  {schedule}\n\n") == schedule


@given(
    name=st.sampled_from(sorted(ORDERS)),
    workers=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    mode=st.sampled_from(RECOMPUTE_MODES),
)
def test_text_of_every_named_schedule_round_trips(
    name: str, workers: int, microbatches: int, mode: str
) -> None:
    schedule = build(name, workers, microbatches, mode)
    assert parse(str(schedule)) == schedule
    for actions in schedule.workers:
        assert parse_actions(" ".join(map(str, actions))) == actions


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("", "not a schedule's head"),
        ("gpipe stages=1", "not a schedule's head"),
        ("gpipe stages=x microbatches=1\n0: 0F0", "not a schedule's head"),
        ("gpipe stages=0 microbatches=1\n", "not a schedule's head"),
        ("gpipe stages=1 microbatches=0\n0: 0L0", "not a schedule's head"),
        ("gpipe stages=1 microbatches=1 skips=0\n0: 0F0", "not a schedule's head"),
        ("gpipe stages=1 microbatches=1 ties=0>\n0: 0F0", "not a schedule's head"),
        ("gpipe stages=1 microbatches=1 ties=0>1 skips=0>1\n0: 0F0", "not a schedule's head"),
        ("gpipe stages=1 microbatches=1 backwards-only\n0: 0F0", "not a schedule's head"),
        ("gpipe stages=1 microbatches=1 placement=a\n0: 0F0", "not a schedule's head"),
        ("gpipe stages=1 microbatches=1\n1: 0F0", "expected the line of worker 0"),
        ("gpipe stages=1 microbatches=1\n0F0 0B0", "expected the line of worker 0"),
        ("gpipe stages=2 microbatches=1\n1: 0F0\n0: 1F0", "expected the line of worker 0"),
        ("gpipe stages=2 microbatches=1\n0: 0F0 0B0", "has 2 workers, but 1 line follows"),
        ("g stages=2 microbatches=1 placement=0,1\n0: 0F0\n1: 1F0", "has 1 worker, but 2"),
        ("g stages=2 microbatches=1 placement=0/2\n0:\n1:", "does not hold each of 2 stages once"),
        ("g stages=2 microbatches=1 placement=0,1/1\n0:\n1:", "does not hold each of 2 stages"),
        ("g stages=2 microbatches=1 placement=0\n0:", "does not hold each of 2 stages once"),
        ("gpipe stages=1 microbatches=1\n0: 0F0 0X1", "'0X1' is not an action"),
        ("gpipe stages=1 microbatches=1\n0: F0", "'F0' is not an action"),
    ],
)
def test_malformed_text_is_rejected(broken: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        parse(broken)


LINES = st.lists(st.sampled_from(["0F0", "1F0", "0I1", "1>G0", "0>A0@1"]), max_size=4).map(" ".join)


@given(
    head=st.sampled_from(["", "placement=1/0", "skips=0>1 frozen=0 forward-only"]),
    lines=st.tuples(LINES, LINES),
    place=st.integers(0, 80),
    inserted=st.just("")
    | st.text(alphabet="placementskiptfrwd-only=>,/FRBIWLAGT<>@0123 :\n", max_size=40),
)
def test_any_text_is_read_as_a_schedule_or_rejected(
    head: str, lines: tuple[str, str], place: int, inserted: str
) -> None:
    """About one text in three is a schedule."""
    text = f"any stages=2 microbatches=1 {head}\n0: {lines[0]}\n1: {lines[1]}"
    try:
        schedule = parse(text[:place] + inserted + text[place:])
    except ScheduleError:
        return
    assert parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("mode", "again"),
    [("auto", [0, 1, 2]), ("always", [0, 1, 2]), ("except_first", [1, 2]), ("never", [])],
)
def test_recompute_modes(mode: str, again: list[int]) -> None:
    assert list(recomputed(mode, 3)) == again


def test_an_unknown_recompute_mode_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ScheduleError, match="'sometimes': choose from auto, always"):
        recomputed("sometimes", 1)


# Channels.


def shown(schedule: Schedule) -> list[str]:
    return [str(edge) for edge in edges(schedule)]


def test_edges_connect_neighbours_and_both_ends() -> None:
    found = shown(build("gpipe", 3, 2, "never"))
    assert found == [
        "0>1/activation",
        "0>2/target",
        "1>0/gradient",
        "1>2/activation",
        "2>1/gradient",
    ]
    assert [str(Edge.parse(edge)) for edge in found] == found
    assert shown(build("gpipe", 2, 1, "never")) == [
        "0>1/activation",
        "0>1/target",
        "1>0/gradient",
    ]


def test_stages_of_one_worker_have_no_channel() -> None:
    """In a V-shaped placement one worker holds both ends, another the two stages at the turn."""
    v = Placement(((0, 3), (1, 2)))
    assert shown(connect("vee", 2, v, fill_drain(v, 2))) == [
        "0>1/activation",
        "1>0/gradient",
        "2>3/activation",
        "3>2/gradient",
    ]
    alone = Placement(((0, 1, 2),))
    assert (
        shown(connect("alone", 2, alone, fill_drain(alone, 2), ((0, 2),), ((0, 2), (2, 0)))) == []
    )
