"""Any small network in any placement and legal order is bitwise equal to the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import nn

from pipeworker.errors import ScheduleError
from pipeworker.facts.connections import Skip
from pipeworker.plan.actions import Action
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import with_fetches
from support.draws import draws
from support.in_process.layers import Layer, Noise, Pop, Stash, data, mse
from support.in_process.pipelines import Pipeline, Way, filled
from support.in_process.plain_loop import assert_equal, plain
from support.pure.orders import Orders, legal

WIDTH = 4


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


BLOCKS: list[Callable[[], list[nn.Module]]] = [
    lambda: [nn.Linear(WIDTH, WIDTH)],
    lambda: [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)],
    lambda: [nn.Tanh()],
    lambda: [nn.Identity()],
    lambda: [nn.LayerNorm(WIDTH)],
    lambda: [Noise()],
    lambda: [Layer(lambda x: (x, x.t(), 0.5)), Layer(lambda v: v[0] - v[1].t() * v[2])],
]


@st.composite
def placements(draw: st.DrawFn, stages: int) -> Placement:
    """Draw a placement on any number of workers, each with at least one stage."""
    workers = draw(st.integers(1, min(4, stages)))
    owners = draw(st.lists(st.integers(0, workers - 1), min_size=stages, max_size=stages))
    stages_of = [tuple(s for s, owner in enumerate(owners) if owner == w) for w in range(workers)]
    return Placement(tuple(some for some in stages_of if some))


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[nn.Module], tuple[Skip, ...]]:
    """Draw layers, and the skip connections between them."""
    torch.manual_seed(draw(st.integers(0, 5)))
    blocks = draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6))
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    layers += [layer for block in blocks for layer in block()]
    outside = [i for i, layer in enumerate(layers) if not isinstance(layer, (Layer, nn.ReLU))]
    skips: list[tuple[int, int, str]] = []
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        ends = sorted(draw(st.tuples(st.sampled_from(outside), st.sampled_from(outside))))
        skips.append((ends[0], ends[1], name))
    network: list[nn.Module] = []
    at: dict[str, int] = {}
    found: list[Skip] = []
    for index, layer in enumerate(layers):
        network.append(layer)
        for start, stop, name in skips:
            if start == index:
                # The next layer may work in place, because it gets a copy of the stashed tensor.
                network.append(nn.Sequential(Stash(name), Layer(lambda x: x * 1)))
                at[name] = len(network) - 1
            if stop == index:
                network.append(Pop(name))
                found.append(Skip(at[name], len(network) - 1, name))
    return [*network, nn.Linear(WIDTH, 2)], tuple(found)


def draw_orders(draw: st.DataObject, placement: Placement, microbatches: int) -> Orders:
    """Draw a legal order with any recompute, split backward, offload, and choice of actions."""
    recomputed = draw.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12))
    split = draw.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12))
    randomness = draw.draw(st.randoms(use_true_random=False))

    def pick(ready: Sequence[Action], done: Sequence[Action]) -> Action | None:
        return randomness.choice([*ready, None])

    orders = legal(
        placement,
        microbatches,
        pick,
        recompute=lambda s, m: (s, m) in recomputed,
        split=lambda s, m: (s, m) in split,
    )
    return (
        [with_fetches(order, range(placement.stages)) for order in orders]
        if draw.draw(st.booleans())
        else orders
    )


@settings(max_examples=draws(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_network_placement_and_order_equals_the_plain_loop(draw: st.DataObject) -> None:
    layers, skips = draw.draw(networks())
    stages = draw.draw(st.integers(1, min(6, len(layers))))
    cuts = draw.draw(
        st.sets(st.integers(1, len(layers) - 1), min_size=stages - 1, max_size=stages - 1)
    )
    bounds = [0, *sorted(cuts), len(layers)]
    balance = tuple(stop - first for first, stop in pairwise(bounds))
    placement = draw.draw(placements(stages))
    microbatches = draw.draw(st.integers(1, 5))
    orders = draw_orders(draw, placement, microbatches)
    batches = data(microbatches, 2 * microbatches + 1, microbatches, width=WIDTH)
    expected = plain(copy.deepcopy(layers), mse, batches, microbatches, sgd)
    try:
        pipeline = Pipeline(
            layers,
            mse,
            batches,
            Way(placement, lambda p, m: orders),
            balance=balance,
            microbatches=microbatches,
            skips=skips,
            optimizer=sgd,
            lanes=draw.draw(st.integers(1, 2)),
        )
    except ScheduleError as error:
        if "deadlocks with 4 frames" not in str(error):
            raise
        reject()
    assert_equal(pipeline.train(3), expected, str(pipeline.schedule(microbatches)))


@settings(max_examples=draws(12), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_tied_weights_equal_one_worker(draw: st.DataObject) -> None:
    """The uses of a weight may be on any stages."""
    count = draw.draw(st.integers(2, 7))
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(count)]
    for index in range(1, count):
        other = draw.draw(st.integers(0, index))
        if draw.draw(st.booleans()):
            layers[index].weight = layers[other].weight
        elif draw.draw(st.booleans()):
            layers[index] = layers[other]
    net: list[nn.Module] = [*layers, nn.Linear(WIDTH, 2)]
    stages = draw.draw(st.integers(1, min(6, len(net))))
    placement = draw.draw(placements(stages))
    microbatches = draw.draw(st.integers(1, 4))
    orders = draw_orders(draw, placement, microbatches)
    batches = data(microbatches, 2 * microbatches, microbatches, width=WIDTH)

    def train(way: Way) -> Any:
        pipeline = Pipeline(net, mse, batches, way, microbatches=microbatches, optimizer=sgd)
        return pipeline.train(3)

    try:
        actual = train(Way(placement, lambda p, m: orders))
    except ScheduleError as error:
        if "deadlocks with 4 frames" not in str(error):
            raise
        reject()
    assert_equal(actual, train(filled(Placement.identity(1))), str(placement))
