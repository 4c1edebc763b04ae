"""What a value looks like on a channel: its structure, its tensors' layouts, its plain values.

Layouts keep strides and alignment, because kernels may add in another order for others: a tensor
that crosses a stage boundary must reach the next layer just as it would have in one process. The
same tensor at two places of a value stays one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import msgpack
import torch

from pipeworker.errors import PipeworkerError, ProtocolError
from pipeworker.worker.transport import structure as structures
from pipeworker.worker.transport.structure import LEAF, NONE, Coded, Kinds, Structure

MOST_TENSORS = 128
MOST_HEADER_BYTES = 16 << 20
_MOST_DIMS = 64
_REMEMBERED_BYTES = 16 << 10
_WORD = 1 << 63  # bytes, and torch counts no further
_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

ALIGNMENT = 64
"""Bytes: what the allocators align to, and the most that a kernel may look at."""


@dataclass(frozen=True)
class Layout:
    """How one tensor lies in memory: shape and stride in elements, offset in bytes from 64 up."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    offset: int = 0

    @cached_property
    def plain(self) -> bool:
        """Whether the tensor is contiguous, as nearly all are."""
        return _plain_stride(self.shape) == self.stride

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """Shape of the contiguous tensor that moves for this layout."""
        return self.shape if self.plain else self.order()[1]

    @cached_property
    def dense(self) -> bool:
        """Whether the packed elements, where they are, can be seen as the tensor."""
        dims, sizes = self.order()
        reach = 1
        for dim, size in zip(reversed(dims), reversed(sizes), strict=True):
            if self.stride[dim] != reach and size > 1:
                return self.plain
            reach *= size
        return True

    @cached_property
    def memory(self) -> Hashable:
        """Equal for layouts that can be received into the same memory."""
        return self.packed, self.dtype, self.start

    @cached_property
    def start(self) -> int:
        """The offset of the memory to receive in: the tensor's, where it is only viewed there."""
        return self.offset if self.dense and self.offset % self.dtype.itemsize == 0 else 0

    def order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dims that move, outermost first, and their sizes: stride-0 dims move as one."""
        dims = [
            d for d, (n, s) in enumerate(zip(self.shape, self.stride, strict=True)) if s or n == 0
        ]
        dims.sort(key=lambda d: -self.stride[d])
        return tuple(dims), tuple(self.shape[d] for d in dims)


@dataclass(frozen=True)
class Frame:
    """What both ends of a channel must agree on before tensors can move without a header.

    Attributes:
        structure: how the leaves nest.
        leaves: for each leaf the index of its tensor, or its plain value with what makes it exact.
        tensors: the distinct tensors.
    """

    structure: Structure
    leaves: tuple[int | Coded, ...]
    tensors: tuple[Layout, ...]

    @cached_property
    def dense(self) -> bool:
        """Whether no tensor has to be rearranged on arrival."""
        return all(layout.dense for layout in self.tensors)

    @cached_property
    def moves(self) -> bool:
        """Whether anything moves: a frame without elements gives a receiver nothing to wait for."""
        return any(0 not in layout.shape for layout in self.tensors)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout to keep; a tensor whose elements share memory is sent as a plain one."""
    shape = tuple(tensor.shape)
    stride = _plain_stride(shape) if _overlaps(tensor) else tensor.stride()
    offset = tensor.data_ptr() % ALIGNMENT
    return Layout(shape, stride, tensor.dtype, tensor.requires_grad, offset)


def _plain_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements share memory other than by a dim of stride 0."""
    return not tensor.is_contiguous() and _reach(tensor.shape, tensor.stride()) is None


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """From the first element to the last; None where two lie on each other, of strides but 0."""
    reach = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return None
            reach += stride * (size - 1)
    return reach


def describe(value: Any, kinds: Kinds = NONE) -> tuple[Frame, list[torch.Tensor]]:
    """The frame of a value and its distinct tensors.

    Args:
        kinds: the classes of the job that may pass.

    Raises:
        PipeworkerError: it holds what cannot pass.
    """
    if isinstance(value, torch.Tensor):
        _check_dense(value)
        return Frame(LEAF, (0,), (layout_of(value),)), [value]
    leaves, tensors, structure = _parts(value, kinds)
    for tensor in tensors:
        _check_dense(tensor)
    return Frame(structure, leaves, tuple(map(layout_of, tensors))), tensors


def _parts(
    value: Any, kinds: Kinds
) -> tuple[tuple[int | Coded, ...], list[torch.Tensor], Structure]:
    items, structure = structures.take_apart(value, kinds)
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}
    leaves: list[int | Coded] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            place = places.setdefault(id(item), len(tensors))
            if place == len(tensors):
                tensors.append(item)
            leaves.append(place)
        elif type(item) in structures.PLAIN:
            leaves.append(structures.coded_scalar(item))
        else:
            raise PipeworkerError(
                f"a {type(item).__name__} cannot pass from one stage to the next: only tensors and "
                "plain values (numbers, strings, bytes, None) can, in tuples, lists and dicts"
            )
    return tuple(leaves), tensors, structure


def matches(frame: Frame, value: Any, kinds: Kinds = NONE) -> list[torch.Tensor] | None:
    """The distinct tensors of `value` if it looks as `frame` says, else None."""
    if isinstance(value, torch.Tensor):
        if frame.structure != LEAF or not frame.tensors:
            return None
        return [value] if _looks(value, frame.tensors[0]) else None
    leaves, tensors, structure = _parts(value, kinds)
    if structure != frame.structure or leaves != frame.leaves:
        return None
    for tensor, layout in zip(tensors, frame.tensors, strict=True):
        if not _looks(tensor, layout):
            return None
    return tensors


def _looks(tensor: torch.Tensor, layout: Layout) -> bool:
    """Whether the layout is that of the tensor; quicker than to make its own."""
    return (
        tensor.shape == layout.shape
        and tensor.dtype is layout.dtype
        and tensor.requires_grad is layout.requires_grad
        and tensor.layout is torch.strided
        and tensor.data_ptr() % ALIGNMENT == layout.offset
        and (tensor.stride() == layout.stride or layout_of(tensor) == layout)
    )


def assemble(frame: Frame, tensors: Sequence[torch.Tensor], kinds: Kinds = NONE) -> Any:
    """The value of a frame from its distinct tensors.

    Raises:
        PipeworkerError: what the user registered for a class does not take what arrived.
    """
    if frame.structure == LEAF and tensors:
        return tensors[0]
    items = [
        tensors[leaf] if type(leaf) is int else structures.decoded(leaf, NONE, 0)
        for leaf in frame.leaves
    ]
    return structures.put_together(frame.structure, iter(items), kinds)


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor that move, as one contiguous tensor; a view where it can be."""
    tensor = tensor.detach()
    resolved = tensor
    if tensor.is_conj() or tensor.is_neg():  # marks that are not in the bytes
        resolved = tensor.resolve_conj().resolve_neg()
    if resolved.is_contiguous():
        return resolved
    if _overlaps(tensor):
        return resolved.contiguous()
    return _moving(resolved, layout_of(tensor)).contiguous()


def unpack(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor of this layout from its packed elements; a view where it can be."""
    if layout.dense and flat.data_ptr() % ALIGNMENT == layout.offset:
        if layout.plain:
            return flat.detach()
        return flat.as_strided(layout.shape, layout.stride, flat.storage_offset())
    reach = sum(s * (n - 1) for s, n in zip(layout.stride, layout.shape, strict=True) if n)
    memory = _aligned(reach + 1, layout, flat.device)
    whole = memory.as_strided(layout.shape, layout.stride, memory.storage_offset())
    target = _moving(whole, layout)
    target.copy_(flat.view(target.shape))
    return whole


def buffer_for(layout: Layout, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Memory to receive the packed elements of a layout in, where :func:`unpack` only views it."""
    size = math.prod(layout.packed) * layout.dtype.itemsize
    memory = allocate(size + ALIGNMENT)
    start = (layout.start - memory.data_ptr()) % ALIGNMENT
    return memory[start : start + size].view(layout.dtype).view(layout.packed)


def replica(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that lies in memory as the original does, down to its alignment."""
    return unpack(pack(tensor).clone(), layout_of(tensor))


def _moving(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The elements that move, in their order in memory: stride-0 dims as one, at the end."""
    dims, _ = layout.order()
    rest = [d for d in range(tensor.dim()) if d not in dims]
    for dim in rest:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute((*dims, *rest))


def _aligned(count: int, layout: Layout, device: torch.device) -> torch.Tensor:
    """So many elements whose memory begins at the layout's offset."""
    size = layout.dtype.itemsize
    memory = torch.empty(count + ALIGNMENT // size, dtype=layout.dtype, device=device)
    start = (layout.offset - memory.data_ptr()) % ALIGNMENT // size
    return memory[start : start + count]


def to_bytes(frame: Frame) -> bytes:
    """The header of a frame that the receiver does not expect.

    Raises:
        PipeworkerError: it has too many tensors or dimensions, or its plain values are too long.
    """
    if len(frame.tensors) > MOST_TENSORS:
        raise PipeworkerError(
            f"{len(frame.tensors)} tensors cannot pass from one stage to the next at once: "
            f"{MOST_TENSORS} can; stack some, or cut the model elsewhere with --balance"
        )
    tensors = [
        (t.shape, t.stride, _NAMES[t.dtype], t.requires_grad, t.offset) for t in frame.tensors
    ]
    if any(len(t.shape) > _MOST_DIMS for t in frame.tensors):
        raise PipeworkerError(
            f"a tensor of more than {_MOST_DIMS} dimensions cannot pass from one stage to the next"
        )
    try:
        header: bytes = msgpack.packb((frame.structure, frame.leaves, tensors))
    except (OverflowError, ValueError) as error:  # a number beyond 64 bits, half of a surrogate
        raise PipeworkerError(f"the output of a stage cannot be described: {error}") from error
    if len(header) > MOST_HEADER_BYTES:
        raise PipeworkerError(
            f"plain values of {len(header)} bytes cannot pass from one stage to the next: make "
            "tensors of them"
        )
    return header


def from_bytes(header: bytes, kinds: Kinds = NONE) -> Frame:
    """Read :func:`to_bytes`; every number of it is checked, and nothing is allocated by them.

    Raises:
        ProtocolError: it is not a header, or has a class that was not agreed on.
    """
    # Where shapes change, they often change together for all micro-batches.
    return (_remembered if len(header) <= _REMEMBERED_BYTES else _read)(header, kinds)


def _read(header: bytes, kinds: Kinds) -> Frame:
    try:
        parts = msgpack.unpackb(
            header, use_list=False, max_array_len=structures.MOST_ITEMS + 2, ext_hook=_no_extension
        )
    except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own kinds
        raise ProtocolError(f"not a frame's header: {type(error).__name__}") from error
    if type(parts) is not tuple or len(parts) != 3:
        raise ProtocolError("not a frame's header")
    structure, leaves, tensors = parts
    if type(leaves) is not tuple or structures.check(structure, kinds) != len(leaves):
        raise ProtocolError("a frame's leaves are not those of its structure")
    if type(tensors) is not tuple or len(tensors) > MOST_TENSORS:
        raise ProtocolError("a frame has too many tensors")
    count = 0
    for leaf in leaves:
        if type(leaf) is not int:
            structures.decoded(leaf, NONE, 0)
        elif not 0 <= leaf <= count:
            raise ProtocolError("a frame's leaf is none of its tensors")
        else:
            count += leaf == count
    if count != len(tensors):
        raise ProtocolError("a frame's leaves are not its tensors")
    return Frame(structure, leaves, tuple(map(_layout, tensors)))


_remembered = lru_cache(64)(_read)


def _no_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension {code}")


def _layout(plain: Any) -> Layout:
    if type(plain) is not tuple or len(plain) != 5:
        raise ProtocolError("not a tensor's layout")
    shape, stride, name, grad, offset = plain
    dtype = _DTYPES.get(name) if type(name) is str else None
    if (
        dtype is None
        or type(shape) is not tuple
        or type(stride) is not tuple
        or len(shape) != len(stride)
        or len(shape) > _MOST_DIMS
        or not set(map(type, shape + stride)) <= {int}
        or min(shape + stride, default=0) < 0
        or type(grad) is not bool
        or type(offset) is not int
        or not 0 <= offset < ALIGNMENT
    ):
        raise ProtocolError("not a tensor's layout")
    count, plain = 1, True
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        plain &= step == count
        count *= size or 1  # as torch does for an empty tensor
    reach = count if plain or 0 in shape else _reach(shape, stride)
    if reach is None:
        raise ProtocolError("the elements of a tensor overlap")
    if (max(reach, count) + ALIGNMENT) * dtype.itemsize >= _WORD:
        raise ProtocolError("a tensor is too large")
    return Layout(shape, stride, dtype, grad, offset)


def _check_dense(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise PipeworkerError(
            f"a {tensor.layout} tensor cannot pass from one stage to the next: make it dense first"
        )
