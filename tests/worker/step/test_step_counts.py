"""Losses as (sum, count): gradients of the sums are divided by the total count at the end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.plan.placement import Placement
from support.draws import some
from support.in_process.layers import data, mlp, mse
from support.in_process.pipelines import MODES, Pipeline, Way, filled
from support.in_process.plain_loop import assert_equal, plain
from support.pure.orders import always, zero_bubble
from support.slow import slow

PLACEMENTS = [
    *(Placement.identity(k) for k in (1, 2, 4)),
    Placement.looped(2, 2),
    Placement(((0, 3), (1, 2))),
]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def counting(count: int, tensor: bool) -> Callable[[Any, Any], Any]:
    """Return a loss whose counts over four micro-batches add up to `count`."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        own = int(target[0, 0].item())
        assert own <= count
        return ((output - target[:, 1:]) ** 2).sum(), torch.tensor(own) if tensor else own

    return loss


@pytest.mark.parametrize("optimizer", [pytest.param(sgd, marks=slow), adam])
@pytest.mark.parametrize(
    ("count", "tensor"),
    [
        *((3, True), (7, False), (48, True)),
        *(pytest.param(*case, marks=slow) for case in ((3, False), (7, True), (48, False))),
    ],
)
def test_counted_losses_equal_a_loop_that_divides_at_the_end(
    count: int, optimizer: Any, tensor: bool
) -> None:
    shares = torch.tensor([len(part) for part in torch.arange(count).tensor_split(4)])
    batches = [
        (x, torch.cat([shares.repeat_interleave(2)[:, None].float(), y], 1)) for x, y in data(8, 8)
    ]
    layers, loss = mlp(), counting(count, tensor)
    expected = plain(copy.deepcopy(layers), loss, batches, 4, optimizer)
    assert [sum(counts) for counts in expected.counts] == [count] * 2
    # Multiplication by the reciprocal would give other bits.
    offset = count + 2 * tensor + (optimizer is sgd)  # so that each placement has each way
    for index, placement in some(enumerate(PLACEMENTS), 2, count + tensor):
        ways = [filled(placement, mode) for mode in MODES]
        ways.append(Way(placement, lambda p, m: zero_bubble(p, m, always)))
        way = ways[(offset + index) % len(ways)]
        pipeline = Pipeline(layers, loss, batches, way, microbatches=4, optimizer=optimizer)
        assert_equal(pipeline.train(2), expected, f"{placement}")


class Adding:
    """A loss that adds to the first scalars that it has returned."""

    def __init__(self) -> None:
        self.total: torch.Tensor | None = None
        self.count = torch.zeros(())

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        loss, count = ((output - target) ** 2).sum(), torch.tensor(len(target))
        if self.total is None:
            self.total, self.count = loss.detach(), count
        else:
            self.total += loss.detach()
            self.count += count
        return loss, count


def test_a_loss_may_add_to_what_it_has_returned() -> None:
    layers, batches = mlp(), data(7, 5)
    expected = plain(copy.deepcopy(layers), Adding(), batches, 3, sgd)
    way = filled(Placement.identity(2))
    pipeline = Pipeline(layers, Adding(), batches, way, microbatches=3, optimizer=sgd)
    assert_equal(pipeline.train(2), expected)


def test_a_mean_is_weighted_by_samples_and_not_divided() -> None:
    layers, batches = mlp(), data(7, 5)
    expected = plain(copy.deepcopy(layers), mse, batches, 3, adam)
    for placement in some(PLACEMENTS, 2):
        pipeline = Pipeline(layers, mse, batches, filled(placement), microbatches=3, optimizer=adam)
        assert_equal(pipeline.train(2), expected, f"{placement}")


def test_gradients_over_all_counts_are_those_of_the_whole_batch() -> None:

    def loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, Any]:
        counted = target[:, :1] > 0
        return ((output - target) ** 2 * counted).sum(), counted.sum()

    layers, batches = [*mlp()[:3], *mlp()[4:]], data(7)
    x, y = batches[0]
    net = nn.Sequential(*copy.deepcopy(layers))
    total, count = loss(net(x), y)
    (total / count).backward()
    for k in (1, 3):
        for recompute in MODES:
            way = filled(Placement.identity(k), recompute)
            trained = Pipeline(layers, loss, batches, way, microbatches=3).train(1)
            counted = sum(trained.counts[0])
            assert counted == count.item()
            assert sum(trained.losses[0]) / counted == pytest.approx((total / count).item())
            for gradient, expected in zip(trained.grads[0].values(), net.parameters(), strict=True):
                assert gradient is not None
                torch.testing.assert_close(gradient / counted, expected.grad)
