"""Nested tensors of a mini-batch: split into micro-batches in dim 0, and concatenated again."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from pipeworker.errors import UsageError, a_type
from pipeworker.worker.internals import pytree
from pipeworker.worker.transport.layout import ALIGNMENT, aligned_copy


def split_value(value: Any, lengths: list[int], own: range, lent: Collection[int]) -> list[Any]:
    """Split every tensor of a nested value along dim 0; plain values go to every micro-batch.

    `lengths` has the samples of each micro-batch; those of the micro-batches in `own` are returned.
    The pieces are parts of a copy: ``data()`` may overwrite its memory with the next mini-batch,
    which is read while this one is still needed, and a first layer may work in place. Each piece
    has a version counter of its own. Only the samples of micro-batches in `own` are copied.

    The pieces of the tensors with the ids in `lent` are parts of them, if they are as a copy would
    be: the caller copies the pieces before ``data()`` continues.
    """
    if isinstance(value, torch.Tensor):
        return _split_tensor(value, lengths, own, lent)
    leaves, structure = pytree.tree_flatten(value)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    pieces = {key: _split_tensor(leaf, lengths, own, lent) for key, leaf in tensors.items()}
    split = [pieces.get(id(leaf)) or [leaf] * len(own) for leaf in leaves]
    numbers = range(len(own))
    return [pytree.tree_unflatten([piece[m] for piece in split], structure) for m in numbers]


def _split_tensor(
    tensor: torch.Tensor, lengths: list[int], own: range, lent: Collection[int]
) -> list[torch.Tensor]:
    """Copy some of the pieces of dim 0, aligned as they are in a copy of all."""
    whole, first = tensor.detach(), 0
    begin, end = sum(lengths[: own.start]), sum(lengths[: own.stop])
    is_part = len(own) < len(lengths)
    if is_part and whole.is_contiguous():  # else rows do not follow each other in memory
        row = max(1, whole[0].nbytes)
        first = begin - begin % (ALIGNMENT // math.gcd(row, ALIGNMENT))
        whole = whole[:end]
    if id(tensor) in lent and not is_part and _is_like_a_copy(whole):
        rows = whole
    else:
        rows = aligned_copy(whole[first:])[begin - first : end - first]
    pieces = [piece.data for piece in torch.split(rows, lengths[own.start : own.stop])]
    return [piece.requires_grad_() for piece in pieces] if tensor.requires_grad else pieces


def _is_like_a_copy(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is all that its storage of the host has, in order and aligned.

    What is on an accelerator already is not copied on its way there.
    """
    plain = type(tensor) is torch.Tensor and not tensor.is_conj() and not tensor.is_neg()
    if not plain or not tensor.is_cpu:
        return False
    storage = tensor.untyped_storage()
    is_whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
    return is_whole and storage.data_ptr() % ALIGNMENT == 0


def concatenate_outputs(outputs: Sequence[Any]) -> Any:
    """Return the output of a mini-batch: the tensors of its micro-batches, concatenated in dim 0.

    Raises:
        UsageError: a tensor has no dim 0, or the outputs differ in structure, in other dims or in
            plain values.
    """
    leaves, structures = zip(*(pytree.tree_flatten(output) for output in outputs), strict=True)
    if any(structure != structures[0] for structure in structures):
        raise UsageError(
            "predict(): the model's output has another structure in each micro-batch; return one "
            "structure"
        )

    def concatenate(parts: Sequence[Any]) -> Any:
        plain = [part for part in parts if not isinstance(part, torch.Tensor)]
        if not plain:
            if not all(part.dim() for part in parts):
                raise UsageError(
                    "predict(): the model's output has a tensor without dims; keep dim 0, the batch"
                )
            shapes = {part.shape[1:] for part in parts}
            if len(shapes) > 1:
                sizes = " and ".join(str(list(shape)) for shape in sorted(shapes))
                raise UsageError(
                    "predict(): the model's output has a tensor that is not of one size in all "
                    f"micro-batches: {sizes} without the batch; pad it"
                )
            return torch.cat(list(parts))
        first, *others = plain
        if len(plain) < len(parts) or any(
            type(part) is not type(first) or not _equal(part, first) for part in others
        ):
            raise UsageError(
                f"predict(): the model's output has {a_type(first)} that is not the "
                "same in each micro-batch; put it into a tensor, or leave it out"
            )
        return first

    wholes = [concatenate(parts) for parts in zip(*leaves, strict=True)]
    return pytree.tree_unflatten(wholes, structures[0])


def _equal(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal; False if the comparison is no truth value."""
    try:
        return bool(one == other)
    except (TypeError, ValueError):
        return False
