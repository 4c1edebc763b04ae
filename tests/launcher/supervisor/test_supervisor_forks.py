"""Tests of which workers are forked where, and how many at a time, and the copies that survive."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.supervisor.forks import Forks, Layout, SnapshotCopies
from pipeworker.job.options import Options

TWO_REPLICAS = ((0, 0, 1, 1), 2)
"""The hosts by rank, and the ranks that hold the whole state together."""
SPLIT_REPLICAS = ((0, 1, 1, 2), 2)
HOSTS = st.lists(st.integers(0, 3), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("placed", "options", "lost", "survives"),
    [
        (TWO_REPLICAS, {}, [1], True),
        (TWO_REPLICAS, {}, [0], True),
        (TWO_REPLICAS, {}, [1, 0], False),
        (SPLIT_REPLICAS, {}, [2], True),
        (SPLIT_REPLICAS, {}, [1], False),
        (((0, 0, 1, 1), 4), {}, [1], False),
        (TWO_REPLICAS, {"reader": 0}, [1], True),
        (TWO_REPLICAS, {"reader": 0}, [0], False),
        (TWO_REPLICAS, {"reader": 0, "mirrored": True}, [0], True),
        (((0, 1, 2), 3), {"mirrored": True}, [0], True),
        (((0, 1, 2), 3), {"mirrored": True}, [0, 1], False),
        (((0, 1, 2, 3), 4), {"mirrored": True}, [0, 2], True),
        (((0, 1, 2, 3), 4), {"mirrored": True}, [3, 0], False),
    ],
)
def test_a_snapshot_survives_while_every_part_is_on_a_host_that_is_left(
    placed: tuple[tuple[int, ...], int],
    options: dict[str, int],
    lost: list[int],
    *,
    survives: bool,
) -> None:
    copies = SnapshotCopies()
    copies.place(Layout(1, *placed, **options))  # type: ignore[arg-type]
    assert copies.complete()
    found = [copies.lose(host)[1] for host in lost]
    assert found[-1] is survives


def test_a_restarted_host_has_no_copy_until_the_next_snapshot() -> None:
    copies = SnapshotCopies()
    copies.place(Layout(1, (0, 1), 1))
    copies.complete()
    assert copies.lose(1) == ((1,), True)
    copies.place(Layout(2, (0, 1), 1))
    assert copies.lose(1) == ((), True)
    assert copies.lose(0) == ((0,), False)
    copies.place(Layout(3, (0, 1), 1))
    assert copies.complete()
    assert copies.lose(0) == ((0,), True)


def test_a_host_that_was_lost_before_the_report_of_a_snapshot_has_no_part_of_it() -> None:
    copies = SnapshotCopies()
    copies.place(Layout(1, (0, 1), 2))
    assert copies.lose(1) == ((), False)
    copies.place(Layout(1, (0, 1), 2))  # started there again before the coordinator learns of it
    assert not copies.complete()


def test_before_the_first_snapshot_each_lost_host_counts() -> None:
    copies = SnapshotCopies()
    copies.place(Layout(1, (0, 1), 1))
    assert copies.lose(1) == ((), True)
    assert copies.lose(0) == ((), False)


def test_a_snapshot_is_where_the_workers_were_that_made_it() -> None:
    copies = SnapshotCopies()
    copies.place(Layout(1, (0, 0), 2))
    copies.complete()
    copies.place(Layout(2, (1, 1), 2))  # forked there, before they make a snapshot
    assert copies.lose(0) == ((0, 1), False)


@pytest.mark.parametrize(
    ("options", "places", "slots", "mirrored"),
    [
        ({}, [1, 1], 2, True),
        ({}, [2], 2, False),
        ({"max_restarts": 0}, [1, 1], 1, False),
        ({"replicas": 2, "data_reader": "every"}, [1, 1], 2, False),
    ],
)
def test_another_host_keeps_copies_if_the_loss_of_one_host_would_lose_them_all(
    options: dict[str, Any], places: list[int], slots: int, *, mirrored: bool
) -> None:
    forks = Forks(Options("job.py", 2 // options.get("replicas", 1), 4, **options), "token", 1)
    chosen = [fork for _, fork in forks.next_forks(places, [""] * len(places))]
    assert [(fork.slots, fork.mirrored) for fork in chosen] == [(slots, mirrored)] * 2


@pytest.mark.parametrize("reader", ["first", "every"])
def test_a_replica_that_reads_no_data_is_not_the_whole_state(reader: str) -> None:
    options = Options("job.py", 1, 4, replicas=2, data_reader=reader, max_restarts=0)
    forks = Forks(options, "token", 1)
    forks.next_forks([1, 1], ["", ""])
    assert forks.lose(0) == ((0,), reader == "every")


@given(HOSTS, st.data())
def test_with_mirrors_any_one_of_several_hosts_may_be_lost(
    hosts: list[int], data: st.DataObject
) -> None:
    several = len({*hosts}) > 1
    layout = Layout(1, tuple(hosts), len(hosts), mirrored=several)
    kept = [rank for host in {*hosts} for rank in layout.mirrored_on(host)]
    assert sorted(kept) == (list(range(len(hosts))) if several else [])
    copies = SnapshotCopies(layout, layout)
    assert copies.lose(data.draw(st.sampled_from(hosts)))[1] is several


@given(HOSTS, st.booleans(), st.integers(-1, 0), st.sets(st.integers(0, 3)), st.integers(0, 3))
def test_a_further_loss_never_brings_a_snapshot_back(
    hosts: list[int], mirrored: bool, reader: int, lost: set[int], more: int
) -> None:
    before = Layout(1, tuple(hosts), 1, mirrored, reader, frozenset(lost))
    after = Layout(1, tuple(hosts), 1, mirrored, reader, frozenset({*lost, more}))
    assert before.survives() or not after.survives()


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 16), st.data())
def test_every_rank_is_forked_once_and_a_few_start_at_a_time(
    places: list[int], cores: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, sum(places)))
    forks = Forks(Options("job.py", stages, 4), "token", cores)
    limit = max(8, cores) * len(places)
    found: list[tuple[int, int]] = []
    joined = 0
    while not forks.complete:
        chosen = forks.next_forks(places, [""] * len(places))
        if stages > limit:
            assert len(chosen) == 1 or joined
        found += [(host, fork.rank) for host, fork in chosen]
        assert 0 < len(found) - joined <= limit
        forks.join()
        joined += 1
    assert sorted(rank for _, rank in found) == list(range(stages))
    assert all(count <= places[host] for host, count in Counter(h for h, _ in found).items())
    assert [host for _, host in sorted((rank, host) for host, rank in found)] == sorted(
        host for host, _ in found
    )  # neighbouring ranks share a host


def test_the_first_worker_of_a_host_has_all_its_workers_checked_once() -> None:
    """Later, what is free includes what lost workers have not yet released."""
    forks = Forks(Options("job.py", 3, 4, threads=2, backend="tls"), "token", 1)
    assert [fork.tasks for _, fork in forks.next_forks([2, 1], ["", ""])] == [26, 0, 13]
    forks.begin(2)
    assert [fork.tasks for _, fork in forks.next_forks([2, 1], ["", ""])] == [0, 0, 0]


@pytest.mark.parametrize(
    ("backend", "places", "tasks"),
    [
        ("gloo", [3], [12 + 5 + 12 + 7 + 12 + 5]),
        ("auto", [3], [36]),
        ("auto", [2, 1], [12 + 1 + 12 + 3, 12 + 5]),
        ("nccl", [1, 1, 1], [12 + 5, 12 + 7, 12 + 5]),
        ("tls", [1, 1, 1], [12, 12, 12]),
    ],
)
def test_links_over_gloo_have_threads_of_their_own(
    backend: str, places: list[int], tasks: list[int]
) -> None:
    """The threads of a worker over gloo were counted: 17 with three links, 19 with four."""
    forks = Forks(Options("job.py", 3, 4, backend=backend), "token", 1)
    chosen = forks.next_forks(places, [""] * len(places))
    assert [fork.tasks for _, fork in chosen if fork.tasks] == tasks


def test_stages_of_one_worker_have_no_link_over_gloo() -> None:
    """The middle ones of the four stages of zbv share a worker, and so do the outer ones."""
    forks = Forks(Options("job.py", 2, 4, schedule="zbv", backend="gloo"), "token", 1)
    (first, _) = forks.next_forks([2], [""])
    assert first[1].tasks == 2 * (12 + 2 * 4 - 1)


def test_a_lost_host_is_forked_again_in_the_next_generation() -> None:
    forks = Forks(Options("job.py", 3, 4), "token", 1)
    assert [(host, fork.local_rank) for host, fork in forks.next_forks([2, 1], ["", ""])] == [
        (0, 0),
        (0, 1),
        (1, 0),
    ]
    assert forks.lose(0) == ((0, 1), True)  # no snapshot yet: the neighbour would have copies
    assert not forks.complete
    forks.begin(2)
    assert [fork.generation for _, fork in forks.next_forks([2, 1], ["", ""])] == [2, 2, 2]
