"""Every registered schedule is bitwise equal to the plain loop: any K, M and recompute modes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from pipeworker.facts.connections import Skip
from pipeworker.plan.actions import COMPUTE, Kind
from pipeworker.plan.orders import ORDERS, resolve
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import OFFLOAD, recomputed, with_fetches, with_recomputes
from support.draws import some
from support.in_process.layers import Noise, Pop, Stash, adam, data, mse
from support.in_process.pipelines import MODES, Pipeline, Way, filled
from support.in_process.plain_loop import assert_equal
from support.in_process.plain_loop import plain as plain_loop
from support.in_process.replicas import plain as plain_replicas
from support.pure.orders import Orders
from support.slow import slow

MANY = sorted({*ORDERS} - {"gpipe"})
SIZES = (9, 2)
"""Ragged mini-batches: one has fewer samples than there are micro-batches."""
FORWARDS = (Kind.FORWARD, Kind.SEND_ACTIVATION, Kind.SEND_TARGET, Kind.SEND_SKIP)
ENDS = (Skip(0, 10, "far"), Skip(3, 6, "near"))


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
        made = [with_recomputes(one, by_stage) for one in order.compute(where, microbatches)]
        offloads = {stage for stage, mode in enumerate(of_stage) if mode == OFFLOAD}
        return [with_fetches(actions, offloads) for actions in made]

    return Way(placement, compute)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("1f1b", "zbv") else slow) for name in MANY]
)
def test_every_schedule_equals_the_plain_loop(name: str) -> None:
    """With dropout and skips; M is less than K, and more than fills the pipeline."""
    layers = network()
    cases = ((1, 3), (2, 9), (3, 1), (3, 7), (4, 3))
    for workers, microbatches in some(cases, 2, int(name != "1f1b")):
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


def test_a_stage_that_returns_its_input_keeps_it_from_the_next_one_on_its_worker() -> None:
    """The next stage works in place, before the recompute of the one that returned its input."""
    torch.manual_seed(5)
    layers = [nn.Linear(6, 6), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(6, 2)]
    batches = data(6, 6)
    expected = plain_loop(copy.deepcopy(layers), mse, batches, 3, adam)
    zbv = way("zbv", 2, ["always"])
    pipeline = Pipeline(layers, mse, batches, zbv, microbatches=3, optimizer=adam)
    assert_equal(pipeline.train(2), expected)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("1f1b", "zbv") else slow) for name in MANY]
)
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


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if (number + turn) % 2 else slow)
        for number, name in enumerate(["gpipe", "interleaved-1f1b", "zbv", "zb-h1"])
        for turn, mode in enumerate(["never", "always"])
    ],
)
def test_frozen_stages_have_no_needless_backward(name: str, mode: str) -> None:
    """The front of the network is frozen, and a part of its middle; a skip begins in the front."""
    layers = network()
    workers = 5 - resolve(name).virtual_stages
    balance = (2, 2, 4, 4) if workers == 4 else (2,) * 6
    frozen = (0, 2) if workers == 4 else (0, 1, 3)
    still = [*range(2), *range(4, 8)] if workers == 4 else [*range(4), 6, 7]
    for index in still:
        layers[index].requires_grad_(requires_grad=False)
    batches = data(*SIZES)
    expected = plain_loop(copy.deepcopy(layers), mse, batches, 5, adam)
    assert expected.grads[0]["0.0.weight"] is None
    assert expected.grads[0]["8.weight"] is not None
    made = replace(way(name, workers, [mode]), frozen=frozen)
    pipeline = Pipeline(
        *(layers, mse, batches, made), balance=balance, microbatches=5, skips=ENDS, optimizer=adam
    )
    assert_equal(pipeline.train(len(SIZES)), expected, name)
    kinds = {(a.kind, a.stage) for order in pipeline.schedule(5).workers for a in order}
    assert {kind for kind, stage in kinds if stage == 0} <= {*FORWARDS, Kind.LOAD}
    assert {kind for kind, stage in kinds if stage == frozen[-1]} & COMPUTE <= {
        *(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD)
    }


def test_a_round_may_wait_for_the_first_worker() -> None:
    """Five frames wait on the channel from the last worker back to the first, which holds four."""
    layers = [nn.Linear(2, 2) for _ in range(16)]
    batches = data(23, width=2)
    expected = plain_loop(copy.deepcopy(layers), mse, batches, 23)
    made = way("interleaved-1f1b", 8, ["never"])
    pipeline = Pipeline(layers, mse, batches, made, microbatches=23)
    assert_equal(pipeline.train(1), expected)
