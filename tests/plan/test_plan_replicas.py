"""How replicas share a mini-batch, and the actions that add up their gradients."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan import orders
from pipeworker.plan.actions import RECEIVES as TAKES
from pipeworker.plan.actions import REPLICAS, SENDS, Action, Edge, Kind, Payload, edge_of
from pipeworker.plan.check import check
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Schedule, between, edges, parse
from pipeworker.plan.shares import block, sizes
from pipeworker.plan.simulate import simulate

V = Placement(((0, 3), (1, 2)), 2)
TIES = ((0, 2), (2, 0))


def gpipe(
    placement: Placement, microbatches: int, ties: tuple[tuple[int, int], ...] = ()
) -> Schedule:
    return orders.arrange("gpipe", placement, microbatches, "always", (), ties)


@given(count=st.integers(0, 50), parts=st.integers(1, 12))
def test_things_are_dealt_out_as_tensor_split_does(count: int, parts: int) -> None:
    pieces = torch.arange(count).tensor_split(parts)
    assert [list(block(count, parts, part)) for part in range(parts)] == [
        p.tolist() for p in pieces
    ]
    assert sizes(count, parts) == [len(piece) for piece in pieces]


def test_gradients_leave_behind_the_last_backward_and_come_back_at_the_end() -> None:
    schedule = gpipe(Placement.identity(2, 3), 2)
    assert str(schedule).splitlines() == [
        "gpipe stages=2 microbatches=2 replicas=3",
        "0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0R0 0<G0 0B0 0R1 0<G1 0B1 0SCATTER0 0SUM0 0GATHER0",
        "1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1R0 1B0 1>G0 1R1 1B1 1>G1 1SCATTER0 1SUM0 1GATHER0",
    ]


def test_of_several_stages_each_leaves_as_soon_as_it_can() -> None:
    """What another stage waits for goes first; what is taken waits for all backwards."""
    words = str(gpipe(V, 1)).splitlines()[1:]
    assert words[0].endswith(
        "3B0 3>G0 3SCATTER0 0R0 0<G0 0B0 0SCATTER0 3SUM0 0SUM0 3GATHER0 0GATHER0"
    )


def test_ties_come_behind_it() -> None:
    words = str(gpipe(Placement.identity(3, 2), 1, TIES)).splitlines()[1]
    assert words.endswith("0GATHER0 0>TIE0@2 0<TIE0@2 0TIE0")


@pytest.mark.parametrize("placement", [Placement.identity(3, 2), V, Placement.identity(1, 4)])
def test_a_replica_without_micro_batches_takes_part_in_it(placement: Placement) -> None:
    schedule = gpipe(placement, 0)
    check(schedule)
    kinds = {action.kind for actions in schedule.workers for action in actions}
    assert kinds == {Kind.LOAD, *REPLICAS}
    assert simulate(schedule).makespan == 0.0
    assert parse(str(schedule)) == schedule
    with pytest.raises(ScheduleError, match="at least one stage and one micro-batch"):
        gpipe(placement.copies(1), 0)
    with pytest.raises(ScheduleError, match="only one of several replicas may have no"):
        parse(str(schedule).replace(f" replicas={placement.replicas}", ""))


def test_text_names_the_replicas_of_a_channel() -> None:
    edge = Edge.between(1, 0, 2)
    assert str(edge) == "1>1/sum@0>2"
    assert Edge.parse(str(edge)) == edge
    assert (edge.payload, edge.origin, edge.goal) == (Payload.SUM, 0, 2)
    for wrong in ("1>1/sum@0", "1>1/sum@0>", "1>1/sum@a>b"):
        with pytest.raises(ScheduleError):
            Edge.parse(wrong)


def test_every_replica_is_connected_to_every_other_for_each_stage() -> None:
    found = between(Placement.identity(2, 3))
    assert len(found) == len({*found}) == 2 * 3 * 2
    assert list(found) == sorted(found)
    assert not between(Placement.identity(4))
    deals = between(Placement.identity(2, 3), deals=True)
    assert {str(edge) for edge in {*deals} - {*found}} == {"0>0/data@0>1", "0>0/data@0>2"}
    assert all(edge.origin < 0 for edge in edges(gpipe(Placement.identity(2, 3), 2)))


def broken(schedule: Schedule, worker: int, old: str, new: str) -> Schedule:
    lines = str(schedule).splitlines()
    assert old in lines[worker + 1]
    lines[worker + 1] = lines[worker + 1].replace(old, new)
    return parse("\n".join(lines))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1SCATTER0 1SUM0", "1SUM0", "1SCATTER0 is missing"),
        ("1SUM0 ", "", "1SUM0 is missing"),
        ("1GATHER0", "", "1GATHER0 is missing"),
        ("1SCATTER0", "1SCATTER0 1SCATTER0", "1SCATTER0 appears twice"),
        ("1SCATTER0", "1SCATTER1", "1SCATTER1: a step has one, of 0"),
        ("1B1 1>G1 1SCATTER0", "1SCATTER0 1B1 1>G1", "1SCATTER0 comes before the last backward"),
        ("1SCATTER0 1SUM0", "1SUM0 1SCATTER0", "1SUM0 comes before its 1SCATTER0"),
        ("1SUM0 1GATHER0", "1GATHER0 1SUM0", "1GATHER0 comes before its 1SUM0"),
        ("1>G1 1SCATTER0 1SUM0", "1SCATTER0 1SUM0 1>G1", "1>G1 comes behind 1SUM0"),
        ("1SCATTER0", "1SCATTER0 0SCATTER0", "is of a stage it does not hold"),
    ],
)
def test_what_is_wrong_with_it_is_named(old: str, new: str, said: str) -> None:
    schedule = gpipe(Placement.identity(2, 2), 2)
    with pytest.raises(ScheduleError) as error:
        check(broken(schedule, 1, old, new))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("3SUM0 0SUM0 3GATHER0", "3SUM0 3GATHER0 0SUM0", "0SUM0 comes behind 3GATHER0"),
        ("0R0 0<G0 0B0 0SCATTER0 3SUM0", "3SUM0 0R0 0<G0 0B0 0SCATTER0", "0R0 comes behind 3SUM0"),
    ],
)
def test_nobody_waits_for_a_replica_that_waits_for_it(old: str, new: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        check(broken(gpipe(V, 1), 0, old, new))


def test_ties_are_not_told_before_they_are_whole() -> None:
    schedule = gpipe(Placement.identity(3, 2), 1, TIES)
    with pytest.raises(ScheduleError, match="comes behind"):
        check(broken(schedule, 0, "0SUM0 0GATHER0 0>TIE0@2", "0>TIE0@2 0SUM0 0GATHER0"))


def test_one_replica_has_none_of_it() -> None:
    schedule = gpipe(Placement.identity(2), 2)
    assert not {*REPLICAS} & {action.kind for some in schedule.workers for action in some}
    with pytest.raises(ScheduleError, match="0SUM0 has nothing at its other end"):
        check(broken(schedule, 0, "0B1", "0B1 0SUM0"))


@given(
    placement=st.sampled_from(
        [Placement.identity(2), Placement.identity(3), V, Placement(((0, 1),))]
    ),
    replicas=st.integers(2, 4),
    microbatches=st.integers(1, 7),
    tied=st.booleans(),
)
def test_all_replicas_together_come_to_their_end(
    placement: Placement, replicas: int, microbatches: int, *, tied: bool
) -> None:
    """What the phases are to show: run as one network, with as little room as there is."""
    placement = placement.copies(replicas)
    ties = TIES if tied and placement.stages > 2 else ()
    programs: list[deque[Action]] = []
    for replica in range(replicas):
        schedule = gpipe(placement, len(block(microbatches, replicas, replica)), ties)
        check(schedule)
        programs += [deque(actions) for actions in schedule.workers]
    frames: dict[object, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while program and _may(program[0], placement.replica_of(rank), replicas, frames):
                program.popleft()
                moved = True
    assert not any(programs), [list(program)[:1] for program in programs]


def _may(action: Action, replica: int, replicas: int, frames: dict[object, int]) -> bool:
    """Do it, if nothing that it waits for is missing."""
    others = [other for other in range(replicas) if other != replica]
    takes: list[object] = []
    gives: list[object] = []
    match action.kind:
        case Kind.SCATTER:
            gives = [("part", action.stage, replica, other) for other in others]
        case Kind.SUM:
            takes = [("part", action.stage, other, replica) for other in others]
            gives = [("sum", action.stage, replica, other) for other in others]
        case Kind.GATHER:
            takes = [("sum", action.stage, other, replica) for other in others]
        case kind if kind in SENDS:
            edge = edge_of(action)
            bounded = edge.payload in (Payload.ACTIVATION, Payload.GRADIENT)
            if bounded and frames.get((replica, edge), 0) >= 4:
                return False
            gives = [(replica, edge)]
        case kind if kind in TAKES:
            takes = [(replica, edge_of(action))]
    if not all(frames.get(take, 0) for take in takes):
        return False
    for take in takes:
        frames[take] -= 1
    for give in gives:
        frames[give] = frames.get(give, 0) + 1
    return True
