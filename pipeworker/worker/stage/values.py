"""Nested values of tensors: find, replace, copy and describe the tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipeworker.record.checkpoint.json_state import is_whole, with_strides
from pipeworker.record.checkpoint.tensor_file import raw_bytes
from pipeworker.worker.internals import dense_parts, map_tensor_leaves, pytree, version_of

WATCHED = 64
"""The number of a stage's first recomputes, or backwards, that are checked (:func:`is_checked`)."""


def distinct_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested value, each once, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found = {id(t): t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)}
    return list(found.values())


def replace_tensors(value: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Replace each tensor whose id is a key."""
    if not tensors:
        return value
    return map_tensor_leaves(lambda tensor: tensors.get(id(tensor), tensor), value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replace each distinct tensor of a value by what a function returns for it."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return replace_tensors(value, {id(t): function(t) for t in distinct_tensors(value)})


def versions(value: Any) -> list[int]:
    """Return the number of in-place changes of each distinct tensor."""
    return [version_of(tensor) for tensor in distinct_tensors(value)]


_MOST_SHOWN = 16
"""Number of a container's entries that are shown."""


def describe(value: Any) -> str:
    """Return the structure, shapes and dtypes of a value: ``(Tensor[4, 8], None) float32``."""
    dtypes = {_dtype(tensor) for tensor in distinct_tensors(value)}
    if len(dtypes) == 1:
        return f"{_nested(value, False)} {dtypes.pop()}"
    return _nested(value, True)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _nested(value: Any, dtypes: bool) -> str:
    """Return the structure; with `dtypes`, each tensor is followed by its own."""
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)}" + (f" {_dtype(value)}" if dtypes else "")
    if isinstance(value, dict):
        return f"{{{_listed([f'{key!r}: {_nested(x, dtypes)}' for key, x in value.items()])}}}"
    if isinstance(value, (list, tuple)):
        items = [_nested(item, dtypes) for item in value]
        if isinstance(value, list):
            return f"[{_listed(items)}]"
        if fields := getattr(value, "_fields", ()):
            named = [f"{name}={item}" for name, item in zip(fields, items, strict=True)]
            return f"{type(value).__name__}({_listed(named)})"
        return f"({_listed(items)}{',' if len(items) == 1 else ''})"
    plain = value is None or isinstance(value, (bool, int, float))
    return repr(value) if plain else type(value).__name__


def _listed(items: list[str]) -> str:
    more = [f"... {len(items) - _MOST_SHOWN} more"] if len(items) > _MOST_SHOWN else []
    return ", ".join([*items[:_MOST_SHOWN], *more])


def is_checked(number: int, first: int = 1) -> bool:
    """Return whether values are compared at the event of a number, counted from 1.

    They are compared at the `first` events, because nearly every mistake shows there. Of the later
    events, only those whose number is a power of two compare them: a mistake may begin late.
    """
    return number <= first or number & (number - 1) == 0


def checksums(value: Any) -> tuple[int, ...]:
    """Return the :func:`checksum` of each distinct tensor of a value; of a sparse one, its parts'.

    Nested tensors are left out.
    """
    parts = (part for tensor in distinct_tensors(value) for part in dense_parts(tensor))
    return tuple(int(checksum(part)) for part in parts if is_dense(part))


def bytes_of(value: Any) -> int:
    """Return the bytes of the distinct tensors of a nested value."""
    return sum(part.nbytes for tensor in distinct_tensors(value) for part in dense_parts(tensor))


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements have strides."""
    return tensor.layout is torch.strided and not tensor.is_nested


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number for the bits of a dense tensor, as int64 of shape [], on its device.

    Words of eight bytes are added up by row and by column, and the sums by their places, so that
    words which change places change it too. The high bits of the sums are folded into the low ones,
    because an even number of signs, which are a word's highest bit, would leave a sum as it is.
    Products of single words would take as much memory as the tensor.
    """
    bits = bits_of(tensor)
    whole = bits.numel() // 8 * 8
    words, rest = bits[:whole], bits[whole:]
    if words.storage_offset() % 8:
        words = words.clone()
    words = words.view(torch.int64)
    end = words.numel() // _COLUMNS * _COLUMNS
    parts, places = [words[end:], rest], words.new_zeros(())
    if end:
        table = words[:end].view(-1, _COLUMNS)
        parts.append(table.sum(1))
        places = 3 * _folded(table.sum(0)).cumsum(0).sum()
    rows = _folded(torch.cat([part for part in parts if part.numel()] or [rest]))
    return rows.sum() + 2 * (rows.cumsum(0).sum() + places)


_COLUMNS = 1 << 12


def _folded(sums: torch.Tensor) -> torch.Tensor:
    return sums ^ sums >> 29


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a dense tensor, as uint8 of shape ``[bytes]``."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return raw_bytes(plain.contiguous())


def strides_of(tensors: Sequence[torch.Tensor]) -> dict[int, list[int]]:
    """Return the strides of the tensors that are not contiguous, by their indices.

    A tensor that is expanded, or a part of other memory, is left out: a copy has other strides.
    """
    return {
        index: [*tensor.stride()]
        for index, tensor in enumerate(tensors)
        if is_dense(tensor) and not tensor.is_contiguous() and is_whole(tensor)
    }


def set_strides(tensors: Sequence[torch.Tensor], strides: Mapping[int, Sequence[int]]) -> list[int]:
    """Give tensors the strides that :func:`strides_of` returned of their counterparts.

    Code may have replaced the memory of these, and matrix kernels choose their order by strides.

    Returns:
        The indices of the tensors that have other memory now.

    Raises:
        ValueError: a counterpart has another shape.
    """
    changed = []
    for index in sorted(strides.keys() | strides_of(tensors).keys()):
        tensor = tensors[index]
        wanted = [*strides.get(index, torch.empty(tensor.shape, device="meta").stride())]
        if [*tensor.stride()] != wanted:
            tensor.data = with_strides(tensor.detach(), wanted)
            changed.append(index)
    return changed
