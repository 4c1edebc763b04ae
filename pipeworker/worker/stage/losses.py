"""The scalars that ``loss(output, target)`` returns, by micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from numbers import Integral, Real
from typing import Any

import torch

from pipeworker.errors import UsageError, a_type
from pipeworker.worker.stage.microbatch import MicroBatch


def gradient(mb: MicroBatch, scale: float) -> torch.Tensor:
    """Return the gradient that backward starts from, as if the loss were multiplied by its weight.

    It has the loss's shape and dtype. `scale`, a power of two, prevents underflow in fp16.
    """
    assert mb.loss is not None
    one = torch.ones_like(mb.loss)
    if mb.count is None:
        one.mul_(mb.weight)
    return one if scale == 1.0 else one.mul_(scale)


def record(mb: MicroBatch, loss: Any) -> torch.Tensor:
    """Store copies of the scalars that ``loss`` returned, and return the root of the backward.

    The user's code may keep what it has returned, as the begin of a sum that later calls add to.
    """
    root, count = parts(loss)
    mb.loss = root.detach().clone()
    # A float32 would round a float.
    dtype = torch.float64 if isinstance(count, float) else None
    mb.count = (
        None
        if count is None
        else torch.as_tensor(count, dtype=dtype, device=getattr(count, "device", "cpu"))
    )
    return root


def shares(microbatches: Collection[MicroBatch]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the losses and counts of a mini-batch by micro-batch.

    A loss is multiplied by its micro-batch's weight, unless there are counts. Those of equal weight
    are multiplied together, because each operation takes longer than the product.

    Raises:
        UsageError: some have a count and others have none.
    """
    found = [(mb.loss, mb.weight) for mb in microbatches if mb.loss is not None]
    counts = [mb.count for mb in microbatches if mb.count is not None]
    if counts and len(counts) < len(found):
        raise UsageError(
            f"loss(output, target) returned a pair (sum, count) for {len(counts)} of {len(found)} "
            "micro-batches and a scalar for the others; return the same kind for all"
        )
    if counts:
        return _as_floats(_stacked(loss for loss, _ in found)), _as_floats(_stacked(counts))
    alike = groupby(found, lambda pair: (pair[1], pair[0].dtype))
    parts = [_stacked(loss for loss, _ in some) * weight for (weight, _), some in alike]
    return (_as_floats(torch.cat(parts)) if parts else ()), ()


def _stacked(values: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([value.reshape(()) for value in values])


def _as_floats(values: torch.Tensor) -> tuple[float, ...]:
    """Return values by one copy from their device."""
    return tuple(map(float, values.tolist()))


def parts(loss: Any) -> tuple[torch.Tensor, Any]:
    """Return the scalar that ``loss`` returned, and the count of a pair (sum, count), else None."""
    if isinstance(loss, (tuple, list)) and len(loss) == 2:
        return _checked(loss[0]), _count(loss[1])
    return _checked(loss), None


def notes_on(loss: Any) -> list[str]:
    """Return a note on what ``loss`` returned if it is a pair whose count is none by its value.

    A count may be a sum of weights, but other libraries take a metric in its place.
    """
    root, count = parts(loss)
    if count is None:
        return []
    total, number = float(root.detach()), float(count)
    if number.is_integer() and (number or not total):
        return []
    pair = f"({total:.6g}, {number:.6g})"
    return [
        f"loss(output, target) returned the pair {pair}, which means (sum, count): the loss of a "
        "step is the sum of the sums, divided by the sum of the counts; if the second is a metric, "
        "return the loss alone, and the metric by metrics()"
    ]


def _count(count: Any) -> Any:
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        if count.requires_grad:
            raise UsageError(
                "loss(output, target) returned a pair (sum, count) whose count has a graph, and a "
                "count has no gradient; detach() it, or return one scalar"
            )
        return count.clone().reshape(())
    if isinstance(count, Real):  # numpy's are too
        return int(count) if isinstance(count, Integral) else float(count)
    shown = a_type(count)
    if isinstance(count, torch.Tensor):
        shown = f"a tensor of shape {tuple(count.shape)}"
    raise UsageError(
        f"loss(output, target) returned {shown} as the count of a pair (sum, count); return a "
        "number"
    )


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"loss(output, target) returned {a_type(loss)}; return a scalar tensor, or a pair "
            "(sum, count)"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"loss(output, target) returned a tensor of shape {tuple(loss.shape)}; return a "
            "scalar, the mean over its samples"
        )
    if loss.is_complex():
        raise UsageError(
            f"loss(output, target) returned a tensor of {loss.dtype}; return a real scalar"
        )
    return loss
