"""Placements: which worker of which replica holds which stages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.plan.placement import Placement

few = st.integers(1, 6)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Draw a placement of any stages on any workers."""
    stages = draw(st.permutations(range(draw(st.integers(1, 8)))))
    cuts = draw(st.sets(st.integers(1, len(stages) - 1))) if len(stages) > 1 else set()
    bounds = [0, *sorted(cuts), len(stages)]
    held = tuple(tuple(sorted(stages[a:b])) for a, b in pairwise(bounds))
    return Placement(held, draw(st.integers(1, 3)))


@given(few)
def test_one_stage_per_worker(stages: int) -> None:
    placement = Placement.identity(stages)
    assert placement.held == tuple((stage,) for stage in range(stages))
    assert placement.owners == tuple(range(stages))
    assert placement == Placement.looped(stages, 1)


def test_looped_stages_alternate_between_workers() -> None:
    placement = Placement.looped(2, 3)
    assert placement.held == ((0, 2, 4), (1, 3, 5))
    assert placement.owners == (0, 1, 0, 1, 0, 1)
    assert (placement.workers, placement.stages, placement.ranks) == (2, 6, 2)
    assert str(placement) == "0,2,4/1,3,5"


@given(workers=st.integers(2, 6), rounds=few)
def test_looped_neighbours_are_on_neighbouring_workers(workers: int, rounds: int) -> None:
    owners = Placement.looped(workers, rounds).owners
    for before, after in pairwise(owners):
        assert (after - before) % workers == 1


@given(few)
def test_a_v_turns_round_at_the_last_worker(workers: int) -> None:
    placement = Placement.v_shaped(workers)
    assert placement.owners == (*range(workers), *reversed(range(workers)))
    assert str(Placement.v_shaped(3)) == "0,5/1,4/2,3"
    with pytest.raises(ValueError, match="two stages per worker, not 3"):
        Placement.v_shaped(workers, 3)


@given(placements())
def test_every_stage_of_every_replica_is_on_one_rank(placement: Placement) -> None:
    assert placement.ranks == placement.workers * placement.replicas
    found = [
        (placement.replica_of(rank), stage)
        for rank in range(placement.ranks)
        for stage in placement.stages_of(rank)
    ]
    assert sorted(found) == [
        (replica, stage)
        for replica in range(placement.replicas)
        for stage in range(placement.stages)
    ]
    for replica, stage in found:
        rank = placement.rank_of(stage, replica)
        assert stage in placement.stages_of(rank)
        assert placement.replica_of(rank) == replica
        assert placement.worker_of(rank) == placement.owners[stage]


@pytest.mark.parametrize(
    ("placement", "rank", "name"),
    [
        (Placement.identity(3), 1, "stage 1"),
        (Placement(((0, 3), (1, 2))), 0, "stages 0, 3"),
        (Placement(((0,), (1,)), replicas=2), 3, "stage 1 of replica 1"),
        (Placement(((0, 2), (1, 3)), replicas=2), 2, "stages 0, 2 of replica 1"),
    ],
)
def test_a_rank_is_named_by_its_stages(placement: Placement, rank: int, name: str) -> None:
    assert placement.names(rank) == name
