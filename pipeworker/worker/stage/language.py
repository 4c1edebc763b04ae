"""The loss of causal language models, whose target is their input's next token."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pipeworker.errors import UsageError, a_type

IGNORED = -100
"""The label of a token that is not predicted, as torch and transformers have it."""


def causal_loss(output: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of all next tokens, and the number of these tokens.

    The gradient of a step is then that of the mean over all tokens of the mini-batch, however many
    each micro-batch has. A job file may say ``loss = pipeworker.causal_loss``.

    Args:
        output: the logits, of shape ``[samples, length, vocabulary]``, or an object that has them
            as ``logits``, as models of transformers return. If its ``loss`` is not None, the
            model computed it from labels in its input, and it is used, with the losses of routers.
            Without a token to predict that loss is NaN, and counts as 0.
        labels: the tokens, of shape ``[samples, length]`` and dtype int64; the token after each
            position is predicted there, unless it is -100.
    """
    wanted = labels[:, 1:]
    count = (wanted != IGNORED).sum()
    own = getattr(output, "loss", None)
    if own is not None:
        return torch.where(count > 0, own, 0.0) * count, count
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor):
        raise UsageError(
            f"pipeworker.causal_loss: the model returned {a_type(output)}; return the logits, or "
            "an object with `logits` (transformers: return_dict=True), or write a loss of your own"
        )
    rows = logits[:, :-1].flatten(0, 1).float()
    loss = functional.cross_entropy(rows, wanted.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss, count
