"""Frames: every message is decoded unchanged, and nothing else is decoded."""

from __future__ import annotations

import dataclasses
import math
import random
import typing
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import ProtocolError
from pipeworker.facts.connections import Skip, Tie
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.limits import LONGEST_NAME, MOST_TYPES
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Batch, Evaluation, StepResult
from pipeworker.wire.codec import MAX_FRAME_BYTES, VERSION, Codec, decode, encode
from pipeworker.wire.messages.checkpoint import Copy
from pipeworker.wire.messages.directions import Advance, Finish, FromWorker, Message, ToWorker
from pipeworker.wire.messages.plan import Plan, StageRange
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Hello, Ping
from pipeworker.wire.messages.step import EvaluationDone, RunStep, StepDone, Update, Wait
from support.pure.messages import MADE

KINDS = [*typing.get_args(FromWorker), *typing.get_args(ToWorker)]

st.register_type_strategy(int, st.integers(-(2**63), 2**63 - 1))
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(str, st.text(st.characters(codec=None), max_size=20))

any_message = st.sampled_from(KINDS).flatmap(lambda kind: MADE.get(kind, st.from_type(kind)))

DONE = StepDone(
    rank=1,
    step=7,
    losses=(0.25, 1e-300),
    counts=(),
    squares=(0.5, math.inf),
    busy=0.125,
    learning_rate=0.1,
    peak_memory=1 << 40,
    batch=Batch(signature=2, samples=10, microbatches=4, epoch=0),
    snapshot_step=6,
    snapshot_seconds=0.25,
    snapshot_lacked_memory=True,
)
ADVANCE = Advance(
    RunStep(8, Batch(2, 10, 4, 1), True, "0F0 0>A0 0>T0@1 0L0 0<G0 0B0", loss_scale=1024.0),
    Update(7, 40.0, 0.5, epoch_ended=True),
    Copy(7, 1, save=True),
)
PLAN = Plan(
    ranges=(StageRange(0, 0, 3), StageRange(3, 9, 12)),
    edges=("0>1/activation", "2>3/activation"),
    skips=(Skip(0, 2, "x"),),
    ties=(Tie(("0.weight", "11.weight"), (0, 3)),),
    evaluation="0F0 0>A0 3<A0 3F0",
    held=((0, 3), (1, 2)),
)
FAILED = Failed(2, Failure(Cause.USER, "no", 2, Position(Phase.FORWARD, 3, 1, 4), "Linear", "tb"))


@given(message=any_message, generation=st.integers(0, 2**31))
def test_round_trip(message: Message, generation: int) -> None:
    read = decode(encode(message, generation))
    assert read == (generation, message)
    assert repr(read[1]) == repr(message)  # equal and of the same types: 1, 1.0 and True differ


def test_nan_round_trips() -> None:
    _, read = decode(encode(dataclasses.replace(DONE, losses=(math.nan,)), 1))
    assert isinstance(read, StepDone)
    assert math.isnan(read.losses[0])


def test_the_frame_is_four_plain_values() -> None:
    assert msgpack.unpackb(encode(Advance(Finish(), Update(7, 0.5)), 3)) == [
        VERSION,
        3,
        "Advance",
        [["Finish", []], ["Update", [7, 0.5, 1.0, False, False]], None],
    ]
    assert msgpack.unpackb(encode(Heartbeat(0, Position(Phase.LOSS, 2)), 1))[3] == [
        *(0, [9, 2, -1, -1]),
        *(0, 0, False, False, 0, 0, 0, 0, 0.0, ""),
    ]


def test_a_member_of_a_union_is_sent_with_its_name() -> None:
    """It has its name wherever it occurs, also in a field of its own type."""
    gave = StepResult(1, 0.5, 8, 0.25, 32.0, 1.5, 0.1, 0.4, 0)
    (what, due, copy) = msgpack.unpackb(encode(Advance(Wait(gave)), 1))[3]
    assert what == ["Wait", [["StepResult", [*dataclasses.astuple(gave)]]]]
    assert (due, copy) == (None, None)
    result = Evaluation(3, 0.5, ("accuracy",), (0.75,))
    fields = msgpack.unpackb(encode(EvaluationDone(1, 3, 0, result), 1))[3]
    assert fields == [1, 3, 0, ["Evaluation", [3, 0.5, ["accuracy"], [0.75]]], None]
    assert msgpack.unpackb(encode(EvaluationDone(1, 3, 0, None), 1))[3] == [1, 3, 0, None, None]


@given(st.binary(max_size=200))
def test_random_bytes_are_rejected(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(noise)


@given(
    value=st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.binary()
        | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    )
)
def test_well_formed_values_that_are_no_message_are_rejected(value: Any) -> None:
    for frame in (value, [VERSION, 1, "StepDone", value], [VERSION, 1, value, []]):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(frame))


@pytest.mark.parametrize("message", [DONE, FAILED, ADVANCE, PLAN], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_frame_is_a_message_or_rejected(message: Message, seed: int) -> None:
    """A mutated frame is rejected, or decoded to a message that encodes to the same meaning."""
    chance = random.Random(seed)
    original = encode(message, 1)
    rejected = 0
    for _ in range(500):
        frame = bytearray(original)
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(frame))
            match chance.randrange(3):
                case 0:
                    frame[at] = chance.randrange(256)
                case 1:
                    del frame[at]
                case 2:
                    frame.insert(at, chance.randrange(256))
        try:
            generation, read = decode(bytes(frame))
        except ProtocolError:
            rejected += 1
        else:
            assert repr(decode(encode(read, generation))) == repr((generation, read))
    assert rejected > 100


def test_every_shorter_or_longer_frame_is_rejected() -> None:
    for frame in (encode(message, 1) for message in (DONE, ADVANCE, PLAN)):
        for length in range(len(frame)):
            with pytest.raises(ProtocolError):
                decode(frame[:length])
        with pytest.raises(ProtocolError):
            decode(frame + b"\0")


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        ([VERSION + 1, 1, "Ping", []], f"version {VERSION + 1}, this is version {VERSION}"),
        ([0, 1, "Ping", []], "version 0"),
        ([True, 1, "Ping", []], "version bool"),
        ([float(VERSION), 1, "Ping", []], "version float"),
        (["1" * 1000, 1, "Ping", []], r"^version str, this"),
        ([VERSION, 1, "Ping"], "not a frame"),
        ([VERSION, 1, "Ping", [], []], "not a frame"),
        ({"version": VERSION}, "not a frame"),
        ([VERSION, "1", "Ping", []], "unknown message"),
        ([VERSION, True, "Ping", []], "unknown message"),
        ([VERSION, 1, "Machine", []], "unknown message"),
        ([VERSION, 1, "Update", [1, 1.0]], "unknown message"),  # only ever within Advance
        ([VERSION, 1, b"Ping", []], "unknown message"),
        ([VERSION, 1, ["Ping"], []], "unknown message"),
    ],
)
def test_a_wrong_header_is_rejected(frame: Any, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(msgpack.packb(frame))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Ping", [1]),
        ("Ping", None),
        ("Hello", [0, "host"]),
        ("Hello", [0, "host", 1, 2]),
        ("Hello", {"rank": 0}),
        ("Hello", [True, "host", 1]),
        ("Hello", [0.0, "host", 1]),
        ("Hello", ["0", "host", 1]),
        ("Hello", [None, "host", 1]),
        ("Hello", [0, b"host", 1]),
        ("Described", [0, "Linear"]),
        ("Described", [0, ["Linear", 1]]),
        ("Described", [0, [["Linear"]]]),
        ("Heartbeat", [0, [99, 1, 1, 1]]),
        ("Heartbeat", [0, [6.0, 1, 1, 1]]),
        ("Heartbeat", [0, [True, 1, 1, 1]]),
        ("Heartbeat", [0, [[], 1, 1, 1]]),
        ("Heartbeat", [0, None]),
        ("Failed", [0, ["gossip", "m", 0, [0, -1, -1, -1], "", ""]]),
        ("StepDone", [0, 1, [0.5, True], [], [], 0.0, 0.0, 0, None, -1, 0.0]),
        ("StepDone", [0, 1, [], [], [], 0.0, 0.0, 0, [1, 2, 3], -1, 0.0]),
        # one of several
        ("Advance", [[1, 1], None, None]),
        ("Advance", [None, None, None]),
        ("Advance", [[], None, None]),
        ("Advance", [["Finish"], None, None]),
        ("Advance", [["Finish", [], []], None, None]),
        ("Advance", [["Finish", [1]], None, None]),
        ("Advance", [["Finish", None], None, None]),
        ("Advance", ["Finish", None, None]),
        ("Advance", [["Machine", []], None, None]),
        ("Advance", [["Update", [1, 1.0, 1.0, False, False]], None, None]),  # of the other field
        ("Advance", [["Finish", []], ["Finish", []], None]),
        ("Advance", [[b"Finish", []], None, None]),
        ("Advance", [[["Finish"], []], None, None]),
        ("Advance", [["Finish", []], None]),
        ("Advance", [["Finish", []], None, [1, 0]]),
        ("Advance", [["Finish", []], None, ["Copy", [1, 0, True]]]),  # in no union: it has no name
        ("EvaluationDone", [0, 1, 0, [3, 0.5, [], []], None]),  # without its name
        ("EvaluationDone", [0, 1, 0, ["StepResult", [3, 0.5, [], []]], None]),
        ("Plan", [[0, 1], 1, [], [], [], [], ""]),
        ("Plan", [[[0], [1.0]], 1, [], [], [], [], ""]),
        ("Plan", [[[0]], 1, [[0, 0]], [], [], [], ""]),
    ],
)
def test_a_field_of_another_type_is_rejected(name: str, fields: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(msgpack.packb([VERSION, 1, name, fields]))


def test_a_frame_that_is_too_large_is_not_decoded() -> None:
    largest = encode(Abort("x" * (MAX_FRAME_BYTES - 100), 1), 1)
    assert decode(largest)[0] == 1
    with pytest.raises(ProtocolError, match="too large"):
        decode(largest + b"\0" * 100)


@pytest.mark.parametrize(
    "bomb",
    [
        b"\xdd\xff\xff\xff\xff",  # an array that declares 4 G entries
        b"\xdb\xff\xff\xff\xff",  # a string that declares 4 GB
        b"\x91" * 100_000,  # nested 100,000 deep
        b"\xdf\xff\xff\xff\xff\x01",
    ],
)
def test_a_frame_that_declares_more_than_it_contains_is_rejected(bomb: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(bomb)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_messages_are_frozen_plain_and_unpickled(kind: type) -> None:
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert not hasattr(kind, "__dict__") or "__slots__" in vars(kind)


def test_text_that_is_not_utf8_round_trips() -> None:
    """A file name with a stray byte reaches Python as a lone surrogate."""
    name = str(Path(b"caf\xe9.py".decode("utf-8", "surrogateescape")))
    assert decode(encode(Abort(name, 1), 1))[1] == Abort(name, 1)


def test_ping_is_small() -> None:
    assert len(encode(Ping(), 1)) < 48
    assert len(encode(Hello(0, "host", 1), 1)) < 30


# Codecs of other classes.


@dataclasses.dataclass(frozen=True, slots=True)
class Circle:
    radius: float


@dataclasses.dataclass(frozen=True, slots=True)
class Square:
    side: int
    cause: Cause = Cause.LOST


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int


@dataclasses.dataclass(frozen=True, slots=True)
class Drawing:
    shapes: tuple[Circle | Square, ...]
    frame: Circle
    best: Circle | Square | None
    origin: Point | None
    points: tuple[Point, ...] = ()


SHAPES: Codec[Drawing | Circle] = Codec((Drawing, Circle))
DRAWING = Drawing((Square(2), Circle(1.0)), Circle(3.0), None, Point(1), (Point(2),))


def round_trip(codec: Codec[Any], value: Any) -> Any:
    name, fields = type(value).__name__, codec.fields(value)
    return codec.read(name, msgpack.unpackb(msgpack.packb(fields, default=codec.to_builtin)))


def test_a_class_of_a_union_has_its_name_wherever_it_occurs() -> None:
    plain = msgpack.unpackb(msgpack.packb(SHAPES.fields(DRAWING), default=SHAPES.to_builtin))
    circle = ["Circle", [3.0]]
    assert plain == [[["Square", [2, "lost"]], ["Circle", [1.0]]], circle, None, [1], [[2]]]
    assert round_trip(SHAPES, DRAWING) == DRAWING
    assert round_trip(SHAPES, Circle(1.0)) == Circle(1.0)  # its name is an argument of its own


@given(st.from_type(Drawing))
def test_nested_classes_round_trip(drawing: Drawing) -> None:
    read = round_trip(SHAPES, drawing)
    assert repr(read) == repr(drawing)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, [["Point", [1]]], r"^Invalid value - at `\$\[0\]\[0\]\[0\]`$"),
        (0, [["Circle", ["1"]]], "^Expected `float`, got `str`"),
        (0, [["Circle", []]], "^Expected `array` of .*length 1, got 0"),
        (0, [[1.0]], "^Expected `str`, got `float`"),
        (0, [None], "^Expected `array`, got `null`"),
        (0, [["Square", [2, "none"]]], "^Invalid value - at"),
        (0, "Circle", "^Expected `array`, got `str`"),
        (1, ["Square", [2, "lost"]], "^Invalid value - at"),
        (1, [3.0], "^Expected `array` of .*length 2, got 1"),
        (1, None, "^Expected `array`, got `null`"),
        (2, ["Point", [1]], "^Invalid value - at"),
        (2, [], "^Expected `array` of at least length 1, got 0"),
        (3, ["Point", [1]], "^Expected `int`, got `str`"),  # it is in no union: it has no name
        (4, [["Point", [1]]], "^Expected `int`, got `str`"),
        (4, [None], "^Expected `array`, got `null`"),
    ],
)
def test_a_value_that_is_no_member_of_a_union_is_rejected(at: int, value: Any, why: str) -> None:
    fields = msgpack.unpackb(msgpack.packb(SHAPES.fields(DRAWING), default=SHAPES.to_builtin))
    fields[at] = value
    with pytest.raises(ProtocolError, match=why):
        SHAPES.read("Drawing", fields)


@pytest.mark.parametrize("name", ["Square", "Point", "drawing", "", None, 1, b"Circle", ["Circle"]])
def test_only_the_classes_of_a_codec_are_read_by_name(name: Any) -> None:
    """The classes of their fields are not read on their own."""
    with pytest.raises(ProtocolError, match="unknown message"):
        SHAPES.read(name, [1.0])


@pytest.mark.parametrize("types", [["x"] * (MOST_TYPES + 1), ["x" * (LONGEST_NAME + 1)], [1], "x"])
def test_names_of_types_are_bounded(types: Any) -> None:
    for name, fields in (
        (
            "Described",
            [0, ["Linear"], [], [], 0, types, [], [], [], [], 0, [], None, None, [], [], ""],
        ),
        ("Plan", [[[0, 0, 1, "auto"]], [], [], [], "0F0", [[0]], types, 0]),
    ):
        with pytest.raises(ProtocolError):
            decode(msgpack.packb([VERSION, 1, name, fields]))
        fields[fields.index(types)] = ["x" * LONGEST_NAME] * 2
        assert decode(msgpack.packb([VERSION, 1, name, fields]))
