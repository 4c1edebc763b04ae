"""The plain loop of several replicas: gradients are summed per replica, then over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeworker.plan.partition import block
from pipeworker.worker.stage import rng
from support.plain_loop import Batches, Grads, Loss, MakeOptimizer, Trained, in_a_list, split


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
                results.append(_run(net, loss, (x, y), microbatches, (replicas, replica), at))
                number += min(microbatches, len(pytree.tree_leaves(x)[0]))
            of_replica.append(results)
            totals.append({n: _clone(p.grad) for n, p in net.named_parameters()})
        for index in range(len(some)):
            parts = [results[index] for results in of_replica]
            trained.losses.append(tuple(a for losses, _ in parts for a in losses))
            trained.counts.append(tuple(a for _, counts in parts for a in counts))
        gradients = {name: added([total[name] for total in totals]) for name in totals[0]}
        trained.grads.append({name: _clone(gradient) for name, gradient in gradients.items()})
        if optimizers:
            counts = sum(sum(some) for some in trained.counts[-len(some) :])
            for name, parameter in net.named_parameters():
                parameter.grad = gradients[name]
                if counts and parameter.grad is not None:
                    parameter.grad /= counts
            for opt in optimizers:
                opt.step()
    trained.weights = {n: p.detach().clone() for n, p in net.named_parameters()}
    return trained


def _run(
    net: nn.Sequential,
    loss: Loss,
    batch: tuple[Any, Any],
    microbatches: int,
    part: tuple[int, int],
    at: tuple[int, int],
) -> tuple[list[float], list[float]]:
    """Run one replica's micro-batches of a mini-batch; return losses and counts.

    Args:
        part: the number of replicas, and the number of this one.
        at: the step, and the number within it of the mini-batch's first micro-batch.
    """
    (x, y), (step, first) = batch, at
    samples = len(pytree.tree_leaves(x)[0])
    count = min(microbatches, samples)
    losses: list[float] = []
    counts: list[float] = []
    inputs, targets = split(x, count), split(y, count)
    for m in block(count, *part):
        value = inputs[m]
        share = len(pytree.tree_leaves(value)[0]) / samples
        for index, layer in enumerate(net):
            rng.seed_all(rng.layer_seed(0, step, first + m, index))
            value = layer(value)
        result = loss(value, targets[m])
        if isinstance(result, tuple):
            root = result[0]
            counts.append(float(result[1]))
        else:
            root = result * share
        root.backward()
        losses.append(root.item())
    return losses, counts


def added(gradients: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of gradients in their order, ignoring None."""
    total = None
    for gradient in gradients:
        if gradient is not None:
            total = gradient.clone() if total is None else total + gradient
    return total


def _clone(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()
