"""What ``loss(output, target)`` returned, by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.worker.stage.microbatch import MicroBatch


def gradient(mb: MicroBatch, scale: float) -> torch.Tensor:
    """What backward starts from, as if the loss had been multiplied by its weight.

    Args:
        scale: against underflow in fp16; a power of two.
    """
    assert mb.loss is not None
    one = torch.ones_like(mb.loss, memory_format=torch.preserve_format)
    if mb.count is None:
        one.mul_(mb.weight)
    return one if scale == 1.0 else one.mul_(scale)


def record(mb: MicroBatch, loss: Any) -> torch.Tensor:
    """Keep what ``loss`` returned; gives the root of the micro-batch's backward.

    Raises:
        UsageError: it is neither a scalar nor a pair (sum, count).
    """
    root, count = parts(loss)
    mb.loss = root.detach()
    mb.count = None if count is None else torch.as_tensor(count)
    return root


def shares(microbatches: Sequence[MicroBatch]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The losses and the counts of a mini-batch, in micro-batch order; one transfer of each."""
    return (
        _as_floats([mb.share for mb in microbatches if mb.loss is not None]),
        _as_floats([mb.count for mb in microbatches if mb.count is not None]),
    )


def _as_floats(values: Sequence[torch.Tensor]) -> tuple[float, ...]:
    if not values:
        return ()
    return tuple(map(float, torch.stack([value.reshape(()) for value in values]).tolist()))


def parts(loss: Any) -> tuple[torch.Tensor, Any]:
    """The scalar of what ``loss`` returned, and the count of a pair (sum, count), else None.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(loss, (tuple, list)) and len(loss) == 2:
        return _checked(loss[0]), _count(loss[1])
    return _checked(loss), None


def _count(count: Any) -> Any:
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        return count.detach().reshape(())
    if isinstance(count, (int, float)):
        return count
    shown = type(count).__name__
    if isinstance(count, torch.Tensor):
        shown = f"tensor of shape {tuple(count.shape)}"
    raise UsageError(
        f"loss(output, target) returned a {shown} as the count of a pair (sum, count): it must be "
        "a number"
    )


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise UsageError(
            f"loss(output, target) returned a {type(loss).__name__}: it must return a scalar "
            "tensor, or a pair (sum, count)"
        )
    if loss.numel() != 1:
        raise UsageError(
            f"loss(output, target) returned a tensor of shape {tuple(loss.shape)}: it must be a "
            "scalar, the mean over the samples it is given"
        )
    return loss
