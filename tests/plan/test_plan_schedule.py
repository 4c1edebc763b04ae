"""Schedules as data: the tuples themselves, their text, their channels."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.schedule import (
    COMPUTE,
    ORDERS,
    RECOMPUTE_MODES,
    Action,
    Edge,
    Kind,
    Schedule,
    build,
    edge_of,
    edges,
    parse,
    parse_actions,
    recomputed,
)


def gpipe(stages: int, microbatches: int, recompute: str = "never") -> Schedule:
    return build("gpipe", stages, microbatches, recompute)


def staircase(schedule: Schedule) -> list[str]:
    """The compute of each stage, moved right by one place a stage as the first forward is."""
    return [
        "   " * stage + " ".join(str(a) for a in actions if a.kind in COMPUTE)
        for stage, actions in enumerate(schedule.stages)
    ]


def text(schedule: Schedule) -> str:
    return str(schedule) + "\n"


def test_gpipe_is_fill_and_drain() -> None:
    assert text(gpipe(2, 2)) == textwrap.dedent("""\
        gpipe stages=2 microbatches=2
        0: F0 >A0 >T0 F1 >A1 >T1 L0 <G0 B0 <G1 B1
        1: <A0 <T0 F0 <A1 <T1 F1 B0 >G0 B1 >G1
    """)
    assert staircase(gpipe(3, 3)) == [
        "F0 F1 F2 B0 B1 B2",
        "   F0 F1 F2 B0 B1 B2",
        "      F0 F1 F2 B0 B1 B2",
    ]


def test_recompute_comes_before_the_wait_for_the_gradient() -> None:
    assert text(gpipe(3, 2, "always")) == textwrap.dedent("""\
        gpipe stages=3 microbatches=2
        0: F0 >A0 >T0 F1 >A1 >T1 L0 R0 <G0 B0 R1 <G1 B1
        1: <A0 F0 >A0 <A1 F1 >A1 R0 <G0 B0 >G0 R1 <G1 B1 >G1
        2: <A0 <T0 F0 <A1 <T1 F1 R0 B0 >G0 R1 B1 >G1
    """)
    assert staircase(gpipe(2, 3, "except_first")) == [
        "F0 F1 F2 B0 R1 B1 R2 B2",
        "   F0 F1 F2 B0 R1 B1 R2 B2",
    ]


def test_one_stage_sends_nothing() -> None:
    assert text(gpipe(1, 2)) == "gpipe stages=1 microbatches=2\n0: F0 F1 L0 B0 B1\n"
    assert edges(gpipe(1, 2)) == ()


@pytest.mark.parametrize(
    ("mode", "again"),
    [("auto", [0, 1, 2]), ("always", [0, 1, 2]), ("except_first", [1, 2]), ("never", [])],
)
def test_recompute_modes(mode: str, again: list[int]) -> None:
    assert list(recomputed(mode, 3)) == again


def test_unknown_names_are_refused_with_the_choice() -> None:
    with pytest.raises(ScheduleError, match="'sometimes': choose from auto, always"):
        recomputed("sometimes", 1)
    with pytest.raises(ScheduleError, match="'zigzag': choose from gpipe"):
        build("zigzag", 1, 1, "never")
    for counts in ((0, 1), (1, 0), (-1, 1)):
        with pytest.raises(ScheduleError, match="at least one stage and one micro-batch"):
            build("gpipe", *counts, "never")


@given(
    name=st.sampled_from(sorted(ORDERS)),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    mode=st.sampled_from(RECOMPUTE_MODES),
)
def test_text_round_trips(name: str, stages: int, microbatches: int, mode: str) -> None:
    schedule = build(name, stages, microbatches, mode)
    assert parse(str(schedule)) == schedule
    for actions in schedule.stages:
        assert parse_actions(" ".join(map(str, actions))) == actions


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("", "not a schedule's head"),
        ("gpipe stages=1", "not a schedule's head"),
        ("gpipe stages=x microbatches=1\n0: F0", "not a schedule's head"),
        ("gpipe stages=1 microbatches=1\n1: F0", "expected the line of stage 0"),
        ("gpipe stages=1 microbatches=1\nF0 B0", "expected the line of stage 0"),
        ("gpipe stages=2 microbatches=1\n0: F0 B0", "says 2 stages, but 1 lines"),
        ("gpipe stages=1 microbatches=1\n0: F0 X1", "'X1' is not an action"),
        ("gpipe stages=1 microbatches=1\n0: F", "'F' is not an action"),
        ("gpipe stages=1 microbatches=1\n0: F-1", "'F-1' is not an action"),
        ("gpipe stages=1 microbatches=1\n0: F0B0", "'F0B0' is not an action"),
    ],
)
def test_malformed_text_is_refused(broken: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        parse(broken)


@given(st.text(alphabet="FRBLAGT<>0123456789 :=\nx", max_size=60))
def test_any_text_is_a_schedule_or_refused(noise: str) -> None:
    try:
        actions = parse_actions(noise)
    except ScheduleError:
        return
    assert parse_actions(" ".join(map(str, actions))) == actions


def test_edges_join_neighbours_and_the_ends() -> None:
    shown = [str(edge) for edge in edges(gpipe(3, 2))]
    assert shown == [
        "0>1/activation",
        "0>2/target",
        "1>0/gradient",
        "1>2/activation",
        "2>1/gradient",
    ]
    assert [str(Edge.parse(edge)) for edge in shown] == shown
    assert [str(edge) for edge in edges(gpipe(2, 1))] == [
        "0>1/activation",
        "0>1/target",
        "1>0/gradient",
    ]


@given(stages=st.integers(2, 9), stage=st.integers(0, 7))
def test_both_ends_name_the_channel_alike(stages: int, stage: int) -> None:
    stage = min(stage, stages - 2)
    for sends, receives, source, target in (
        (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION, stage, stage + 1),
        (Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT, stage + 1, stage),
        (Kind.SEND_TARGET, Kind.RECEIVE_TARGET, 0, stages - 1),
    ):
        edge = edge_of(Action(sends, 0), source, stages)
        assert (edge.source, edge.target) == (source, target)
        assert edge_of(Action(receives, 0), target, stages) == edge


def test_an_action_reads_as_its_kind_and_microbatch() -> None:
    assert str(Action(Kind.RECEIVE_GRADIENT, 12)) == "<G12"
    assert parse_actions(" <G12  F0\n") == (
        Action(Kind.RECEIVE_GRADIENT, 12),
        Action(Kind.FORWARD, 0),
    )
