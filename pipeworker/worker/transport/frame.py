"""What a value looks like on a channel: its structure, its tensors' layouts, its plain values.

Layouts keep strides, because kernels may add in another order for other strides: a tensor that
crosses a stage boundary must reach the next layer just as it would have in one process. The same
tensor at two places of a value stays one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack
import torch
from torch.utils import _pytree as pytree

from pipeworker.errors import PipeworkerError

_PLAIN = (bool, int, float, str, bytes, type(None))
_DTYPES = {
    str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)
}


@dataclass(frozen=True)
class Layout:
    """How one tensor lies in memory; shape and stride in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @cached_property
    def plain(self) -> bool:
        """Whether the tensor is contiguous, as nearly all are."""
        return torch.empty(self.shape, device="meta").stride() == self.stride

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """Shape of the contiguous tensor that moves for this layout."""
        return self.shape if self.plain else self.order()[1]

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
        leaves: for each leaf the index of its tensor, or its plain value in a 1-tuple.
        tensors: the distinct tensors.
    """

    structure: pytree.TreeSpec | None
    leaves: tuple[int | tuple[Any], ...]
    tensors: tuple[Layout, ...]

    @cached_property
    def plain(self) -> bool:
        """Whether every tensor is contiguous."""
        return all(layout.plain for layout in self.tensors)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout to keep; a tensor whose elements share memory is sent as a plain one."""
    shape = tuple(tensor.shape)
    stride = (
        tensor.stride() if not _overlaps(tensor) else torch.empty(shape, device="meta").stride()
    )
    return Layout(shape, stride, tensor.dtype, tensor.requires_grad)


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
    leaves: list[int | tuple[Any]] = []
    for item in items:
        if isinstance(item, torch.Tensor):
            _check_dense(item)
            if id(item) not in places:
                places[id(item)] = len(tensors)
                tensors.append(item)
            leaves.append(places[id(item)])
        elif type(item) in _PLAIN:
            leaves.append((item,))
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
    if tensor.is_contiguous() or _overlaps(tensor):
        return tensor.contiguous()
    dims, _ = layout_of(tensor).order()
    for dim in set(range(tensor.dim())) - set(dims):
        tensor = tensor.narrow(dim, 0, 1)
    rest = [d for d in range(tensor.dim()) if d not in dims]
    return tensor.permute(*dims, *rest).contiguous()


def unpack(flat: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A tensor of this layout from its packed elements; a view where it can be."""
    if layout.plain:
        return flat.detach()
    dims, sizes = layout.order()
    dense = 1
    for dim, size in zip(reversed(dims), reversed(sizes), strict=True):
        if layout.stride[dim] != dense and size > 1:
            break
        dense *= size
    else:
        return flat.as_strided(layout.shape, layout.stride)
    whole = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=flat.device)
    target = whole
    for dim in set(range(len(layout.shape))) - set(dims):
        target = target.narrow(dim, 0, 1)
    rest = [d for d in range(len(layout.shape)) if d not in dims]
    target.permute(*dims, *rest).copy_(flat.view(*sizes, *([1] * len(rest))))
    return whole


def to_bytes(frame: Frame) -> bytes:
    """The header of a frame that the receiver does not expect.

    Raises:
        PipeworkerError: the value's structure cannot be described without pickling.
    """
    try:
        structure = None if frame.structure is None else pytree.treespec_dumps(frame.structure)
        tensors = [
            [t.shape, t.stride, str(t.dtype).removeprefix("torch."), t.requires_grad]
            for t in frame.tensors
        ]
        header: bytes = msgpack.packb([structure, frame.leaves, tensors])
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
            Layout(shape, stride, _DTYPES[dtype], grad) for shape, stride, dtype, grad in tensors
        ),
    )


def _check_dense(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise PipeworkerError(
            f"a {tensor.layout} tensor cannot pass from one stage to the next: make it dense first"
        )
