"""Every registered schedule is bitwise equal to the plain loop: any K, M and recompute modes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.facts.connections import Skip
from pipeworker.plan.orders import ORDERS, resolve
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import OFFLOAD, recomputed, with_fetches
from support.layers import Noise, Pop, Stash, data, mse
from support.orders import Orders
from support.pipelines import MODES, Pipeline, Way, filled
from support.plain_loop import assert_equal
from support.plain_loop import plain as plain_loop
from support.replicas import plain as plain_replicas

MANY = sorted({*ORDERS} - {"gpipe"})
SIZES = (9, 7, 2, 9)
"""Ragged mini-batches: one has fewer samples than there are micro-batches."""
ENDS = (Skip(0, 10, "far"), Skip(3, 6, "near"))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def network() -> list[nn.Module]:
    torch.manual_seed(5)
    return [
        *(nn.Sequential(nn.Linear(6, 6), Stash("far")), nn.Tanh(), nn.Linear(6, 6)),
        *(nn.Sequential(nn.Linear(6, 6), Stash("near")), Noise(), nn.Linear(6, 6)),
        *(Pop("near"), nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()),
        *(Pop("far"), nn.Linear(6, 2)),
    ]


def way(
    name: str, workers: int, modes: Sequence[str], replicas: int = 1, virtual: int | None = None
) -> Way:
    """Return the way of a registered schedule, whose stages have the modes in turn."""
    order = resolve(name, virtual)
    placement = order.place(workers, replicas)
    of_stage = [modes[stage % len(modes)] for stage in range(placement.stages)]

    def compute(where: Placement, microbatches: int) -> Orders:
        by_stage = [recomputed(mode, microbatches) for mode in of_stage]
        made = order.compute(where, microbatches, by_stage)
        offloads = {stage for stage, mode in enumerate(of_stage) if mode == OFFLOAD}
        return [with_fetches(actions, offloads) for actions in made]

    return Way(placement, compute)


@pytest.mark.parametrize("name", MANY)
def test_every_schedule_equals_the_plain_loop(name: str) -> None:
    """With dropout and skips; M is less than K, and more than fills the pipeline."""
    layers = network()
    for workers, microbatches in ((1, 3), (2, 9), (3, 1), (3, 7), (4, 3)):
        batches = data(*SIZES)
        expected = plain_loop(copy.deepcopy(layers), mse, batches, microbatches, adam)
        modes = ["never"] if workers == 2 else MODES
        pipeline = Pipeline(
            layers,
            mse,
            batches,
            way(name, workers, modes),
            microbatches=microbatches,
            skips=ENDS,
            optimizer=adam,
        )
        case = f"{name} K={workers} M={microbatches}"
        assert_equal(pipeline.train(len(SIZES)), expected, case)


@pytest.mark.parametrize("name", MANY)
def test_every_schedule_adds_replicas_and_tied_weights_in_order(name: str) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)]
    batches = data(*SIZES)
    expected = plain_replicas(copy.deepcopy(layers), mse, batches, 5, 2, adam)
    train = partial(Pipeline, layers, mse, batches, microbatches=5, optimizer=adam)
    made = way(name, 2, ["never", "always"], replicas=2)
    assert_equal(train(made).train(len(SIZES)), expected, name)
    tied = [("0.weight", "2.weight")]
    one = train(filled(Placement.identity(1, 2)), tied=tied).train(len(SIZES))
    assert_equal(train(made, tied=tied).train(len(SIZES)), one, name)


def test_a_round_may_wait_for_the_first_worker() -> None:
    """Five frames wait on the channel from the last worker back to the first, which holds four."""
    layers = [nn.Linear(2, 2) for _ in range(16)]
    batches = data(23, width=2)
    expected = plain_loop(copy.deepcopy(layers), mse, batches, 23)
    made = way("interleaved-1f1b", 8, ["never"])
    pipeline = Pipeline(layers, mse, batches, made, microbatches=23)
    assert_equal(pipeline.train(1), expected)
