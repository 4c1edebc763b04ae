"""Lines over pipes: every event is decoded unchanged, and nothing else is decoded."""

from __future__ import annotations

import math
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ProtocolError
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.speed import Speed
from pipeworker.facts.step import Evaluation, StepResult
from pipeworker.wire import lines
from pipeworker.wire.lines import (
    Activity,
    Bound,
    Buffer,
    CannotStart,
    Configuration,
    Fork,
    Forked,
    FromAgent,
    FromCoordinator,
    FromHooks,
    HostLost,
    Interrupt,
    KeepAlive,
    Line,
    Planned,
    SaveRequest,
    Starting,
    ToAgent,
    ToCoordinator,
    ToHooks,
    Verdict,
    Waiting,
    Warned,
    WorkerExited,
    decode,
    encode,
)
from support.pure.messages import MADE

KINDS: list[Any] = list(typing.get_args(Line))
TOKEN = "0123456789abcdef" * 4

text = st.text(st.characters(codec=None), max_size=20)
simple: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: text,
}


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return the values that a field of this type may have."""
    if kind in MADE:
        return MADE[kind]
    if kind in simple:
        return simple[kind]
    if typing.get_origin(kind) is tuple:
        return st.lists(any_of(typing.get_args(kind)[0]), max_size=4).map(tuple)
    if args := typing.get_args(kind):
        return st.one_of(*map(any_of, args))
    if kind is type(None):
        return st.none()
    if kind is Phase:
        return st.sampled_from(Phase)
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: any_of(hint) for name, hint in hints.items()})


any_event = st.sampled_from(KINDS).flatmap(any_of)


@given(any_event)
def test_every_event_round_trips(event: Line) -> None:
    line = encode(event)
    assert line.count(b"\n") == 1
    assert line.isascii()
    read = decode(line)
    assert read == event
    assert repr(read) == repr(event)  # of the same types: 1, 1.0 and True differ


def test_a_line_is_a_name_and_fields() -> None:
    assert encode(Forked(1, 2, 3)) == b'["Forked", [1, 2, 3]]\n'
    assert encode(WorkerExited(1, 2, -9, Position(Phase.LOSS, 4))) == (
        b'["WorkerExited", [1, 2, -9, [9, 4, -1, -1], "", false]]\n'
    )
    assert encode(Interrupt()) == b'["Interrupt", []]\n'
    assert encode(HostLost((2, 3), "a\nb")) == b'["HostLost", [[2, 3], "a\\nb", false]]\n'


def test_numbers_that_are_not_finite_round_trip() -> None:
    row = StepResult(1, math.nan, 8, 0.25, math.inf, -math.inf, 0.1, 0.4, 0, None)
    assert repr(decode(encode(row))) == repr(row)


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\n", b"Forked", b"null", b"1", b"true", b'"Forked"', b'"ab"', b"[]", b"{}"),
        *(b'["Forked"]', b'["Forked", [1, 2, 3], 4]', b'["Forked", [1, 2, 3]', b"[1, 2]"),
        *(b'["Forked", [1, 2]]', b'["Forked", [1, 2, 3, 4]]', b'["Forked", [1, 2, "3"]]'),
        *(b'["Forked", [1, 2, 3.0]]', b'["Forked", [1, 2, true]]', b'["Forked", [1, 2, null]]'),
        *(b'["Forked", {"rank": 1}]', b'["Forked", 1]', b'["Forked", "abc"]', b'["Forked", null]'),
        *(b'{"Forked": 1, "rank": 2}', b'["forked", [1, 2, 3]]', b'["Hello", [0, "host", 1]]'),
        *(b'["Position", [1, 2, 3, 4]]', b'["WorkerExited", [1, 2, -9, [99, 1, 1, 1]]]'),
        *(b'["WorkerExited", [1, 2, -9, ["Position", [9, 1, 1, 1]]]]', b"[[], []]", b"[{}, []]"),
        *(b"\xff\xfe", b"\xff", b'["Bound", ["\xe9"]]', b'["Forked", [1, 2, %s]]' % (b"9" * 9999)),
        *(b"[" * 100_000, b'{"a":' * 100_000, b'["Forked", ' + b"[" * 100_000),
    ],
)
def test_a_malformed_line_is_rejected(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(line)


@given(st.binary(max_size=60) | st.text('[]{}",:0123456789eForkedBun \\u').map(str.encode))
def test_any_line_is_an_event_or_rejected(noise: bytes) -> None:
    try:
        event = decode(noise)
    except ProtocolError:
        return
    assert decode(encode(event)) == event


@given(event=any_event, data=st.data())
def test_a_line_with_other_bytes_is_an_event_or_rejected(event: Line, data: st.DataObject) -> None:
    line = bytearray(encode(event))
    at = data.draw(st.integers(0, len(line) - 1))
    line[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        read = decode(bytes(line))
    except ProtocolError:
        return
    assert repr(decode(encode(read))) == repr(read)


@pytest.mark.parametrize(
    "event",
    [
        Configuration("{}", "/runs/1", TOKEN, "127.0.0.1"),
        Fork(1, 2, "tcp://127.0.0.1:1", TOKEN, 0, tasks=24),
    ],
    ids=lambda event: type(event).__name__,
)
@pytest.mark.parametrize("show", [repr, str, "{}".format], ids=["repr", "str", "format"])
def test_a_token_never_shows(event: Any, show: Any) -> None:
    for shown in (show(event), show([event]), show({"event": event})):
        assert type(event).__name__ in shown
        assert TOKEN[:8] not in shown
    assert TOKEN.encode() in encode(event)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_with_a_token_hides_it(kind: Any) -> None:
    names = kind.__dataclass_fields__
    assert ("token" in names) == (kind in (Configuration, Fork))


# Data split at any byte.

SENT: list[Line] = [
    Bound("tcp://127.0.0.1:1234"),
    Planned("gpipe", 8, (3, 2), ((0,), (1,)), 0.25),
    StepResult(1, 0.5, 8, 0.25, 32.0, 1.5, 0.1, 0.4, 0),
    Evaluation(1, 0.5, ("accuracy",), (0.75,)),
    Activity((1, 2), 12, 60),
    Verdict("done", 0, 1, 2.0, (1, 2), 0.25, None, speed=Speed(0.5, 8.0, 0.0, (1.0, 1.5), 0.25)),
]


@given(st.lists(st.integers(0, sum(len(encode(event)) for event in SENT)), max_size=12))
def test_events_are_decoded_however_the_data_is_split(cuts: list[int]) -> None:
    stream = b"".join(map(encode, SENT))
    bounds = [0, *sorted(cuts), len(stream)]
    buffer: Buffer[FromCoordinator] = Buffer(FromCoordinator)
    received: list[Line] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):  # noqa: RUF007
        received += buffer.feed(stream[begin:end])
        assert len(received) == stream[:end].count(b"\n")  # each at once
    assert received == SENT


def test_events_are_decoded_byte_by_byte() -> None:
    buffer: Buffer[FromCoordinator] = Buffer(FromCoordinator)
    stream = b"".join(map(encode, SENT))
    assert [event for byte in stream for event in buffer.feed(bytes([byte]))] == SENT
    assert buffer.feed(b"") == []


def test_a_line_without_its_end_is_no_event() -> None:
    buffer: Buffer[FromAgent] = Buffer(FromAgent)
    assert buffer.feed(encode(Forked(1, 1, 1))[:-1]) == []
    assert buffer.feed(b"") == []
    assert buffer.feed(b"\n") == [Forked(1, 1, 1)]


def test_a_malformed_line_is_rejected_at_its_end() -> None:
    buffer: Buffer[FromAgent] = Buffer(FromAgent)
    assert buffer.feed(b"Traceback (most recent") == []
    with pytest.raises(ProtocolError, match=r"a line of \d+ bytes is not an event"):
        buffer.feed(b" call last):\n")


def test_what_a_shell_prints_before_the_first_event_is_skipped() -> None:
    event = KeepAlive(3.0)
    data = b'Last login: \xff\n\n["no", "event"]\n3\nwithout an end\n' + encode(event)
    for size in (1, 7, len(data)):
        buffer = Buffer[KeepAlive](KeepAlive, skips=True)
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        assert [one for part in parts for one in buffer.feed(part)] == [event]
        assert buffer.skipped == ["Last login: \ufffd", '["no", "event"]', "3", "without an end"]
        with pytest.raises(ProtocolError):
            buffer.feed(b"later\n")
    endless = Buffer[KeepAlive](KeepAlive, skips=True)
    for _ in range(16):
        assert not endless.feed(b"yes\n" * 800 + b"\n" * 800)
        endless.skipped = []  # shown meanwhile
    with pytest.raises(ProtocolError):
        endless.feed(b"yes\n" * 800 + b"\n" * 800)
    unbroken = Buffer[KeepAlive](KeepAlive, skips=True)
    assert not unbroken.feed(b"yes" * 300_000)
    with pytest.raises(ProtocolError):
        unbroken.feed(b"yes" * 300_000)


def test_a_text_that_has_no_encoding_is_rejected_in_place_of_a_number() -> None:
    with pytest.raises(ProtocolError, match=r"^Invalid value"):
        decode(encode(Forked(1, 1, 1)).replace(b"[1,", rb'["\ud800",'))


DIRECTIONS: list[Any] = [ToCoordinator, FromCoordinator, ToAgent, FromAgent, ToHooks, FromHooks]


@pytest.mark.parametrize(
    "direction",
    DIRECTIONS,
    ids=["to it", "from it", "to forks", "of forks", "to hooks", "of hooks"],
)
@given(any_event)
def test_only_events_of_the_direction_are_accepted(direction: Any, event: Line) -> None:
    buffer: Buffer[Line] = Buffer(direction)
    if isinstance(event, typing.get_args(direction) or direction):
        assert buffer.feed(encode(event)) == [event]
        return
    with pytest.raises(ProtocolError, match=f"^{type(event).__name__} is not an event of"):
        buffer.feed(encode(event))


def test_every_event_has_a_direction() -> None:
    listed = [kind for kinds in DIRECTIONS for kind in (typing.get_args(kinds) or (kinds,))]
    assert {*listed} == {*KINDS}
    passed_on = {WorkerExited, CannotStart, Interrupt, SaveRequest}
    passed_on |= {KeepAlive, Starting, Waiting, Warned}
    assert {kind for kind in listed if listed.count(kind) > 1} == passed_on
    assert all(kind.__name__ in (lines.__doc__ or "") for kind in KINDS)
