"""What a value looks like on a channel: its structure, its tensors' layouts, its plain values.

Layouts keep strides and alignment, because kernels may add in another order for others: a tensor
that crosses a stage boundary must reach the next layer just as it would have in one process. The
same tensor at two places of a value stays one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
import torch

from pipeworker.errors import PipeworkerError
from pipeworker.worker.internals import pytree

_PLAIN = (bool, int, float, str, bytes, type(None))
_DTYPES = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}


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
        structure: how the leaves nest; None for a bare tensor.
        leaves: for each leaf the index of its tensor, or its plain value with what makes it exact.
        tensors: the distinct tensors.
    """

    structure: pytree.TreeSpec | None
    leaves: tuple[int | tuple[Any, str, str], ...]
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
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def describe(value: Any) -> tuple[Frame, list[torch.Tensor]]:
    """The frame of a value and its distinct tensors.

    Raises:
        PipeworkerError: a leaf is neither a tensor nor a plain value.
    """
    if isinstance(value, torch.Tensor):
        _check_dense(value)
        return Frame(None, (0,), (layout_of(value),)), [value]
    items, structure = pytree.tree_flatten(value)
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}
    leaves: list[int | tuple[Any, str, str]] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            _check_dense(item)
            if id(item) not in places:
                places[id(item)] = len(tensors)
                tensors.append(item)
            leaves.append(places[id(item)])
        elif type(item) in _PLAIN:
            # The type and the bits count: 1, 1.0 and True are equal, and so are 0.0 and -0.0.
            bits = item.hex() if isinstance(item, float) else ""
            leaves.append((item, type(item).__name__, bits))
        else:
            raise PipeworkerError(
                f"a {type(item).__name__} cannot pass from one stage to the next: only tensors and "
                "plain values (numbers, strings, bytes, None) can, in tuples, lists and dicts"
            )
    return Frame(structure, tuple(leaves), tuple(map(layout_of, tensors))), tensors


def matches(frame: Frame, value: Any) -> list[torch.Tensor] | None:
    """The distinct tensors of `value` if it looks as `frame` says, else None; quick when bare."""
    if frame.structure is not None or not isinstance(value, torch.Tensor):
        found, tensors = describe(value)
        return tensors if found == frame else None
    (layout,) = frame.tensors
    same = (
        value.shape == layout.shape
        and value.stride() == layout.stride
        and value.dtype is layout.dtype
        and value.requires_grad is layout.requires_grad
        and value.data_ptr() % ALIGNMENT == layout.offset
    )
    return [value] if same else None


def assemble(frame: Frame, tensors: Sequence[torch.Tensor]) -> Any:
    """The value of a frame from its distinct tensors."""
    if frame.structure is None:
        return tensors[0]
    items = [tensors[leaf] if isinstance(leaf, int) else leaf[0] for leaf in frame.leaves]
    return pytree.tree_unflatten(items, frame.structure)


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
    return tensor.permute(*dims, *rest)


def _aligned(count: int, layout: Layout, device: torch.device) -> torch.Tensor:
    """So many elements whose memory begins at the layout's offset."""
    size = layout.dtype.itemsize
    memory = torch.empty(count + ALIGNMENT // size, dtype=layout.dtype, device=device)
    start = (layout.offset - memory.data_ptr()) % ALIGNMENT // size
    return memory[start : start + count]


def to_bytes(frame: Frame) -> bytes:
    """The header of a frame that the receiver does not expect.

    Raises:
        PipeworkerError: the value's structure cannot be described without pickling.
    """
    try:
        structure = None if frame.structure is None else pytree.treespec_dumps(frame.structure)
        tensors = [
            [t.shape, t.stride, str(t.dtype).removeprefix("torch."), t.requires_grad, t.offset]
            for t in frame.tensors
        ]
        header: bytes = msgpack.packb([structure, frame.leaves, tensors])
        if from_bytes(header).structure != frame.structure:
            raise ValueError(f"{frame.structure} has keys that are not plain values")
    except (NotImplementedError, TypeError, OverflowError, ValueError) as error:
        raise PipeworkerError(f"the output of a stage cannot be described: {error}") from error
    return header


def from_bytes(header: bytes) -> Frame:
    """Read :func:`to_bytes`."""
    structure, leaves, tensors = msgpack.unpackb(header, use_list=False)
    return Frame(
        None if structure is None else pytree.treespec_loads(structure),
        leaves,
        tuple(
            Layout(shape, stride, _DTYPES[dtype], grad, offset)
            for shape, stride, dtype, grad, offset in tensors
        ),
    )


def _check_dense(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise PipeworkerError(
            f"a {tensor.layout} tensor cannot pass from one stage to the next: make it dense first"
        )
