"""An evaluation pass with several stages per worker equals that with one worker."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Skip
from pipeworker.facts.failure import Cause, Failure
from pipeworker.plan.placement import Placement
from pipeworker.worker.stage import rng
from support.in_process.layers import Apply, Layer, Noise, Pop, Stash, data, mse
from support.in_process.pipelines import Pipeline, Way, filled
from support.in_process.plain_loop import Batches, plain, split
from support.pure.orders import always, zero_bubble
from support.slow import slow

PLACEMENTS = [
    *(Placement.identity(k) for k in (1, 4)),
    Placement.looped(2, 2),
    Placement(((0, 3), (1, 2))),
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


def plain_evaluation(
    layers: Sequence[nn.Module], batches: Batches, microbatches: int, step: int
) -> Seen:
    """Run the plain loop over micro-batches, which are numbered through the whole pass."""
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


def assert_same(actual: Any, expected: Any) -> None:
    assert type(actual) is type(expected)
    if isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
        assert not actual.requires_grad
    elif isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        assert_same(list(actual.values()), list(expected.values()))
    elif isinstance(actual, (list, tuple)):
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    else:
        assert actual == expected


@pytest.mark.parametrize(
    ("placement", "lanes"),
    [
        pytest.param(placement, lanes, marks=slow if (number + lanes) % 2 else ())
        for number, placement in enumerate(PLACEMENTS)
        for lanes in (1, 2)
    ],
    ids=str,
)
def test_outputs_equal_the_plain_loop(placement: Placement, lanes: int) -> None:
    evaluation = data(8, 5, 2, 9)
    pipeline = Pipeline(
        unet(), mse, data(8), filled(placement), microbatches=4, skips=SKIPS, lanes=lanes
    )
    for step in (0, 3):
        expected = plain_evaluation(pipeline.layers, evaluation, 4, step)
        assert_same(pipeline.stream(step, evaluation), expected)
    assert all(layer.training for layer in pipeline.layers)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_nested_outputs_equal_the_plain_loop(placement: Placement) -> None:
    evaluation = [({"x": x}, y) for x, y in data(8, 5)]
    batches = [({"x": x}, y) for x, y in data(8)]
    pipeline = Pipeline(nested(), mse, batches, filled(placement), microbatches=3)
    assert_same(pipeline.stream(1, evaluation), plain_evaluation(pipeline.layers, evaluation, 3, 1))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_an_evaluation_generator_that_ends(placement: Placement) -> None:
    def stops() -> Iterator[Any]:
        yield data(8)[0]

    pipeline = Pipeline(unet(), mse, data(8), filled(placement), microbatches=2, skips=SKIPS)
    assert len(pipeline.stream(1, stops())) == 2
    assert len(pipeline.stream(2, data(3))) == 2


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_every_worker_gets_the_prediction_and_may_change_it(placement: Placement) -> None:
    evaluation = data(8, 5)
    pipeline = Pipeline(unet(), mse, data(8, 8), filled(placement), microbatches=4, skips=SKIPS)
    for step in (0, 1):
        whole = torch.cat(
            [output for output, _, _ in plain_evaluation(pipeline.layers, evaluation, 4, step)]
        )
        outputs = pipeline.predict(step, evaluation)
        assert len(outputs) == placement.workers
        for output in outputs:
            assert_same(output, whole)
        for number, output in enumerate(outputs):
            output.fill_(number)
        assert [output.unique().tolist() for output in outputs] == [
            [n] for n in range(len(outputs))
        ]


class Fails(nn.Module):
    """Fails in eval mode, at one call."""

    def __init__(self) -> None:
        super().__init__()
        self.at = -1

    def forward(self, x: torch.Tensor) -> Any:
        if not self.training:
            self.at -= 1
            if self.at == -1:
                raise ValueError("as asked")
        return x


@pytest.mark.parametrize(
    ("place", "placement"),
    [
        pytest.param(place, placement, marks=slow if (number + turn) % 4 else ())
        for number, place in enumerate([0, 3, 7, 9])
        for turn, placement in enumerate(PLACEMENTS)
    ],
    ids=str,
)
def test_a_pass_that_fails_leaves_nothing_behind(placement: Placement, place: int) -> None:
    """At any layer and micro-batch, before, between and after skip connections."""
    layers, batches, evaluation = unet(), data(8, 8, 8), data(8, 5)
    layers.insert(place, Fails())
    skips = [
        Skip(s.source + (s.source >= place), s.target + (s.target >= place), s.name) for s in SKIPS
    ]
    expected = plain(copy.deepcopy(layers), mse, batches, 4)
    way, lanes = filled(placement), 1 + place % 2
    pipeline = Pipeline(layers, mse, batches, way, microbatches=4, skips=skips, lanes=lanes)
    (fails,) = [layer for layer in pipeline.layers if isinstance(layer, Fails)]
    at = iter((0, 2, 5))
    for step in (1, 2, 3):
        found: list[Exception] = []
        fails.at = next(at)
        pipeline.stream(step, evaluation, lambda error: Failure(Cause.USER, str(error)), found)
        assert [str(error).partition(" (")[2].partition(")")[0] for error in found] == ["Fails"]
        whole = pipeline.stream(step, evaluation)
        assert_same(whole, plain_evaluation(pipeline.layers, evaluation, 4, step))
        results = pipeline.step(step, last=step == 3)
        assert results[placement.owners[-1]].losses == expected.losses[step - 1]
        pipeline.clear()


@pytest.mark.parametrize("placement", PLACEMENTS[:3], ids=str)
def test_a_mini_batch_that_is_wrong_ends_the_pass(placement: Placement) -> None:
    def breaks() -> Iterator[Any]:
        yield data(8)[0]
        raise UsageError("no pair")

    found: list[Exception] = []
    pipeline = Pipeline(unet(), mse, data(8), filled(placement), microbatches=2, skips=SKIPS)
    pipeline.stream(1, breaks(), lambda error: Failure(Cause.USAGE, str(error)), found)
    assert ["no pair" in str(error) for error in found] == [True]
    assert len(pipeline.stream(2, data(3))) == 2


@pytest.mark.parametrize(
    ("split_backward", "placement"),
    [
        pytest.param(splits, placement, marks=slow if (number + splits) % 2 else ())
        for splits in (False, True)
        for number, placement in enumerate(PLACEMENTS)
    ],
    ids=str,
)
def test_evaluation_and_prediction_do_not_change_training(
    placement: Placement, split_backward: bool
) -> None:
    batches = data(8, 8, 8)
    layers = unet()
    expected = plain(copy.deepcopy(layers), mse, batches, 4)
    way = filled(placement, "except_first")
    if split_backward:
        way = Way(placement, lambda p, m: zero_bubble(p, m, always))
    pipeline = Pipeline(layers, mse, batches, way, microbatches=4, skips=SKIPS)
    for step in (1, 2, 3):
        pipeline.stream(step, data(5))
        results = pipeline.step(step, last=step == 3)
        assert results[placement.owners[-1]].losses == expected.losses[step - 1]
        pipeline.predict(step, data(5))
        grads = pipeline.grads()
        pipeline.clear()
        for name, grad in expected.grads[step - 1].items():
            gradient = grads[name]
            assert grad is not None
            assert gradient is not None
            assert torch.equal(gradient, grad), name
