"""The codec of control-plane frames: typed messages to bytes and back, every field checked.

A frame is the msgpack array ``[version, generation, name, [field, ...]]``. Decoding one either
yields a message whose every field has its declared type, or raises ProtocolError, so a malformed
frame cannot surface later as an odd value inside the coordinator. Nothing is pickled.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Generic, TypeVar

import msgpack
import msgspec
from msgspec.structs import astuple

from pipeworker.errors import ProtocolError
from pipeworker.wire.messages.directions import FromWorker, Message, ToWorker
from pipeworker.wire.messages.presence import Hello

VERSION = 21
MAX_FRAME_BYTES = 16 << 20
_MAX_HOST = 256  # characters of a host name that an error shows
_UNICODE_ERRORS = "surrogatepass"
"""How strings are encoded: file names that are not UTF-8 hold lone surrogates."""
_BUFFER_BYTES = 4096
"""Space that packing begins with: a worker without memory for more must still say what failed."""

Build = Callable[[Any], Any]
T = TypeVar("T")
_define_struct = functools.partial(msgspec.defstruct, array_like=True, forbid_unknown_fields=True)


class OtherVersion(ProtocolError):
    """A Hello in another version of the protocol; the text names its sender."""


class Codec(Generic[T]):
    """A closed set of dataclasses, converted to and from builtin values.

    A dataclass is the list of its fields, in order. A member of a union of several dataclasses (a
    tagged union) is ``[name, fields]`` wherever it occurs. Each dataclass has a ``msgspec.Struct``
    with the same fields, because msgspec reads neither dataclasses from lists nor unions of them.
    """

    def __init__(self, classes: Iterable[Any]) -> None:
        classes = tuple(classes)
        unions = map(_members, _hints(classes))
        self._tagged = {member for union in unions if len(union) > 1 for member in union}
        self._structs: dict[Any, tuple[Any, Build]] = {}
        self._tags: dict[Any, tuple[Any, Build]] = {}
        self._readers = {cls.__name__: self._struct(cls) for cls in classes}

    def to_builtin(self, value: Any) -> Any:
        """Return the value of an enum member, or the fields of a dataclass: a serializer's hook."""
        if isinstance(value, Enum):
            return value.value
        fields = self.fields(value)
        return [type(value).__name__, fields] if type(value) in self._tagged else fields

    def fields(self, message: Any) -> list[Any]:
        """Return the fields of a message, in order."""
        return [getattr(message, name) for name in type(message).__slots__]

    def read(self, name: Any, fields: Any) -> T:
        """Return the message of this name and these fields, none of which is checked yet.

        Raises:
            ProtocolError: the name is unknown, or a field does not have its type or range.
        """
        if type(name) is not str or name not in self._readers:
            raise ProtocolError("unknown message")
        struct, build = self._readers[name]
        try:
            checked = msgspec.convert(fields, struct, builtin_types=(bytes,))
        except ValueError as error:  # a text may have no encoding
            raise ProtocolError(_without_value(str(error))) from None
        message: T = build(checked)
        return message

    def _struct(self, cls: Any) -> tuple[Any, Build]:
        """Return the struct that checks the fields of a class, and what builds the class of it."""
        if cls not in self._structs:
            hints = typing.get_type_hints(cls)
            checks = {f.name: self._check(hints[f.name]) for f in dataclasses.fields(cls)}
            struct = _define_struct(cls.__name__, [(name, c[0]) for name, c in checks.items()])
            self._structs[cls] = struct, _constructor(cls, [build for _, build in checks.values()])
        return self._structs[cls]

    def _tag(self, cls: Any) -> tuple[Any, Build]:
        """Return the struct of ``[name, fields]``, and what builds the class of it."""
        if cls not in self._tags:
            fields, build = self._struct(cls)
            struct = _define_struct(cls.__name__, [("fields", fields)], tag=cls.__name__)
            self._tags[cls] = struct, lambda tagged: build(tagged.fields)
        return self._tags[cls]

    def _check(self, hint: Any) -> tuple[Any, Build | None]:
        """Return the type that msgspec checks a field by, and what builds the field, if needed."""
        origin = typing.get_origin(hint)
        if origin is tuple:
            (item, _) = typing.get_args(hint)
            checked, build = self._check(item)
            return types.GenericAlias(tuple, (checked, ...)), build and _each(build)
        if members := _members(hint):
            return self._union(members, optional=types.NoneType in typing.get_args(hint))
        if not dataclasses.is_dataclass(hint):
            return hint, None
        return self._tag(hint) if hint in self._tagged else self._struct(hint)

    def _union(self, members: list[Any], *, optional: bool) -> tuple[Any, Build | None]:
        """As :meth:`_check`, of an optional type or a union of dataclasses."""
        checked, build = self._check(members[0])
        if len(members) > 1:
            builds = dict(map(self._tag, members))
            checked, build = functools.reduce(operator.or_, builds), _by_type(builds)
        return (checked | None, build and _unless_none(build)) if optional else (checked, build)


def _hints(classes: Iterable[Any]) -> Iterator[Any]:
    """Yield the types of all fields of some classes, and of the classes in these."""
    seen: set[Any] = set()
    queue = list(classes)
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
    """Return the types of a union besides None, or an empty list for any other type."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return []
    return [arg for arg in typing.get_args(hint) if arg is not types.NoneType]


def _constructor(cls: Any, builds: list[Build | None]) -> Build:
    """Return a function that makes the dataclass of a checked struct."""
    needed = [(index, build) for index, build in enumerate(builds) if build is not None]

    def construct(struct: Any) -> Any:
        values = list(astuple(struct))
        for index, build in needed:
            values[index] = build(values[index])
        return cls(*values)

    return construct


def _each(build: Build) -> Build:
    return lambda values: tuple(map(build, values))


def _by_type(builds: dict[Any, Build]) -> Build:
    return lambda value: builds[type(value)](value)


def _unless_none(build: Build) -> Build:
    return lambda value: None if value is None else build(value)


def _without_value(text: str) -> str:
    """Return msgspec's error text without the value, which may be long or secret."""
    if text.startswith("Expected"):
        return text
    _, found, path = text.rpartition(" - at ")
    return f"Invalid value{found}{path}" if found else "Invalid value"


_FRAMES: Codec[Message] = Codec((*typing.get_args(FromWorker), *typing.get_args(ToWorker)))


def encode(message: Message, generation: int) -> bytes:
    """Return the frame of a message, in this generation of the workers."""
    frame: bytes = msgpack.packb(
        [VERSION, generation, type(message).__name__, _FRAMES.fields(message)],
        default=_FRAMES.to_builtin,
        unicode_errors=_UNICODE_ERRORS,
        buf_size=_BUFFER_BYTES,
    )
    return frame


def decode(frame: bytes) -> tuple[int, Message]:
    """Return ``(generation, message)``.

    Raises:
        OtherVersion: the frame is a Hello of another version.
        ProtocolError: the frame is not a message of this version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError("the frame is too large")
    try:
        parts = msgpack.unpackb(
            frame, strict_map_key=True, use_list=True, unicode_errors=_UNICODE_ERRORS
        )
    except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own kinds
        raise ProtocolError(f"not msgpack: {type(error).__name__}") from error
    if type(parts) is not list or len(parts) != 4:
        raise ProtocolError("not a frame")
    version, generation, name, fields = parts
    if type(version) is not int or version != VERSION:
        other = version if type(version) is int else type(version).__name__
        text = f"version {other}, this is version {VERSION}"
        match name, fields:
            case Hello.__name__, [int(rank), str(host), *_]:
                raise OtherVersion(f"rank {rank} on {host[:_MAX_HOST]}: it speaks {text}")
        raise ProtocolError(text)
    if type(generation) is not int:
        raise ProtocolError("unknown message")
    return generation, _FRAMES.read(name, fields)
