"""Deferred batch norm: running statistics of the whole mini-batch.

Plain batch norm under micro-batches updates its running statistics once a micro-batch, with what
that one holds. Deferred, it still normalizes by the micro-batch, but its running statistics change
once a mini-batch, by what batch norm on the whole of it would have recorded (GPipe, Huang et al.
2019, section 2; torchgpipe's DeferredBatchNorm, there with the biased variance).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipeworker.worker.internals import BatchNorm
from pipeworker.worker.stage.recompute import is_recomputing

_Moments = tuple[int, torch.Tensor, torch.Tensor]
"""Elements a channel, their mean and their biased variance, in float64."""


class DeferredBatchNorm:
    """Takes the running statistics of every batch norm in some layers into its own hands.

    The modules stay as they are, and so do the keys of their state.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._seen: dict[BatchNorm, list[_Moments]] = {}
        self._hooks: list[RemovableHandle] = []
        modules = {id(m): m for layer in layers for m in layer.modules()}.values()
        for module in modules:
            if isinstance(module, BatchNorm) and module.track_running_stats:
                # In training it then records nothing; in eval mode it uses what is recorded.
                module.track_running_stats = False
                hook = module.register_forward_pre_hook(self._look, with_kwargs=True)
                self._hooks.append(hook)
                self._seen[module] = []

    def _look(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Note a micro-batch's moments, in its first forward alone."""
        if not module.training or is_recomputing():
            return
        assert isinstance(module, BatchNorm)
        x = (args[0] if args else named["input"]).detach()
        x = (x.cpu() if x.is_mps else x).double()  # MPS has no float64
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        self._seen[module].append((x.numel() // x.shape[1], mean, variance))

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._seen)

    def moments(self) -> list[torch.Tensor]:
        """By module, a row for each forward of this mini-batch: elements, means, variances."""
        found = []
        for module, seen in self._seen.items():
            assert module.running_mean is not None
            rows = [torch.cat([m.new_tensor([n]), m, v]) for n, m, v in seen]
            width = 1 + 2 * module.num_features
            device = "cpu" if module.running_mean.is_mps else module.running_mean.device
            none = torch.empty((0, width), dtype=torch.float64, device=device)
            found.append(torch.stack(rows) if rows else none)
        return found

    def take(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """The mini-batch is what these replicas have seen, in their order: :meth:`moments` of each.

        The rows are copied.
        """
        for place, module in enumerate(self._seen):
            rows = [row.clone() for part in parts for row in part[place]]
            count = module.num_features
            self._seen[module] = [(int(r[0]), r[1 : 1 + count], r[1 + count :]) for r in rows]

    def close(self) -> None:
        """Give the modules back."""
        for hook in self._hooks:
            hook.remove()
        for module in self._seen:
            module.track_running_stats = True
        self._hooks.clear()
        self._seen.clear()

    def commit(self) -> None:
        """The mini-batch is complete: change the running statistics once."""
        for module, seen in self._seen.items():
            if seen:
                _record(module, seen)
                seen.clear()


def _record(module: BatchNorm, seen: Sequence[_Moments]) -> None:
    assert module.running_mean is not None
    assert module.running_var is not None
    assert module.num_batches_tracked is not None
    count = sum(n for n, _, _ in seen)
    zero = torch.zeros_like(seen[0][1])
    mean = sum((n * m for n, m, _ in seen), zero) / count
    spread = sum((n * (v + (m - mean) ** 2) for n, m, v in seen), zero)
    variance = spread / max(count - 1, 1)
    module.num_batches_tracked += 1
    factor = module.momentum
    if factor is None:  # a cumulative average
        factor = 1.0 / float(module.num_batches_tracked)
    for running, now in ((module.running_mean, mean), (module.running_var, variance)):
        running.mul_(1 - factor).add_(now.to(running), alpha=factor)
