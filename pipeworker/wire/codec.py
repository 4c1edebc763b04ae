"""Messages to frames and back: msgpack, every field checked, nothing pickled.

A frame is the msgpack array ``[version, generation, name, [field, field, ...]]``. Reading a frame
either yields a message whose every field has its declared type, or raises ProtocolError: a
malformed frame cannot surface later as an odd value inside the coordinator.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any

import msgpack

from pipeworker.errors import ProtocolError
from pipeworker.wire import messages

VERSION = 1
MAX_FRAME_BYTES = 16 << 20
_ANY_TEXT = "surrogatepass"
"""How strings are encoded: every str comes through, file names that are not UTF-8 too."""

Reader = Callable[[Any], Any]


def _exactly(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ProtocolError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return read


def _enum(kind: type[Enum]) -> Reader:
    members = {(type(value), value): member for value, member in kind._value2member_map_.items()}

    def read(value: Any) -> Any:
        try:
            return members[type(value), value]
        except (KeyError, TypeError):
            raise ProtocolError(f"not a {kind.__name__}") from None

    return read


def _tuple(item: Reader, kind: type | None) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not list:
            raise ProtocolError("expected an array")
        if kind is not None:  # one pass in C for the long case, gradient norms
            if value and set(map(type, value)) != {kind}:
                raise ProtocolError(f"expected an array of {kind.__name__}")
            return tuple(value)
        return tuple(map(item, value))

    return read


def _optional(item: Reader) -> Reader:
    return lambda value: None if value is None else item(value)


def _reader(hint: Any) -> Reader:
    origin = typing.get_origin(hint)
    if origin is tuple:
        (item, _) = typing.get_args(hint)
        return _tuple(_reader(item), item if item in (int, float, str, bytes) else None)
    if origin in (types.UnionType, typing.Union):
        (item,) = (arg for arg in typing.get_args(hint) if arg is not types.NoneType)
        return _optional(_reader(item))
    if issubclass(hint, Enum):
        return _enum(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _message_reader(hint)
    return _exactly(hint)


def _message_reader(kind: type) -> Reader:
    hints = typing.get_type_hints(kind)
    readers = tuple(_reader(hints[field.name]) for field in dataclasses.fields(kind))

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != len(readers):
            raise ProtocolError(f"not the fields of {kind.__name__}")
        return kind(*[read_field(item) for read_field, item in zip(readers, value, strict=True)])

    return read


def _plain(value: Any) -> Any:
    """The fallback of msgpack for what is not a plain value."""
    if isinstance(value, Enum):
        return value.value
    return [getattr(value, name) for name in type(value).__slots__]


_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (*typing.get_args(messages.FromWorker), *typing.get_args(messages.ToWorker))
}
_READERS = {name: _message_reader(kind) for name, kind in _KINDS.items()}


def encode(message: messages.Message, generation: int) -> bytes:
    """One frame. `generation` numbers the incarnation of the job the message belongs to."""
    frame: bytes = msgpack.packb(
        [VERSION, generation, type(message).__name__, _plain(message)],
        default=_plain,
        unicode_errors=_ANY_TEXT,
    )
    return frame


def decode(frame: bytes) -> tuple[int, messages.Message]:
    """``(generation, message)``.

    Raises:
        ProtocolError: the frame is not a message of this version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError("the frame is too large")
    try:
        parts = msgpack.unpackb(frame, strict_map_key=True, use_list=True, unicode_errors=_ANY_TEXT)
    except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own kinds
        raise ProtocolError(f"not msgpack: {type(error).__name__}") from error
    if type(parts) is not list or len(parts) != 4:
        raise ProtocolError("not a frame")
    version, generation, name, fields = parts
    if type(version) is not int or version != VERSION:
        other = version if type(version) is int else type(version).__name__
        raise ProtocolError(f"version {other}, this is version {VERSION}")
    if type(generation) is not int or type(name) is not str or name not in _READERS:
        raise ProtocolError("unknown message")
    return generation, _READERS[name](fields)
