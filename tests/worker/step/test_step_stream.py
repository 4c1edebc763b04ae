"""An evaluation pass with several stages a worker gives what one worker gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.plan.placement import Placement
from pipeworker.plan.skips import Skip
from pipeworker.worker.stage import rng
from support.orders import always, zero_bubble
from support.pipelines import (
    Apply,
    Batches,
    Layer,
    Noise,
    Pipeline,
    Pop,
    Stash,
    Way,
    data,
    filled,
    mse,
    plain,
    split,
)

PLACEMENTS = [
    *(Placement.identity(k) for k in (1, 2, 4)),
    Placement.looped(2, 2),
    Placement(((0, 3), (1, 2))),
    Placement(((0, 1), (2, 3))),
    Placement(((0, 1, 2, 3),)),
]
SKIPS = (Skip(1, 6, "a"), Skip(3, 5, "b"))
Seen = list[tuple[Any, Any, int]]


def unet() -> list[nn.Module]:
    return [
        nn.Linear(6, 6),
        Stash("a"),
        nn.BatchNorm1d(6),
        Stash("b"),
        Noise(),
        Pop("b"),
        Pop("a"),
        nn.Dropout(),
        nn.Linear(6, 2),
    ]


def nested() -> list[nn.Module]:
    return [
        Apply("x", "h"),
        Layer(lambda v: {**v, "t": v["h"].t(), "ids": torch.arange(3), "n": 2}),
        Layer(lambda v: {**v, "h": v["h"] * v["t"].t() * v["n"]}),
        Apply("h", "out", 6, 2),
    ]


def expected(layers: Sequence[nn.Module], batches: Batches, microbatches: int, step: int) -> Seen:
    """The loop over micro-batches, numbered through the whole pass."""
    net = nn.Sequential(*copy.deepcopy(layers)).eval()
    seen: Seen = []
    with torch.no_grad():
        for x, y in batches:
            count = min(microbatches, len(y))
            for xm, ym in zip(split(x, count), split(y, count), strict=True):
                for index, layer in enumerate(net):
                    rng.seed_all(rng.evaluation_seed(0, step, len(seen), index))
                    xm = layer(xm)
                seen.append((xm, ym, len(ym)))
    return seen


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        assert_same(list(ours.values()), list(theirs.values()))
    elif isinstance(ours, (list, tuple)):
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_outputs_are_those_of_the_loop(placement: Placement, lanes: int) -> None:
    evaluation = data(8, 5, 2, 9)
    made = Pipeline(
        unet(), mse, data(8), filled(placement), microbatches=4, skips=SKIPS, lanes=lanes
    )
    for step in (0, 3):
        theirs = expected(made.layers, evaluation, 4, step)
        assert_same(made.stream(step, evaluation), theirs)
    assert all(layer.training for layer in made.layers)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_nested_values(placement: Placement) -> None:
    evaluation = [({"x": x}, y) for x, y in data(8, 5)]
    batches = [({"x": x}, y) for x, y in data(8)]
    made = Pipeline(nested(), mse, batches, filled(placement), microbatches=3)
    assert_same(made.stream(1, evaluation), expected(made.layers, evaluation, 3, 1))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_an_evaluation_without_mini_batches_ends(placement: Placement) -> None:
    def stops() -> Iterator[Any]:
        yield data(8)[0]

    made = Pipeline(unet(), mse, data(8), filled(placement), microbatches=2, skips=SKIPS)
    assert len(made.stream(1, stops())) == 2
    assert len(made.stream(2, data(3))) == 2


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_worker_gets_the_prediction_and_may_change_it(placement: Placement) -> None:
    evaluation = data(8, 5)
    made = Pipeline(unet(), mse, data(8, 8), filled(placement), microbatches=4, skips=SKIPS)
    for step in (0, 1):
        whole = torch.cat([output for output, _, _ in expected(made.layers, evaluation, 4, step)])
        given = made.predict(step, evaluation)
        assert len(given) == placement.workers
        for output in given:
            assert_same(output, whole)
        for number, output in enumerate(given):
            output.fill_(number)
        assert [output.unique().tolist() for output in given] == [[n] for n in range(len(given))]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("halves", [False, True])
def test_training_goes_on_as_if_nothing_had_been(placement: Placement, halves: bool) -> None:
    batches = data(8, 8, 8)
    layers = unet()
    theirs = plain(copy.deepcopy(layers), mse, batches, 4)
    way = filled(placement, "except_first")
    if halves:
        way = Way(placement, lambda p, m: zero_bubble(p, m, always))
    made = Pipeline(layers, mse, batches, way, microbatches=4, skips=SKIPS)
    for step in (1, 2, 3):
        made.stream(step, data(5))
        results = made.step(step, last=step == 3)
        assert results[placement.owners[-1]].losses == theirs.losses[step - 1]
        made.predict(step, data(5))
        grads = made.grads()
        made.clear()
        for name, grad in theirs.grads[step - 1].items():
            mine = grads[name]
            assert grad is not None
            assert mine is not None
            assert torch.equal(mine, grad), name
