"""Deferred batch norm: running statistics of the whole mini-batch.

Plain batch norm under micro-batches updates its running statistics once per micro-batch, from that
micro-batch alone. Deferred batch norm still normalizes by the micro-batch, but updates its running
statistics once per mini-batch, with the values that batch norm on the whole mini-batch would have
recorded (GPipe, Huang et al. 2019, section 2; torchgpipe's DeferredBatchNorm, there with the biased
variance).
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
"""Number of elements per channel, and their mean and biased variance: float64, shape [channels]."""


class DeferredBatchNorm:
    """The deferred update of the running statistics of every batch norm in some layers.

    The modules keep their class and the keys of their state.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._moments: dict[BatchNorm, list[_Moments]] = {}
        self._hooks: list[RemovableHandle] = []
        for module in nn.ModuleList(layers).modules():
            if isinstance(module, BatchNorm) and module.track_running_stats:
                # The module then records nothing in training, and uses its statistics in eval mode.
                module.track_running_stats = False
                hook = module.register_forward_pre_hook(self._record_moments, with_kwargs=True)
                self._hooks.append(hook)
                self._moments[module] = []

    def _record_moments(
        self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        """Record the moments of a micro-batch, in its first forward only."""
        if not module.training or is_recomputing():
            return
        assert isinstance(module, BatchNorm)
        x = (args[0] if args else named["input"]).detach()
        x = (x.cpu() if x.is_mps else x).double()  # MPS has no float64
        dims = [d for d in range(x.dim()) if d != 1]
        variance, mean = torch.var_mean(x, dims, correction=0)
        self._moments[module].append((x.numel() // x.shape[1], mean, variance))

    def __bool__(self) -> bool:
        """Return whether the layers have any batch norm."""
        return bool(self._moments)

    def moments(self) -> list[torch.Tensor]:
        """Return, by module, a row for each forward of this mini-batch: elements, means, variances.

        The tensors are float64, of shape [forwards, 1 + 2 * channels].
        """
        found = []
        for module, seen in self._moments.items():
            assert module.running_mean is not None
            rows = [torch.cat([m.new_tensor([n]), m, v]) for n, m, v in seen]
            width = 1 + 2 * module.num_features
            device = "cpu" if module.running_mean.is_mps else module.running_mean.device
            none = torch.empty((0, width), dtype=torch.float64, device=device)
            found.append(torch.stack(rows) if rows else none)
        return found

    def set_moments(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Replace the moments by copies of those of all replicas, in the replicas' order."""
        for number, module in enumerate(self._moments):
            rows, width = torch.cat([part[number] for part in parts]), module.num_features
            counts = rows[:, 0].tolist()  # together: an accelerator is waited for once
            self._moments[module] = [
                (int(count), row[1 : 1 + width], row[1 + width :])
                for count, row in zip(counts, rows, strict=True)
            ]

    def restore_modules(self) -> None:
        """Remove the hooks and restore the modules' own settings."""
        for hook in self._hooks:
            hook.remove()
        for module in self._moments:
            module.track_running_stats = True

    def commit(self) -> None:
        """Update the running statistics at the end of a mini-batch."""
        for module, seen in self._moments.items():
            if seen:
                _update_statistics(module, seen)
                seen.clear()


def count_batch_norms(layers: Sequence[nn.Module]) -> int:
    """Return the number of batch norms in some layers that normalize by each micro-batch itself."""
    return sum(
        isinstance(module, BatchNorm) and (module.training or module.running_mean is None)
        for module in nn.ModuleList(layers).modules()
    )


def _update_statistics(module: BatchNorm, seen: Sequence[_Moments]) -> None:
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
