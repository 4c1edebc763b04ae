"""The language of schedules: actions, the channels they use, and their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ScheduleError
from pipeworker.plan.actions import (
    RECEIVES,
    SENDS,
    Action,
    Edge,
    Kind,
    Payload,
    edge_of,
    format_actions,
    parse_actions,
)

NAMED = {Payload.TARGET, Payload.SKIP, Payload.SKIP_GRADIENT, Payload.TIED}
"""Payloads for stages that are not neighbours."""

numbers = st.integers(0, 2000)


def names_a_stage(kind: Kind) -> bool:
    return {**SENDS, **RECEIVES}.get(kind) in NAMED


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(Kind))
    peer = draw(numbers) if names_a_stage(kind) else -1
    return Action(kind, draw(numbers), draw(numbers), peer)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.FORWARD, 2, 0), "2F0"),
        (Action(Kind.BACKWARD_INPUT, 10, 31), "10I31"),
        (Action(Kind.RECEIVE_GRADIENT, 3, 12), "3<G12"),
        (Action(Kind.SEND_TARGET, 0, 7, 3), "0>T7@3"),
        (Action(Kind.RECEIVE_TIED, 2, 0, 0), "2<TIE0@0"),
        (Action(Kind.REDUCE_TIED, 2, 0), "2TIE0"),
    ],
)
def test_the_text_of_an_action_is_stage_kind_and_microbatch(action: Action, text: str) -> None:
    assert str(action) == text
    assert parse_actions(f"  {text}\n") == (action,)


@given(st.lists(actions(), max_size=8).map(tuple))
def test_actions_round_trip_through_text(some: tuple[Action, ...]) -> None:
    assert parse_actions(format_actions(some)) == some


@pytest.mark.parametrize(
    "word",
    [
        *("X1", "0X1", "F0", "0F", "0F-1", "-1F0", "0F0B0", "0f0", "0F0@1", "0>A0@2", "0TIE0@1"),
        *("0>S0", "0<S0@", "0>T0", "0<TIE0", "0>S0@x", "0>S@1", "0>>A0", "\u0661F0", "0F\u00b2"),
    ],
)
def test_a_word_that_is_not_an_action_is_rejected_by_name(word: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action: write a stage, a kind") as caught:
        parse_actions(f"0F0 {word} 0B0")
    assert repr(word) in str(caught.value)


@given(st.text(alphabet="FRBIWLAGTIESH<>@0123456789 \n", max_size=60))
def test_any_text_is_read_as_actions_or_rejected(noise: str) -> None:
    try:
        some = parse_actions(noise)
    except ScheduleError:
        return
    assert parse_actions(format_actions(some)) == some


@pytest.mark.parametrize("send", SENDS, ids=str)
def test_each_payload_is_sent_and_received(send: Kind) -> None:
    (receive,) = (kind for kind, payload in RECEIVES.items() if payload is SENDS[send])
    assert send.value[0] + receive.value[0] == "><"
    assert send.value[1:] == receive.value[1:]


@given(stage=st.integers(0, 9), other=st.integers(0, 9), m=numbers)
def test_both_ends_use_the_same_channel(stage: int, other: int, m: int) -> None:
    """Sends to a neighbour do not name the peer."""
    for send, payload in SENDS.items():
        (receive,) = (kind for kind, p in RECEIVES.items() if p is payload)
        if payload in NAMED:
            source, target = stage, other
            out, back = Action(send, source, m, target), Action(receive, target, m, source)
        else:
            step = 1 if payload is Payload.ACTIVATION else -1
            source, target = stage + 1, stage + 1 + step
            out, back = Action(send, source, m), Action(receive, target, m)
        assert edge_of(out) == edge_of(back) == Edge(source, target, payload)


@given(st.builds(Edge, numbers, numbers, st.sampled_from(Payload)))
def test_edges_round_trip_through_text(edge: Edge) -> None:
    assert Edge.parse(str(edge)) == edge
    assert str(edge) == f"{edge.source}>{edge.target}/{edge.payload.value}"
