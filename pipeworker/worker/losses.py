"""What ``loss(output, target)`` returned, by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeworker.errors import UsageError


@dataclass(slots=True)
class Losses:
    """The last stage's losses of one step, by micro-batch.

    Attributes:
        given: what ``loss`` returned: means, or sums where there is a count.
        weights: each micro-batch's share of the samples.
        scale: against underflow in fp16; a power of two.
    """

    weights: Sequence[float] = ()
    scale: float = 1.0
    given: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def values(self) -> dict[int, torch.Tensor]:
        """What is added up to the step's loss, or to its numerator where there are counts."""
        return {
            m: loss if m in self.counts else loss * self.weights[m]
            for m, loss in self.given.items()
        }

    def gradient(self, microbatch: int) -> torch.Tensor:
        """What backward starts from, as if the loss had been multiplied by its weight."""
        one = torch.ones_like(self.given[microbatch], memory_format=torch.preserve_format)
        if microbatch not in self.counts:
            one.mul_(self.weights[microbatch])
        return one if self.scale == 1.0 else one.mul_(self.scale)

    def add(self, microbatch: int, loss: Any) -> torch.Tensor:
        """Record what ``loss`` returned; gives the root of the micro-batch's backward.

        Raises:
            UsageError: it is neither a scalar nor a pair (sum, count).
        """
        root, count = parts(loss)
        if count is not None:
            self.counts[microbatch] = torch.as_tensor(count)
        self.given[microbatch] = root.detach()
        return root


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
