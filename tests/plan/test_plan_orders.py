"""The registered compute orders, and the schedules made from them."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError, UsageError
from pipeworker.plan.actions import COMPUTE, Kind, format_actions
from pipeworker.plan.check import check
from pipeworker.plan.orders import ORDERS, Order, resolve
from pipeworker.plan.orders.gpipe import gpipe
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import RECOMPUTE_MODES, recomputed
from pipeworker.plan.schedule import Schedule, edges
from support.pure.orders import build, fill_drain


def text(schedule: Schedule) -> str:
    return str(schedule) + "\n"


def staircase(schedule: Schedule) -> list[str]:
    """Return the compute actions of each stage, each line shifted by one place."""
    return [
        "   " * worker + " ".join(f"{a.kind}{a.microbatch}" for a in actions if a.kind in COMPUTE)
        for worker, actions in enumerate(schedule.workers)
    ]


def test_gpipe_is_fill_and_drain() -> None:
    assert text(build("gpipe", 2, 2, "never")) == textwrap.dedent("""\
        gpipe stages=2 microbatches=2
        0: 0F0 0>A0 0>T0@1 0F1 0>A1 0>T1@1 0L0 0<G0 0B0 0<G1 0B1
        1: 1<A0 1<T0@0 1F0 1<A1 1<T1@0 1F1 1B0 1>G0 1B1 1>G1
    """)
    assert staircase(build("gpipe", 3, 3, "never")) == [
        "F0 F1 F2 B0 B1 B2",
        "   F0 F1 F2 B0 B1 B2",
        "      F0 F1 F2 B0 B1 B2",
    ]


def test_recompute_comes_before_the_wait_for_the_gradient() -> None:
    assert text(build("gpipe", 3, 2, "always")) == textwrap.dedent("""\
        gpipe stages=3 microbatches=2
        0: 0F0 0>A0 0>T0@2 0F1 0>A1 0>T1@2 0L0 0R0 0<G0 0B0 0R1 0<G1 0B1
        1: 1<A0 1F0 1>A0 1<A1 1F1 1>A1 1R0 1<G0 1B0 1>G0 1R1 1<G1 1B1 1>G1
        2: 2<A0 2<T0@0 2F0 2<A1 2<T1@0 2F1 2R0 2B0 2>G0 2R1 2B1 2>G1
    """)
    assert staircase(build("gpipe", 2, 3, "except_first")) == [
        "F0 F1 F2 B0 R1 B1 R2 B2",
        "   F0 F1 F2 B0 R1 B1 R2 B2",
    ]


def test_one_stage_sends_nothing() -> None:
    alone = build("gpipe", 1, 2, "never")
    assert text(alone) == "gpipe stages=1 microbatches=2\n0: 0F0 0F1 0L0 0B0 0B1\n"
    assert edges(alone) == ()


def test_skips_and_ties_are_part_of_the_schedule() -> None:
    made = build("gpipe", 3, 1, "never", ((0, 2),), ((0, 2), (2, 0)))
    assert text(made) == textwrap.dedent("""\
        gpipe stages=3 microbatches=1 skips=0>2 ties=0>2,2>0
        0: 0F0 0>A0 0>T0@2 0>S0@2 0L0 0<G0 0<H0@2 0B0 0>TIE0@2 0<TIE0@2 0TIE0
        1: 1<A0 1F0 1>A0 1<G0 1B0 1>G0
        2: 2<A0 2<T0@0 2<S0@0 2F0 2B0 2>G0 2>H0@0 2>TIE0@0 2<TIE0@0 2TIE0
    """)


def test_a_worker_runs_its_stages_up_and_down_again() -> None:
    orders = fill_drain(Placement(((0, 3), (1, 2))), 2, "except_first")
    assert [format_actions(actions) for actions in orders] == [
        "0F0 0F1 3F0 3F1 3B0 3R1 3B1 0B0 0R1 0B1",
        "1F0 1F1 2F0 2F1 2B0 2R1 2B1 1B0 1R1 1B1",
    ]


def test_unknown_names_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"^--schedule zigzag: must be one of gpipe\b"):
        resolve("zigzag")
    with pytest.raises(ScheduleError, match="'sometimes': choose from auto, always"):
        build("gpipe", 1, 1, "sometimes")


@pytest.mark.parametrize("counts", [(0, 1), (1, 0), (-1, 1), (1, -3)])
def test_an_empty_schedule_is_rejected(counts: tuple[int, int]) -> None:
    with pytest.raises(ScheduleError, match="at least one stage and one micro-batch"):
        build("gpipe", *counts, "never")


@given(
    name=st.sampled_from(sorted(ORDERS)),
    workers=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    mode=st.sampled_from(RECOMPUTE_MODES),
)
def test_every_order_is_legal(name: str, workers: int, microbatches: int, mode: str) -> None:
    """With skips over the whole length and ties between the ends."""
    where = resolve(name).place(workers)
    last = where.stages - 1
    skips = ((0, last),) if last else ()
    schedule = build(name, workers, microbatches, mode, skips, tuple({(0, last), (last, 0)}))
    assert schedule.placement == where
    check(schedule)
    recomputes = sum(a.kind is Kind.RECOMPUTE for actions in schedule.workers for a in actions)
    assert recomputes == where.stages * len(recomputed(mode, microbatches))


def test_each_stage_may_have_a_recompute_mode_of_its_own() -> None:
    source = resolve("gpipe")
    mixed = source.build(source.place(4), 3, ("always", "never", "except_first", "offload"))
    check(mixed)
    assert [shown.split() for shown in staircase(mixed)] == [
        ["F0", "F1", "F2", "R0", "B0", "R1", "B1", "R2", "B2"],
        ["F0", "F1", "F2", "B0", "B1", "B2"],
        ["F0", "F1", "F2", "B0", "R1", "B1", "R2", "B2"],
        ["F0", "F1", "F2", "B0", "B1", "B2"],
    ]
    fetched = [[a.microbatch for a in actions if a.kind is Kind.FETCH] for actions in mixed.workers]
    assert fetched == [[], [], [], [0, 1, 2]]
    with pytest.raises(ScheduleError, match="'sometimes': choose from auto, always"):
        source.build(source.place(2), 3, ("always", "sometimes"))


def test_an_order_places_its_default_number_of_stages_per_worker() -> None:
    placed = Order("looped", gpipe, virtual_stages=3).place(2, replicas=4)
    assert placed == Placement.looped(2, 3).copies(4)
    assert (placed.workers, placed.stages, placed.ranks) == (2, 6, 8)
