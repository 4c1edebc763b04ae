"""The structure of nested values: registered classes cross by number; invalid data is refused."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import msgpack
import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list

from pipeworker.errors import PipeworkerError, ProtocolError
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport.structure import MAX_DEPTH, MAX_ITEMS, TypeRegistry

Pair = namedtuple("Pair", "left right")


class Point(NamedTuple):
    x: Any
    y: Any = 0

    @property
    def flipped(self) -> Point:
        return Point(self.y, self.x)


@dataclass
class State:
    x: Any
    note: Any = None


class Mode(Enum):
    PLAIN = 1
    OTHER = "2"


class Cold(Enum):
    NIGHT = 1


class Level(IntEnum):
    LOW = 1


class Bag:
    """A node whose context is plain data: tuples, numbers and dicts in it keep their types."""

    def __init__(self, items: list[Any], context: Any) -> None:
        self.items, self.context = items, context

    def __repr__(self) -> str:
        return f"Bag({self.items}, {self.context})"


class Dumped:
    """A node whose context is not plain data, with functions that convert it."""

    def __init__(self, x: Any, shift: complex) -> None:
        self.x, self.shift = x, shift


class Late:
    def __init__(self, x: Any) -> None:
        self.x = x


pytree.register_dataclass(State)
pytree.register_pytree_node(Bag, lambda b: (b.items, b.context), lambda c, k: Bag(list(c), k))
pytree.register_pytree_node(
    Dumped,
    lambda d: ([d.x], d.shift),
    lambda c, k: Dumped(next(iter(c)), k),
    serialized_type_name="structure.Dumped",
    to_dumpable_context=lambda k: json.dumps([k.real, k.imag]),
    from_dumpable_context=lambda text: complex(*json.loads(text)),
)
pytree.register_pytree_node(Late, lambda v: ([v.x], None), lambda c, _: Late(*c))
TYPES = TypeRegistry(
    (Pair, Point, State, Mode, Level, Bag, Dumped, torch.Size, immutable_list, immutable_dict)
)
X = torch.arange(6.0)


def cross(value: Any) -> Any:
    """Return the value at the other end, with the same tensors."""
    frame, tensors = frames.describe(value, TYPES)
    assert frames.matches(frame, value, TYPES) == tensors
    there = frames.from_bytes(frames.to_bytes(frame), TYPES)
    assert there == frame
    return frames.assemble(there, tensors, TYPES)


def shown(value: Any) -> Any:
    """Return a form that is equal for values whose parts are equal, their types included."""
    if isinstance(value, (Bag, Dumped, State)):
        return type(value), shown(vars(value))
    if isinstance(value, defaultdict):
        return defaultdict, value.default_factory, shown(dict(value))
    if isinstance(value, dict):
        return type(value), [(repr(key), shown(item)) for key, item in value.items()]
    if isinstance(value, deque):
        return deque, value.maxlen, shown(list(value))
    if isinstance(value, (list, tuple)):
        return type(value), [shown(item) for item in value]
    return (type(value), id(value)) if isinstance(value, torch.Tensor) else repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Pair(X, (X,)),
        Point(X, Pair(1, None)),
        X.reshape(2, 3).max(1),
        torch.linalg.slogdet(torch.eye(3)),
        State(X, "kept"),
        State(None, [X, State(X)]),
        {Mode.OTHER: X, Level.LOW: 1, 1: 2, "1": 3},
        {True: X, 0: 0, 2.5: 1, None: 2, b"\xff": 3, -1.5: 4},
        {"b": 1, "a": 2},
        {(1, "a"): X, ((), (True,)): 2},
        OrderedDict([("b", X), (7, X)]),
        defaultdict[str, Any](list, {"k": X}),
        defaultdict(None, {3: X}),
        deque([X, 1]),
        deque([X], 3),
        {"shape": X.shape, "empty": torch.Size()},
        immutable_list([X]),
        immutable_dict({"a": X}),
        Bag([X, 1], [1, True, 1.0, -0.0, None, "x", b"x", (1, [2]), {"k": (), 3: Mode.PLAIN}]),
        Bag([], (math.inf, 2**63, -(2**63))),
        Bag([X], [Pair(1, Bag([2], None)), OrderedDict(a=deque([-0.0], 3))]),
        Dumped(X, 1 - 2j),
        [[], (), {}, [[()]]],
        [math.nan, math.inf, -0.0, 0.0, 1, True, 1.0],
        [1 + 2j, complex(-0.0, math.nan), -1j, {1j: X, (0, 1 - 0j): 2}],
        [slice(None), slice(1, 2**70, -3), range(3), range(5, -5, -2), {range(2): X}],
        [torch.float32, torch.bfloat16, torch.bool, torch.complex64, {torch.int64: X}],
        [2**100, -(2**100), 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, {2**100: X}],
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_arrives_unchanged(value: Any) -> None:
    assert shown(cross(value)) == shown(value)


@pytest.mark.parametrize(
    ("known", "other"),
    [
        ({1: X}, {True: X}),
        ({1: X}, {1.0: X}),
        ({1: X}, {Level.LOW: X}),
        ({0.0: X}, {-0.0: X}),
        (Bag([X], (1,)), Bag([X], (True,))),
        (Bag([X], (1,)), Bag([X], [1])),
        (Pair(X, 1), Point(X, 1)),
        (Pair(X, 1), (X, 1)),
        (State(X, None), State(None, X)),
        (deque([X]), deque([X], 2)),
        (defaultdict[str, Any](list, a=X), defaultdict[str, Any](dict, a=X)),
        ({"a": X}, OrderedDict(a=X)),
        ([1 + 0j], [1.0]),
        ([complex(0.0, -0.0)], [0j]),
        ([slice(0, 3, 1)], [range(0, 3, 1)]),
        ([range(0)], [range(1, 1)]),
        ([torch.float32], ["float32"]),
        ([torch.float32], [torch.float64]),
        (X, [X]),
        (1, X),
    ],
    ids=str,
)
def test_values_that_differ_in_a_type_alone_do_not_match(known: Any, other: Any) -> None:
    for one, two in ((known, other), (other, known)):
        frame, _ = frames.describe(one, TYPES)
        assert frames.matches(frame, one, TYPES) is not None
        assert frames.matches(frame, two, TYPES) is None


def test_a_context_that_has_changed_does_not_match() -> None:
    value = Bag([X], ["a"])
    frame, _ = frames.describe(value, TYPES)
    value.context.append("b")
    assert frames.matches(frame, value, TYPES) is None


def test_the_sender_refuses_a_class_that_was_not_agreed_on_by_name() -> None:
    with pytest.raises(PipeworkerError, match=r"test_transport_structure\.Late cannot pass.*top"):
        frames.describe([Late(X)], TYPES)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (defaultdict(lambda: 1), "a defaultdict of .* cannot pass.*make it a dict"),
        (Bag([X], X), r"the context of a registered class has tensor\("),
        (Bag([X], {(1, ...): 2}), r"a dict has the key Ellipsis"),
        ([Mode.PLAIN], "a Mode cannot pass"),
        ({Cold.NIGHT: 1}, "a dict has the key <Cold.NIGHT: 1>"),
    ],
    ids=["factory", "context", "key in a context", "enum", "unknown enum"],
)
def test_a_value_that_cannot_be_described_is_refused(value: Any, message: str) -> None:
    with pytest.raises(PipeworkerError, match=message):
        frames.describe(value, TYPES)


def test_a_value_may_nest_deeply_but_not_contain_itself() -> None:
    value: Any = X
    for _ in range(MAX_DEPTH):
        value = [value]
    assert shown(cross(value)) == shown(value)
    itself: list[Any] = []
    itself.append(itself)
    inner = Bag([], None)
    inner.context = (inner, itself)
    for deep in ([value], itself, [Bag([], itself)]):
        with pytest.raises(PipeworkerError, match=r"a list cannot pass.*nests too deeply"):
            frames.describe(deep, TYPES)
    with pytest.raises(PipeworkerError, match="nests too deeply"):
        frames.describe(inner, TYPES)


def test_a_size_of_something_else_than_numbers_is_reported_as_one_error() -> None:
    frame, _ = frames.describe(X.shape, TYPES)
    there = frames.from_bytes(frames.to_bytes(replace(frame, leaves=("six",))), TYPES)
    with pytest.raises(PipeworkerError, match=r"a torch\.Size could not be made of what arrived"):
        frames.assemble(there, [], TYPES)


def test_an_error_of_a_registered_class_is_reported_as_one_error() -> None:
    frame, tensors = frames.describe(State(X, "kept"), TYPES)
    header = frames.to_bytes(frame).replace(b"note", b"nose")
    with pytest.raises(
        PipeworkerError, match=r"State could not be made of what arrived.*TypeError.*nose"
    ):
        frames.assemble(frames.from_bytes(header, TYPES), tensors, TYPES)


PAIR, POINT, STATE, MODE, LEVEL, BAG = range(16, 22)
LAYOUT: list[Any] = [[2, 3], [3, 1], "float32", False, 0]
DEEP: Any = 0
for _ in range(MAX_DEPTH + 1):
    DEEP = [2, None, DEEP]
CONTEXTS: Any = 0  # each in the one before
for _ in range(MAX_DEPTH + 1):
    CONTEXTS = [BAG, [CONTEXTS]]
KEYS: Any = None
for _ in range(MAX_DEPTH + 2):
    KEYS = [4, [KEYS]]


@pytest.mark.parametrize(
    "structure",
    [
        *(1, None, True, 0.0, "list", [], [2], ["list", None], [2, 0], [2, None, False], DEEP),
        *([0, None], [7, None], [-1, None], [15, None], [2.0, None], [26, None], [2**64 - 1, None]),
        *([3, None], [3, ["a"]], [3, "a", 0], [3, ["a", "a"], 0, 0], [3, [1], 0], [3, [[]], 0]),
        *([3, [[0, 2]], 0], [3, [[1, True]], 0], [3, [[2, "1"]], 0], [3, [[2, "0x1p+9999"]], 0]),
        *([3, [[3, 3, "NONE"]], 0], [3, [[3, 0, "_fields"]], 0], [3, [[3, 99, "A"]], 0]),
        *([3, [[3, 3, "name"]], 0], [3, [[4, "a"]], 0], [3, [[7, 1]], 0], [3, {"a": 0}, 0]),
        *([3, [[5, "0x1"]], 0], [3, [[5, 2**63]], 0], [3, [[5, "0X8000000000000000"]], 0]),
        *([3, [[5, ""]], 0], [3, [[5, "0x_8000000000000000"]], 0], [3, [[5, "zz"]], 0]),
        *([3, [[6, ["0x0.0p+0"]]], 0], [3, [[6, ["0x0.0p+0", "1"]]], 0], [3, [[6, [0, 0]]], 0]),
        *([3, [[8, [[1, 1]] * 2]], 0], [3, [[8, [[1, 1], None, [1, 1]]]], 0], [3, [[8, 3]], 0]),
        *([3, [[8, [[1, 1], [1, 2], [1, 0]]]], 0], [3, [[8, [[2, "0x1.0p+0"]] * 3]], 0]),
        *([3, [[7, [None, None, [4, ["a"]]]]], 0], [3, [[7, [[0, 1], None, None]]], 0]),
        *([3, [[9, "float33"]], 0], [3, [[9, "qint8"]], 0], [3, [[9, [1, 1]]], 0]),
        *([5, ["a"], 0], [5, [11, ["a"]], 0], [5, [-1, ["a"]], 0], [5, [0, []], 0]),
        *([6, -1], [6, 0, 0], [6, 2**63], [6, True], [6, "3"]),
        *([PAIR, None, 0], [PAIR, [], 0, 0], [MODE, None], [MODE, "PLAIN"], [MODE, [0, None]]),
        *([BAG, 1, 0], [BAG, True, 0], [BAG, [4, 1], 0], [BAG, [6, "a"], 0]),
        *([BAG, [6, "a", None, "a", None], 0], [BAG, [6, [5], None], 0], [BAG, DEEP, 0], CONTEXTS),
    ],
    ids=str,
)
def test_an_invalid_structure_is_refused(structure: Any) -> None:
    for leaves in ([], [None], [None, None]):
        with pytest.raises(ProtocolError):
            frames.from_bytes(msgpack.packb([structure, leaves, [], False]), TYPES)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((0, [2]), (0, [2, -3]), (0, [2, True]), (0, [2, 3.0]), (0, 6), (0, [2**62, 2**62])),
        *((1, [3]), (1, [3, -1]), (1, [1, 1]), (1, [2, 1]), (1, [2**62, 1]), (1, "31")),
        *((2, "float33"), (2, 1), (2, b"float32"), (2, "quint8"), (2, "torch.float32")),
        *((3, 0), (3, None), (4, -1), (4, 64), (4, False), (4, 0.0)),
    ],
    ids=str,
)
def test_an_invalid_layout_is_refused(field: int, value: Any) -> None:
    good = LAYOUT.copy()
    assert frames.from_bytes(msgpack.packb([0, [0], [good], False])).tensors[0].plain
    good[field] = value
    with pytest.raises(ProtocolError):
        frames.from_bytes(msgpack.packb([0, [0], [good], False]))


@pytest.mark.parametrize(
    "parts",
    [
        *([0, [0]], [0, [0], [LAYOUT], 0], [0, [0], [LAYOUT[:4]]], [0, [0], {}], {0: 1}, 7),
        *([0, [], []], [0, [0, 0], [LAYOUT]], [0, 0, [LAYOUT]], [0, [0], []], [0, [-1], [LAYOUT]]),
        *([0, [1], [LAYOUT, LAYOUT]], [0, [0], [LAYOUT, LAYOUT]], [0, [False], [LAYOUT]]),
        *([0, [[0, 1, 2]], []], [0, [[3, 3, "PLAIN"]], []], [0, [[4]], []], [0, [2.5], []]),
        *([0, [[6, [1, 2]]], []], [0, [[9, {}]], []], [0, [[1, "float32"]], []], [0, [KEYS], []]),
        [[2, None, 0, 0], [1, 0], [LAYOUT, LAYOUT]],
        *([[2, None, 0, 0], [0, 2], [LAYOUT]], [[2, None, 0, 0], [0, -1], [LAYOUT]]),
        [[2, None, *[0] * 4097], list(range(4097)), [LAYOUT] * 4097],
        [0, [0], [[[1] * 65, [1] * 65, "float32", False, 0]]],
        [0, [msgpack.ExtType(5, b"")], []],
        [0, [msgpack.Timestamp(1)], []],
        [[2, None, *[0] * (MAX_ITEMS + 1)], [None] * (MAX_ITEMS + 1), []],
    ],
    ids=lambda parts: str(parts)[:60],
)
def test_an_inconsistent_header_is_refused(parts: Any) -> None:
    if isinstance(parts, list) and len(parts) == 3:
        parts = [*parts, False]
    with pytest.raises(ProtocolError):
        frames.from_bytes(msgpack.packb(parts, strict_types=False))


def test_lengths_in_a_header_allocate_nothing() -> None:
    """Nested arrays, each of which claims the greatest allowed length."""
    header = (b"\xdd" + (MAX_ITEMS * 4).to_bytes(4, "big")) * 1000
    with pytest.raises(ProtocolError, match="not a frame's header"):
        frames.from_bytes(header.ljust(1 << 20, b"\0"))
