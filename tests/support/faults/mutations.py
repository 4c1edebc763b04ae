"""Damaged data for readers: hypothesis strategies that change valid bytes and values."""

from __future__ import annotations

import json
from typing import Any

import msgpack
from hypothesis import strategies as st

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(0, 20)
    | st.sampled_from([1 << 15, 1 << 31, 1 << 32, 1 << 53])
    | st.floats()
    | st.sampled_from(["", "float32", "int4", "quint8", "0x1p+0", "PLAIN", "os", "os:system"])
    | st.text(max_size=3)
    | st.binary(max_size=3),
    lambda inside: st.lists(inside, max_size=6) | st.dictionaries(st.text(max_size=2), inside),
    max_leaves=12,
)


@st.composite
def mutated(draw: st.DrawFn, valid: list[bytes]) -> bytes:
    """Draw valid data with a few changed bytes."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(data)


@st.composite
def replaced(draw: st.DrawFn, valid: list[Any]) -> Any:
    """Draw a valid value in which one part is replaced."""

    def put(value: Any) -> Any:
        if isinstance(value, (list, dict)) and value and draw(st.integers(0, 5)):
            places = list(value) if isinstance(value, dict) else list(range(len(value)))
            at = draw(st.sampled_from(places))
            copy = value.copy()
            copy[at] = put(value[at])
            return copy
        return draw(plain)

    return put(draw(st.sampled_from(valid)))


def msgpacked(some: list[bytes]) -> st.SearchStrategy[bytes]:
    right = [msgpack.unpackb(data, strict_map_key=False) for data in some]
    return st.binary(max_size=60) | mutated(some) | (replaced(right) | plain).map(msgpack.packb)


def jsons(some: list[bytes]) -> st.SearchStrategy[bytes]:
    def dump(value: Any) -> bytes:
        text = json.dumps(value, default=lambda _: "bytes")
        return text.replace('"PLAIN"', r'"\ud800"').encode()  # half a character

    right = [json.loads(data) for data in some]
    deep = st.integers(1, 10_000).map(lambda n: b"[" * n)
    long = st.just(b"1" * 5000)
    return (
        st.binary(max_size=60) | mutated(some) | (replaced(right) | plain).map(dump) | deep | long
    )


def texts(some: list[str]) -> st.SearchStrategy[str]:
    return st.text(max_size=30) | mutated([text.encode() for text in some]).map(
        lambda data: data.decode(errors="replace")
    )
