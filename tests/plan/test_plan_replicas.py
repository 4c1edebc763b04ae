"""Replicas: how they divide a mini-batch, and the actions that add up their gradients."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import RECEIVES as TAKES
from pipeworker.plan.actions import REPLICAS, SENDS, Action, Edge, Kind, Payload, edge_of
from pipeworker.plan.check import check
from pipeworker.plan.orders import resolve
from pipeworker.plan.partition import block, sizes
from pipeworker.plan.placement import Placement
from pipeworker.plan.schedule import Schedule, edges, replica_edges
from pipeworker.plan.simulate import simulate
from pipeworker.plan.text import parse

V = Placement(((0, 3), (1, 2)), 2)
TIES = ((0, 2), (2, 0))


def gpipe(
    placement: Placement, microbatches: int, ties: tuple[tuple[int, int], ...] = ()
) -> Schedule:
    modes = ("always",) * placement.stages
    return resolve("gpipe").build(placement, microbatches, modes, (), ties)


@given(count=st.integers(0, 50), parts=st.integers(1, 12))
def test_items_are_divided_as_by_tensor_split(count: int, parts: int) -> None:
    pieces = torch.arange(count).tensor_split(parts)
    assert [list(block(count, parts, part)) for part in range(parts)] == [
        p.tolist() for p in pieces
    ]
    assert sizes(count, parts) == [len(piece) for piece in pieces]


def test_gradients_are_scattered_after_the_last_backward_and_gathered_at_the_end() -> None:
    schedule = gpipe(Placement.identity(2, 3), 2)
    assert str(schedule).splitlines() == [
        "gpipe stages=2 microbatches=2 replicas=3",
        "0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0R0 0<G0 0B0 0R1 0<G1 0B1 0SCATTER0 0SUM0 0GATHER0",
        "1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1R0 1B0 1>G0 1R1 1B1 1>G1 1SCATTER0 1SUM0 1GATHER0",
    ]


def test_the_gradients_of_each_stage_are_scattered_as_soon_as_possible() -> None:
    """Sends that other stages wait for go first; receives come after all backwards."""
    words = str(gpipe(V, 1)).splitlines()[1:]
    assert words[0].endswith(
        "3B0 3>G0 3SCATTER0 0R0 0<G0 0B0 0SCATTER0 3SUM0 0SUM0 3GATHER0 0GATHER0"
    )


def test_tied_gradients_come_last() -> None:
    words = str(gpipe(Placement.identity(3, 2), 1, TIES)).splitlines()[1]
    assert words.endswith("0GATHER0 0>TIE0@2 0<TIE0@2 0TIE0")


@pytest.mark.parametrize("placement", [Placement.identity(3, 2), V, Placement.identity(1, 4)])
def test_a_replica_without_micro_batches_takes_part_in_the_exchange(placement: Placement) -> None:
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
    found = replica_edges(Placement.identity(2, 3))
    assert len(found) == len({*found}) == 2 * 3 * 2
    assert list(found) == sorted(found)
    assert not replica_edges(Placement.identity(4))
    deals = replica_edges(Placement.identity(2, 3), scatters_data=True)
    assert {str(edge) for edge in {*deals} - {*found}} == {"0>0/data@0>1", "0>0/data@0>2"}
    assert all(edge.origin < 0 for edge in edges(gpipe(Placement.identity(2, 3), 2)))


def broken(schedule: Schedule, worker: int, old: str, new: str) -> Schedule:
    lines = str(schedule).splitlines()
    assert old in lines[worker + 1]
    lines[worker + 1] = lines[worker + 1].replace(old, new)
    return parse("\n".join(lines))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
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
def test_errors_in_the_exchange_are_named(old: str, new: str, expected: str) -> None:
    schedule = gpipe(Placement.identity(2, 2), 2)
    with pytest.raises(ScheduleError) as error:
        check(broken(schedule, 1, old, new))
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("3SUM0 0SUM0 3GATHER0", "3SUM0 3GATHER0 0SUM0", "0SUM0 comes behind 3GATHER0"),
        ("0R0 0<G0 0B0 0SCATTER0 3SUM0", "3SUM0 0R0 0<G0 0B0 0SCATTER0", "0R0 comes behind 3SUM0"),
    ],
)
def test_replicas_that_could_wait_for_each_other_are_rejected(
    old: str, new: str, expected: str
) -> None:
    with pytest.raises(ScheduleError, match=expected):
        check(broken(gpipe(V, 1), 0, old, new))


def test_tied_gradients_are_not_sent_before_they_are_complete() -> None:
    schedule = gpipe(Placement.identity(3, 2), 1, TIES)
    with pytest.raises(ScheduleError, match="comes behind"):
        check(broken(schedule, 0, "0SUM0 0GATHER0 0>TIE0@2", "0>TIE0@2 0SUM0 0GATHER0"))


def test_one_replica_has_no_exchange() -> None:
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
def test_all_replicas_together_finish(
    placement: Placement, replicas: int, microbatches: int, *, tied: bool
) -> None:
    """Run all replicas as one network with channels of the smallest capacity: the phases hold."""
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
    """Run the action if nothing that it waits for is missing."""
    others = [other for other in range(replicas) if other != replica]
    received: list[object] = []
    sent: list[object] = []
    match action.kind:
        case Kind.SCATTER:
            sent = [("part", action.stage, replica, other) for other in others]
        case Kind.SUM:
            received = [("part", action.stage, other, replica) for other in others]
            sent = [("sum", action.stage, replica, other) for other in others]
        case Kind.GATHER:
            received = [("sum", action.stage, other, replica) for other in others]
        case kind if kind in SENDS:
            edge = edge_of(action)
            bounded = edge.payload in (Payload.ACTIVATION, Payload.GRADIENT)
            if bounded and frames.get((replica, edge), 0) >= 4:
                return False
            sent = [(replica, edge)]
        case kind if kind in TAKES:
            received = [(replica, edge_of(action))]
    if not all(frames.get(frame, 0) for frame in received):
        return False
    for frame in received:
        frames[frame] -= 1
    for frame in sent:
        frames[frame] = frames.get(frame, 0) + 1
    return True
