"""Any small network, in any placement and any legal order, has the bits of the plain loop."""

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
from pipeworker.plan.actions import Action
from pipeworker.plan.offload import fetched
from pipeworker.plan.placement import Placement
from pipeworker.plan.skips import Skip
from support.orders import Orders, legal
from support.pipelines import (
    Layer,
    Noise,
    Pipeline,
    Pop,
    Stash,
    Way,
    assert_equal,
    data,
    filled,
    mse,
    plain,
)

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
    """Any number of workers; every worker has a stage."""
    workers = draw(st.integers(1, min(4, stages)))
    owners = draw(st.lists(st.integers(0, workers - 1), min_size=stages, max_size=stages))
    held = [tuple(s for s, owner in enumerate(owners) if owner == w) for w in range(workers)]
    return Placement(tuple(some for some in held if some))


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[nn.Module], tuple[Skip, ...]]:
    """Layers, and the skip connections between them."""
    torch.manual_seed(draw(st.integers(0, 5)))
    blocks = draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=6))
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    layers += [layer for block in blocks for layer in block()]
    outside = [i for i, layer in enumerate(layers) if not isinstance(layer, (Layer, nn.ReLU))]
    skips: list[tuple[int, int, str]] = []
    for name in draw(st.lists(st.sampled_from("abc"), unique=True)):
        ends = sorted(draw(st.tuples(st.sampled_from(outside), st.sampled_from(outside))))
        skips.append((ends[0], ends[1], name))
    made: list[nn.Module] = []
    at: dict[str, int] = {}
    found: list[Skip] = []
    for index, layer in enumerate(layers):
        made.append(layer)
        for start, stop, name in skips:
            if start == index:
                # What is stashed is not what is passed on, so the next layer may work in place.
                made.append(nn.Sequential(Stash(name), Layer(lambda x: x * 1)))
                at[name] = len(made) - 1
            if stop == index:
                made.append(Pop(name))
                found.append(Skip(at[name], len(made) - 1, name))
    return [*made, nn.Linear(WIDTH, 2)], tuple(found)


def drawn(draw: st.DataObject, placement: Placement, microbatches: int) -> Orders:
    """Any legal order: what is recomputed, in halves, offloaded, and who does what next."""
    again = draw.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12))
    halves = draw.draw(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=12))
    forwards = draw.draw(st.permutations(range(microbatches)))
    randomness = draw.draw(st.randoms(use_true_random=False))

    def pick(ready: Sequence[Action], done: Sequence[Action]) -> Action | None:
        return randomness.choice([*ready, None])

    orders = legal(
        placement,
        microbatches,
        pick,
        again=lambda s, m: (s, m) in again,
        halves=lambda s, m: (s, m) in halves,
        forwards=forwards,
    )
    return [fetched(order) for order in orders] if draw.draw(st.booleans()) else orders


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_network_placement_and_order(draw: st.DataObject) -> None:
    layers, skips = draw.draw(networks())
    stages = draw.draw(st.integers(1, min(6, len(layers))))
    cuts = draw.draw(
        st.sets(st.integers(1, len(layers) - 1), min_size=stages - 1, max_size=stages - 1)
    )
    bounds = [0, *sorted(cuts), len(layers)]
    balance = tuple(stop - first for first, stop in pairwise(bounds))
    placement = draw.draw(placements(stages))
    microbatches = draw.draw(st.integers(1, 5))
    orders = drawn(draw, placement, microbatches)
    batches = data(microbatches, 2 * microbatches + 1, microbatches, width=WIDTH)
    expected = plain(copy.deepcopy(layers), mse, batches, microbatches, sgd)
    try:
        made = Pipeline(
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
    assert_equal(made.train(3), expected, str(made.schedule(microbatches)))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_ties(draw: st.DataObject) -> None:
    """The places of weights anywhere; the same as on one worker."""
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
    orders = drawn(draw, placement, microbatches)
    batches = data(microbatches, 2 * microbatches, microbatches, width=WIDTH)

    def train(way: Way) -> Any:
        made = Pipeline(net, mse, batches, way, microbatches=microbatches, optimizer=sgd)
        return made.train(3)

    try:
        ours = train(Way(placement, lambda p, m: orders))
    except ScheduleError as error:
        if "deadlocks with 4 frames" not in str(error):
            raise
        reject()
    assert_equal(ours, train(filled(Placement.identity(1))), str(placement))
