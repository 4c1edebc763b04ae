"""The plain loop of several replicas: gradients are summed per replica, then over replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils import _pytree as pytree

from support.in_process.plain_loop import (
    Batches,
    Grads,
    Loss,
    MakeOptimizer,
    Trained,
    copy_grad,
    copy_weights,
    in_a_list,
    run,
)


def plain(
    layers: Sequence[nn.Module],
    loss: Loss,
    batches: Batches,
    microbatches: int,
    replicas: int,
    optimizer: MakeOptimizer | None = None,
    *,
    accumulate: int = 1,
) -> Trained:
    """Train in one process as `replicas` processes with a part of each mini-batch would.

    Args:
        accumulate: number of mini-batches per step; the last step may have fewer.
    """
    net = nn.Sequential(*layers)
    optimizers = in_a_list(optimizer(net.parameters())) if optimizer else []
    trained = Trained()
    for step, first in enumerate(range(0, len(batches), accumulate), 1):
        some = batches[first : first + accumulate]
        totals: list[Grads] = []
        of_replica = []
        for replica in range(replicas):
            net.zero_grad()
            results, number = [], 0
            for x, y in some:
                at = step, number
                results.append(run(net, loss, (x, y), microbatches, at, (replicas, replica)))
                number += min(microbatches, len(pytree.tree_leaves(x)[0]))
            of_replica.append(results)
            totals.append({n: copy_grad(p.grad) for n, p in net.named_parameters()})
        for index in range(len(some)):
            parts = [results[index] for results in of_replica]
            trained.losses.append(tuple(a for losses, _ in parts for a in losses))
            trained.counts.append(tuple(a for _, counts in parts for a in counts))
        gradients = {name: added([total[name] for total in totals]) for name in totals[0]}
        trained.grads.append({name: copy_grad(gradient) for name, gradient in gradients.items()})
        if optimizers:
            counts = sum(sum(some) for some in trained.counts[-len(some) :])
            for name, parameter in net.named_parameters():
                parameter.grad = gradients[name]
                if counts and parameter.grad is not None:
                    parameter.grad /= counts
            for opt in optimizers:
                opt.step()
    trained.weights = copy_weights(net.named_parameters())
    return trained


def added(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of gradients in their order, ignoring None."""
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.clone() if total is None else total + gradient
    return total
