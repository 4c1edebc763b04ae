"""Typed values to plain ones and back, every field checked, nothing pickled.

A frame of the control plane is the msgpack array ``[version, generation, name, [field, ...]]``.
Reading one either yields a message whose every field has its declared type, or raises
ProtocolError: a malformed frame cannot surface later as an odd value inside the coordinator.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

import msgpack

from pipeworker.errors import ProtocolError
from pipeworker.wire.messages.directions import FromWorker, Message, ToWorker
from pipeworker.wire.messages.presence import Hello

VERSION = 3
MAX_FRAME_BYTES = 16 << 20
_SHOWN = 256  # characters of a host's name
_ANY_TEXT = "surrogatepass"
"""How strings are encoded: every str comes through, file names that are not UTF-8 too."""

Reader = Callable[[Any], Any]
T = TypeVar("T")


class OtherVersion(ProtocolError):
    """A Hello in another version of the protocol; says whose."""


class Codec(Generic[T]):
    """A closed set of dataclasses, as plain values.

    A value is the list of its fields, in order. Where a field may hold one of several classes (a
    tagged union), these are ``[name, fields]`` wherever they occur.

    Args:
        kinds: the classes that may be read by name; what they hold is found.
    """

    def __init__(self, kinds: Iterable[Any]) -> None:
        kinds = tuple(kinds)
        self._tagged = {kind for hint in _hints(kinds) for kind in _members(hint)}
        self._made: dict[Any, Reader] = {}
        self._readers = {kind.__name__: self._fields(kind) for kind in kinds}

    def plain(self, value: Any) -> Any:
        """What a serializer does not know: an enum's value, the fields of a message."""
        if isinstance(value, Enum):
            return value.value
        fields = self.fields(value)
        return [type(value).__name__, fields] if type(value) in self._tagged else fields

    def fields(self, message: Any) -> list[Any]:
        """The fields of a message."""
        return [getattr(message, name) for name in type(message).__slots__]

    def read(self, name: Any, fields: Any) -> T:
        """The message of this name.

        Raises:
            ProtocolError: there is none, or a field is not of its type.
        """
        if type(name) is not str or name not in self._readers:
            raise ProtocolError("unknown message")
        message: T = self._readers[name](fields)
        return message

    def _fields(self, kind: Any) -> Reader:
        """Reads the fields of a class."""
        if kind in self._made:
            return self._made[kind]
        hints = typing.get_type_hints(kind)
        readers = tuple(self._reader(hints[field.name]) for field in dataclasses.fields(kind))

        def read(value: Any) -> Any:
            if type(value) is not list or len(value) != len(readers):
                raise ProtocolError(f"not the fields of {kind.__name__}")
            return kind(*[of(item) for of, item in zip(readers, value, strict=True)])

        self._made[kind] = read
        return read

    def _reader(self, hint: Any) -> Reader:
        origin = typing.get_origin(hint)
        if origin is tuple:
            (item, _) = typing.get_args(hint)
            return _tuple(self._reader(item), item if item in (int, float, str, bytes) else None)
        if origin in (types.UnionType, typing.Union):
            return self._union(hint)
        if issubclass(hint, Enum):
            return _enum(hint)
        if hint in self._tagged:
            return _tag({hint.__name__: self._fields(hint)})
        return self._fields(hint) if dataclasses.is_dataclass(hint) else _exactly(hint)

    def _union(self, hint: Any) -> Reader:
        args = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        if len(args) > 1:
            read = _tag({arg.__name__: self._fields(arg) for arg in args})
        else:
            read = self._reader(args[0])
        if types.NoneType not in typing.get_args(hint):
            return read
        return lambda value: None if value is None else read(value)


def _hints(kinds: Iterable[Any]) -> Iterator[Any]:
    """The types of all fields of some classes, and of the classes they hold."""
    seen: set[Any] = set()
    queue = list(kinds)
    while queue:
        hint = queue.pop()
        if hint in seen:
            continue
        seen.add(hint)
        yield hint
        queue += typing.get_args(hint)
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            queue += typing.get_type_hints(hint).values()


def _members(hint: Any) -> list[Any]:
    """The classes of a union of several."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return []
    found = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
    return found if len(found) > 1 else []


def _exactly(kind: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:
            raise ProtocolError(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return read


def _enum(kind: type[Enum]) -> Reader:
    members = {(type(member.value), member.value): member for member in kind}

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
        if kind is not None:  # one pass in C, for losses of many micro-batches
            if value and set(map(type, value)) != {kind}:
                raise ProtocolError(f"expected an array of {kind.__name__}")
            return tuple(value)
        return tuple(map(item, value))

    return read


def _tag(readers: dict[str, Reader]) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
            raise ProtocolError("expected a name and its fields")
        if value[0] not in readers:
            raise ProtocolError(f"expected one of {', '.join(readers)}")
        return readers[value[0]](value[1])

    return read


_FRAMES: Codec[Message] = Codec((*typing.get_args(FromWorker), *typing.get_args(ToWorker)))


def encode(message: Message, generation: int) -> bytes:
    """One frame. `generation` numbers the incarnation of the job the message belongs to."""
    frame: bytes = msgpack.packb(
        [VERSION, generation, type(message).__name__, _FRAMES.fields(message)],
        default=_FRAMES.plain,
        unicode_errors=_ANY_TEXT,
    )
    return frame


def decode(frame: bytes) -> tuple[int, Message]:
    """``(generation, message)``.

    Raises:
        OtherVersion: the frame is a Hello of another version.
        ProtocolError: it is not a message of this one.
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
        text = f"version {other}, this is version {VERSION}"
        if name == Hello.__name__ and type(fields) is list:
            match fields[:2]:
                case [int(rank), str(host)]:
                    raise OtherVersion(f"rank {rank} on {host[:_SHOWN]} speaks {text}")
        raise ProtocolError(text)
    if type(generation) is not int:
        raise ProtocolError("unknown message")
    return generation, _FRAMES.read(name, fields)
