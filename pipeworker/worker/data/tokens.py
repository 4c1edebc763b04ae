"""The number of tokens of a mini-batch, for rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch

from pipeworker.errors import UsageError, a_type
from pipeworker.facts.limits import MOST_SAMPLES
from pipeworker.worker.blame import user_code


def count_tokens(item: Any, function: Callable[[Any], Any] | None) -> int:
    """Return the number of tokens of a mini-batch, a pair; 0 if it is unknown.

    Without the job's own `function` they are the ids of the input: an integer tensor of shape
    ``[batch, time]``, or the one of a dict by the name ``input_ids``.
    """
    if function is None:
        ids = item[0].get("input_ids") if isinstance(item[0], Mapping) else item[0]
        return ids.numel() if _are_ids(ids) else 0
    with user_code("tokens()"):
        count = function(item)
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_floating_point():
        count = int(count)
    if type(count) is not int or not 0 <= count <= MOST_SAMPLES:
        shown = count if isinstance(count, (int, float)) else a_type(count)
        if isinstance(count, torch.Tensor):
            shown = f"a tensor of {count.dtype} and shape {tuple(count.shape)}"
        raise UsageError(f"tokens(batch) returned {shown}; return a number of tokens, an int")
    return count


def _are_ids(value: Any) -> TypeGuard[torch.Tensor]:
    if not isinstance(value, torch.Tensor) or value.dim() != 2:
        return False
    kind = value.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)
