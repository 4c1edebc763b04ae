"""A frame: the structure, tensor layouts and plain values of a value, and its header's messages.

A tensor that occurs twice in a value stays one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property, lru_cache
from itertools import starmap
from struct import Struct
from typing import Annotated, Any

import msgpack
import msgspec
import torch
from msgspec import Meta

from pipeworker.errors import PipeworkerError, ProtocolError, a_type
from pipeworker.worker.transport import structure as structures
from pipeworker.worker.transport.layout import (
    ALIGNMENT,
    DTYPES,
    Layout,
    cannot_pass,
    check_dense,
    extent_of,
    has_layout,
    have_common_elements,
    layout_of,
)
from pipeworker.worker.transport.structure import LEAF, NO_TYPES, Encoded, Structure, TypeRegistry

MAX_TENSORS = 4096
MAX_POSTED = 128
"""Tensors of a frame whose receives are posted together: a link holds some 500 messages before it
makes its ends wait for each other, and several frames may be under way."""
MAX_HEADER_BYTES = 16 << 20
_MAX_DIMS = 64
_MAX_CACHED_BYTES = 16 << 10
_MAX_FRAMES = 4096
_WORD = 1 << 63  # torch counts bytes in 64 bits, signed
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_Numbers = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=_MAX_DIMS)]
_LayoutFields = tuple[_Numbers, _Numbers, str, bool, Annotated[int, Meta(ge=0, lt=ALIGNMENT)]]
_Layouts = Annotated[tuple[_LayoutFields, ...], Meta(max_length=MAX_TENSORS)]
_Header = tuple[Any, tuple[Any, ...], _Layouts, bool]


@dataclass(frozen=True)
class Frame:
    """The facts on which both ends of a channel must agree before tensors move without a header.

    Attributes:
        leaves: for each leaf the index of its tensor, or its encoded plain value.
        tensors: the layouts of the distinct tensors.
        common: whether two of these have elements in the same memory at the source.
    """

    structure: Structure
    leaves: tuple[int | Encoded, ...]
    tensors: tuple[Layout, ...]
    common: bool = False

    @cached_property
    def dense(self) -> bool:
        """Whether no tensor has to be rearranged on arrival."""
        return all(layout.dense for layout in self.tensors)

    @cached_property
    def has_elements(self) -> bool:
        """Whether any tensor has elements; otherwise a receiver has nothing to wait for."""
        return any(0 not in layout.shape for layout in self.tensors)


class KnownFrames(dict[tuple[int | None, int], Frame]):
    """The frames that both ends of a channel expect, by shape signature and micro-batch.

    Both ends learn and forget the same frames at the same time.
    """

    def learn(self, signature: int | None, number: int, frame: Frame) -> None:
        """Expect a frame from now on, if its mini-batch has a signature and a receive can wait.

        It cannot if the frame has no elements, or more tensors than can be posted together.
        """
        if signature is not None and frame.has_elements and len(frame.tensors) <= MAX_POSTED:
            last = next(reversed(self.values()), frame)
            self[signature, number] = last if last == frame else frame  # equal ones are shared
        else:
            self.pop((signature, number), None)

    def limit(self) -> None:
        """Forget all frames if there are too many, because shapes keep changing."""
        if len(self) > _MAX_FRAMES:
            self.clear()


def describe(value: Any, types: TypeRegistry = NO_TYPES) -> tuple[Frame, list[torch.Tensor]]:
    """Return the frame of a value and its distinct tensors."""
    if isinstance(value, torch.Tensor):
        check_dense(value)
        return Frame(LEAF, (0,), (layout_of(value),)), [value]
    leaves, tensors, structure = flatten(value, types)
    for tensor in tensors:
        check_dense(tensor)
    common = have_common_elements(tensors)
    return Frame(structure, leaves, tuple(map(layout_of, tensors)), common), tensors


def flatten(
    value: Any, types: TypeRegistry
) -> tuple[tuple[int | Encoded, ...], list[torch.Tensor], Structure]:
    """Return the leaves of a value as a :class:`Frame` has them, its tensors and its structure."""
    items, structure = structures.flatten(value, types)
    tensors: list[torch.Tensor] = []
    indices: dict[int, int] = {}
    leaves: list[int | Encoded] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            index = indices.setdefault(id(item), len(tensors))
            if index == len(tensors):
                tensors.append(item)
            leaves.append(index)
        elif type(item) in structures.PLAIN_TYPES:
            leaves.append(structures.encode_scalar(item))
        else:
            reason = (
                "only tensors and plain values (numbers, strings, bytes, None, slices, ranges, "
                "dtypes) can, in tuples, lists and dicts; convert it in the layer, as by list(), "
                "item() or str()"
            )
            if is_dataclass(item):
                register = f"torch.export.register_dataclass({type(item).__name__})"
                reason = f"its class is not registered; call {register} where it is defined"
            raise cannot_pass(a_type(item), reason)
    return tuple(leaves), tensors, structure


def matches(frame: Frame, value: Any, types: TypeRegistry = NO_TYPES) -> list[torch.Tensor] | None:
    """Return the distinct tensors of a value if `frame` is its frame, else None."""
    if isinstance(value, torch.Tensor):
        if frame.structure != LEAF or not frame.tensors:
            return None
        return [value] if has_layout(value, frame.tensors[0]) else None
    leaves, tensors, structure = flatten(value, types)
    if structure != frame.structure or leaves != frame.leaves:
        return None
    if have_common_elements(tensors) is not frame.common:
        return None
    return tensors if all(map(has_layout, tensors, frame.tensors)) else None


def assemble(frame: Frame, tensors: Sequence[torch.Tensor], types: TypeRegistry = NO_TYPES) -> Any:
    """Return the value of a frame and its distinct tensors."""
    if frame.structure == LEAF and tensors:
        return tensors[0]
    items = [
        tensors[leaf] if type(leaf) is int else structures.decode(leaf, NO_TYPES)
        for leaf in frame.leaves
    ]
    return structures.unflatten(frame.structure, iter(items), types)


def to_bytes(frame: Frame) -> bytes:
    """Encode a frame as a header, for a receiver that does not expect it."""
    if len(frame.tensors) > MAX_TENSORS:
        raise PipeworkerError(
            f"{len(frame.tensors)} tensors cannot pass from one stage to the next at once: "
            f"{MAX_TENSORS} can; stack some, or cut the model elsewhere with --balance"
        )
    tensors = [
        (t.shape, t.stride, _NAMES[t.dtype], t.requires_grad, t.offset) for t in frame.tensors
    ]
    if any(len(t.shape) > _MAX_DIMS for t in frame.tensors):
        raise cannot_pass(f"a tensor of more than {_MAX_DIMS} dimensions", "flatten some")
    try:
        header: bytes = msgpack.packb((frame.structure, frame.leaves, tensors, frame.common))
    except ValueError as error:  # half of a surrogate
        raise PipeworkerError(f"the output of a stage cannot be described: {error}") from error
    if len(header) > MAX_HEADER_BYTES:
        raise cannot_pass(f"plain values of {len(header)} bytes", "make tensors of them")
    return header


def from_bytes(header: bytes, types: TypeRegistry = NO_TYPES) -> Frame:
    """Decode the result of :func:`to_bytes`; every number is checked, and none allocates memory."""
    # Where shapes change, they often change in the same way for all micro-batches.
    return (_decode_cached if len(header) <= _MAX_CACHED_BYTES else _decode)(header, types)


def _decode(header: bytes, types: TypeRegistry) -> Frame:
    try:
        parts = msgpack.unpackb(header, use_list=False, max_array_len=structures.MAX_ITEMS + 2)
    except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own types
        raise ProtocolError(f"not a frame's header: {type(error).__name__}") from error
    try:
        structure, leaves, tensors, common = msgspec.convert(parts, _Header)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"not a frame's header: {error}") from error
    if structures.count_leaves(structure, types) != len(leaves):
        raise ProtocolError("a frame's leaves are not those of its structure")
    count = 0
    for leaf in leaves:
        if type(leaf) is not int:
            structures.decode(leaf, NO_TYPES)
        elif not 0 <= leaf <= count:
            raise ProtocolError("a frame's leaf is none of its tensors")
        else:
            count += leaf == count
    if count != len(tensors):
        raise ProtocolError("a frame's leaves are not its tensors")
    return Frame(structure, leaves, tuple(starmap(_decode_layout, tensors)), common)


_decode_cached = lru_cache(64)(_decode)


def _decode_layout(
    shape: tuple[int, ...], stride: tuple[int, ...], name: str, grad: bool, offset: int
) -> Layout:
    dtype = DTYPES.get(name)
    if dtype is None or len(shape) != len(stride):
        raise ProtocolError("not a tensor's layout")
    count, plain = 1, True
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        plain &= step == count
        count *= size or 1  # as torch does for an empty tensor
    extent = count if plain or 0 in shape else extent_of(shape, stride)
    if extent is None:
        raise ProtocolError("the elements of a tensor overlap")
    if (max(extent, count) + ALIGNMENT) * dtype.itemsize >= _WORD:
        raise ProtocolError("a tensor is too large")
    return Layout(shape, stride, dtype, grad, offset)


Messages = list[tuple[int, torch.Tensor]]
"""Tags and tensors."""

EXPECTED, HEADER, DESCRIBED, NOTICE = 0, 1, 2, 3
"""The tags: a tensor that both ends expect (on the bulk lane), the first part of a header, a tensor
or part of a header that a header announces, and a byte that precedes an expected frame."""
HEADER_BYTES = 1024
"""The size of the message with the first part of a header."""
HEAD = Struct("<2q")
"""The begin of that message: bytes of the whole header (0: none has come), micro-batch."""
PIECE_BYTES = 16 << 10
"""The most bytes of a further part."""


def header_messages(number: int, header: bytes) -> Messages:
    """Return a header as a message of fixed size, and further ones if it is longer."""
    room = HEADER_BYTES - HEAD.size
    first = HEAD.pack(len(header), number) + header[:room]
    messages = [(HEADER, bytes_tensor(first.ljust(HEADER_BYTES, b"\0")))]
    pieces = [header[i : i + PIECE_BYTES] for i in range(room, len(header), PIECE_BYTES)]
    return messages + [(DESCRIBED, bytes_tensor(piece)) for piece in pieces]


def bytes_tensor(data: bytes) -> torch.Tensor:
    """Return bytes as a uint8 tensor of its own memory."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
