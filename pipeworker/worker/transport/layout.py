"""The memory layout of tensors that cross a stage boundary.

Strides and alignment are kept, because kernels may sum in another order for others: a tensor must
reach the next layer exactly as it would in one process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from pipeworker.errors import PipeworkerError, a_type
from pipeworker.worker.internals import storage_key

ALIGNMENT = 64
"""Bytes: the alignment of the allocators, and the most that a kernel may depend on."""


DTYPES = {
    str(d).removeprefix("torch."): d
    for d in vars(torch).values()
    if isinstance(d, torch.dtype) and not str(d).startswith("torch.q")
}
"""The dtypes of tensors that can pass, by name; those of quantized ones are not among them."""
_CLASSES = torch.Tensor, torch.nn.Parameter


def cannot_pass(what: str, reason: str) -> PipeworkerError:
    """Return the error of a value that cannot cross a stage boundary."""
    return PipeworkerError(f"{what} cannot pass from one stage to the next: {reason}")


@dataclass(frozen=True)
class Layout:
    """The layout of one tensor, and whether it requires grad at the source.

    Attributes:
        offset: the bytes by which its address exceeds a multiple of :data:`ALIGNMENT`.
    """

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
        """The shape of the contiguous tensor that moves for this layout."""
        return self.shape if self.plain else self.order()[1]

    @cached_property
    def dense(self) -> bool:
        """Whether the packed elements, where they are, can be viewed as the tensor."""
        dims, sizes = self.order()
        extent = 1
        for dim, size in zip(reversed(dims), reversed(sizes), strict=True):
            if self.stride[dim] != extent and size > 1:
                return self.plain
            extent *= size
        return True

    @cached_property
    def buffer_key(self) -> Hashable:
        """A key that is equal for layouts that can be received into the same buffer."""
        return self.packed, self.dtype, self.buffer_offset

    @cached_property
    def buffer_offset(self) -> int:
        """The offset of the buffer to receive into: the tensor's own, where it views the buffer."""
        return self.offset if self.dense and self.offset % self.dtype.itemsize == 0 else 0

    def order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the dims that move, outermost first, and their sizes.

        Of a dim of stride 0 only one element moves, so it is left out.
        """
        dims = [
            d for d, (n, s) in enumerate(zip(self.shape, self.stride, strict=True)) if s or n == 0
        ]
        dims.sort(key=lambda d: -self.stride[d])
        return tuple(dims), tuple(self.shape[d] for d in dims)


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout that a tensor has at the target: its own, or plain if elements overlap."""
    shape = tuple(tensor.shape)
    stride = tensor.stride()
    if not tensor.is_contiguous() and extent_of(shape, stride) is None:
        stride = _plain_stride(shape)
    offset = tensor.data_ptr() % ALIGNMENT
    return Layout(shape, stride, tensor.dtype, tensor.requires_grad, offset)


def has_layout(tensor: torch.Tensor, layout: Layout) -> bool:
    """Return whether a tensor has a layout; faster than comparing :func:`layout_of`."""
    return (
        type(tensor) in _CLASSES
        and tensor.shape == layout.shape
        and tensor.dtype is layout.dtype
        and tensor.requires_grad is layout.requires_grad
        and tensor.layout is torch.strided
        and tensor.data_ptr() % ALIGNMENT == layout.offset
        and (tensor.stride() == layout.stride or layout_of(tensor) == layout)
        and _has_memory(tensor)
    )


def check_dense(tensor: torch.Tensor) -> None:
    """Raise PipeworkerError if a tensor has no layout: it is sparse, quantized, or without memory.

    A subclass is refused too: at the target only a plain tensor can be made of the elements, with
    which the next layer may compute otherwise.
    """
    if type(tensor) not in _CLASSES:
        raise cannot_pass(
            f"{a_type(tensor)}, a subclass of torch.Tensor,",
            "it would arrive as a plain tensor; pass tensor.as_subclass(torch.Tensor)",
        )
    if tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized"
        raise cannot_pass(f"a {kind} tensor", "make it dense first")
    if tensor.layout is not torch.strided:
        raise cannot_pass(f"a {tensor.layout} tensor", "make it dense first")
    if not _has_memory(tensor):
        raise cannot_pass(
            f"a tensor on {tensor.device} without memory",
            "it is on meta, stands for zeros, or its storage was freed; pass one with elements, as "
            "of torch.zeros",
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has memory for its elements, or has no elements."""
    return bool(tensor.data_ptr()) or not tensor.numel()


def have_common_elements(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether two tensors have elements in the same memory, as a tensor and a view of it.

    Two views of one tensor, such as its halves, need not have any.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(storage_key(tensor), []).append(tensor)
    return len(groups) < len(tensors) and any(
        _meet(tuple((t.element_size(), t.storage_offset(), t.shape, t.stride()) for t in group))
        for group in groups.values()
        if len(group) > 1
    )


@lru_cache(256)
def _meet(views: tuple[tuple[int, int, tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    """Return whether views of a storage meet: item size, offset in items, shape and strides."""
    full = [view for view in views if 0 not in view[2]]  # one without elements meets none
    if len({size for size, *_ in full}) > 1:
        return True
    stop = max((offset + span_of(shape, stride) for _, offset, shape, stride in full), default=0)
    first = min((offset for _, offset, *_ in full), default=0)
    seen = torch.zeros(stop - first, dtype=torch.bool, device="cpu")
    for _, offset, shape, stride in full:
        elements = seen.as_strided(shape, stride, offset - first)
        if elements.any():
            return True
        elements.fill_(True)
    return False


def span_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements of memory a tensor extends over; 0 if it has none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def extent_of(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the distance from the first element to the last, in elements.

    None if two elements overlap other than by a stride of 0.
    """
    extent = 0
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if stride and size > 1:
            if stride <= extent:
                return None
            extent += stride * (size - 1)
    return extent


def pack(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements that move as one contiguous tensor, a view where possible."""
    tensor = tensor.detach()
    moving = tensor if tensor.is_contiguous() else _moving(tensor, layout_of(tensor))
    if moving.is_conj() or moving.is_neg():  # marks that are not in the bytes
        moving = moving.resolve_conj().resolve_neg()
    return moving.contiguous()


def unpack(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor of a layout from `flat`, a contiguous tensor of its packed shape.

    It is a view of `flat` where possible.
    """
    if layout.dense and flat.data_ptr() % ALIGNMENT == layout.offset:
        if layout.plain:
            return flat.detach()
        return flat.as_strided(layout.shape, layout.stride, flat.storage_offset())
    size = layout.dtype.itemsize
    count = span_of(layout.shape, layout.stride) + ALIGNMENT // size
    memory = flat.new_empty(count, dtype=layout.dtype)
    start = (layout.offset - memory.data_ptr()) % ALIGNMENT // size
    whole = memory.as_strided(layout.shape, layout.stride, start)
    target = _moving(whole, layout)
    target.copy_(flat.view(target.shape))
    return whole


def buffer_for(layout: Layout, allocate: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return a buffer for the packed elements of a layout, which :func:`unpack` views if it can.

    `allocate` returns a uint8 tensor of so many bytes.
    """
    size = math.prod(layout.packed) * layout.dtype.itemsize
    memory = allocate(size + ALIGNMENT)
    start = (layout.buffer_offset - memory.data_ptr()) % ALIGNMENT
    return memory[start : start + size].view(layout.dtype).view(layout.packed)


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides and the alignment of the original."""
    copy = pack(tensor).clone()
    is_alike = copy.shape == tensor.shape and copy.stride() == tensor.stride()
    if is_alike and (copy.data_ptr() - tensor.data_ptr()) % ALIGNMENT == 0:
        return copy  # as nearly always
    return unpack(copy, layout_of(tensor))


@lru_cache(256)
def _plain_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _moving(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the elements that move in their order in memory; stride-0 dims are 1, at the end."""
    dims, _ = layout.order()
    rest = [d for d in range(tensor.dim()) if d not in dims]
    for dim in rest:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor.permute((*dims, *rest))
