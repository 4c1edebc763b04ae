"""The plain loop of the contract, whose bits those of every pipeline must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipeworker.plan.partition import block
from pipeworker.worker.stage import rng

Batches = Sequence[tuple[Any, Any]]
Grads = dict[str, "torch.Tensor | None"]
Loss = Callable[[Any, Any], Any]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
MakeOptimizer = Callable[[Any], Optimizers]


@dataclass
class Trained:
    """Losses and gradients of every step, and final weights; tied gradients are the totals."""

    losses: list[tuple[float, ...]] = field(default_factory=list)
    counts: list[tuple[float, ...]] = field(default_factory=list)
    grads: list[Grads] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def in_a_list(returned: Optimizers) -> Sequence[torch.optim.Optimizer]:
    """Return what ``optimizer(params)`` returned as a list."""
    return [returned] if isinstance(returned, torch.optim.Optimizer) else returned


def copy_grad(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.clone()


def copy_weights(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named}


def split(value: Any, count: int) -> list[Any]:
    leaves, structure = pytree.tree_flatten(value)
    cut = [
        leaf.tensor_split(count) if isinstance(leaf, torch.Tensor) else [leaf] * count
        for leaf in leaves
    ]
    return [pytree.tree_unflatten([piece[m] for piece in cut], structure) for m in range(count)]


def run(
    net: nn.Sequential,
    loss: Loss,
    batch: tuple[Any, Any],
    microbatches: int,
    at: tuple[int, int],
    part: tuple[int, int] = (1, 0),
) -> tuple[list[float], list[float]]:
    """Run the micro-batches of a mini-batch, or a replica's part; return losses and counts.

    Args:
        at: the step, and the number within it of the mini-batch's first micro-batch.
        part: the number of replicas, and the number of this one.
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


def plain(
    layers: Sequence[nn.Module],
    loss: Loss,
    batches: Batches,
    microbatches: int,
    optimizer: MakeOptimizer | None = None,
) -> Trained:
    """Run the plain loop of the contract; without an optimizer, update nothing."""
    net = nn.Sequential(*layers)
    optimizers = in_a_list(optimizer(net.parameters())) if optimizer else []
    trained = Trained()
    for step, batch in enumerate(batches, 1):
        net.zero_grad()
        losses, counts = run(net, loss, batch, microbatches, (step, 0))
        trained.losses.append(tuple(losses))
        trained.counts.append(tuple(counts))
        trained.grads.append({name: copy_grad(p.grad) for name, p in net.named_parameters()})
        for parameter in net.parameters() if optimizers else ():
            if counts and parameter.grad is not None:
                parameter.grad /= sum(counts)
        for opt in optimizers:
            opt.step()
    trained.weights = copy_weights(net.named_parameters())
    return trained


def assert_equal(actual: Trained, expected: Trained, case: str = "") -> None:
    """Assert that two results are bitwise equal."""
    assert actual.losses == expected.losses, case
    assert actual.counts == expected.counts, case
    for step, (grads, others) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        assert grads.keys() == others.keys()
        for name, a in grads.items():
            b = others[name]
            assert (a is None) == (b is None), (case, step, name)
            if a is not None and b is not None:
                assert torch.equal(a, b), (case, step, name)
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in actual.weights.items():
        assert torch.equal(weight, expected.weights[name]), (case, name)
