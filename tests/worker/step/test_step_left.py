"""After a step nothing of it is left: no micro-batch, no tensor, no frame."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import pipeworker
from pipeworker.facts.connections import Skip
from pipeworker.plan.placement import Placement
from pipeworker.worker.stage.microbatch import MicroBatch
from pipeworker.worker.transport.channel import Receiver
from support.in_process.channels import outstanding
from support.in_process.layers import data, mse
from support.in_process.pipelines import MODES, Pipeline, Way, filled
from support.pure.orders import Which, always, depth_first, never, zero_bubble
from support.slow import mostly_slow, slow

PLACEMENTS = [
    *(Placement.identity(k) for k in (1, 4)),
    Placement.looped(2, 2),
    Placement(((0, 3), (1, 2))),
    Placement(((0, 1, 2, 3),)),
]


class Watched(nn.Module):
    """A layer that keeps weak references to every tensor that passes, and to its gradient."""

    seen: list[weakref.ref[Any]] = []  # noqa: RUF012 - one for all copies

    def __init__(self, name: str = "", pops: bool = False) -> None:
        super().__init__()
        self.linear, self.name, self.pops = nn.Linear(6, 6), name, pops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.name and self.pops:
            other = pipeworker.pop(self.name)
            self.seen.append(weakref.ref(other))
            y = y + other
        elif self.name:
            pipeworker.stash(self.name, y)
        note = self.seen.append
        if y.requires_grad:
            y.register_hook(lambda grad: note(weakref.ref(grad)))  # type: ignore[no-untyped-call]
        self.seen += [weakref.ref(x), weakref.ref(y), weakref.ref(y.untyped_storage())]
        return y


def watched() -> list[nn.Module]:
    return [
        Watched(),
        Watched("a"),
        nn.Tanh(),
        Watched("b"),
        Watched(),
        Watched("b", True),
        Watched("a", True),
        nn.Linear(6, 2),
    ]


SKIPS = (Skip(1, 6, "a"), Skip(3, 5, "b"))


@pytest.fixture(autouse=True)
def _freeze_older_objects() -> Iterator[None]:
    """Exclude objects of earlier tests from garbage collection, which is slow otherwise."""
    Watched.seen.clear()
    gc.freeze()
    yield
    gc.unfreeze()


def assert_nothing_left(pipeline: Pipeline, least: int) -> None:
    gc.collect()
    assert len(Watched.seen) >= least
    alive = [ref() for ref in Watched.seen if ref() is not None]
    assert alive == []
    assert not [found for found in gc.get_objects() if type(found) is MicroBatch]
    for wiring in pipeline.wirings:
        for receiver in wiring.receivers.values():
            assert_empty(receiver)
    for parameter in pipeline.grads().values():
        assert parameter is not None
        assert parameter.grad_fn is None


def assert_empty(receiver: Receiver) -> None:
    assert outstanding(receiver) == 0


def pipeline_of(way: Way, lanes: int = 1) -> Pipeline:
    pipeline = Pipeline(
        watched(), mse, data(8, 8, 8), way, microbatches=4, skips=SKIPS, lanes=lanes
    )
    Watched.seen.clear()
    return pipeline


@pytest.mark.parametrize(
    ("recompute", "lanes"),
    [
        pytest.param(mode, lanes, marks=slow if (number + lanes) % 2 else ())
        for number, mode in enumerate(MODES)
        for lanes in (1, 2)
    ],
)
@pytest.mark.parametrize("placement", mostly_slow(PLACEMENTS, 2), ids=str)
def test_nothing_is_left_after_a_step(placement: Placement, recompute: str, lanes: int) -> None:
    pipeline = pipeline_of(filled(placement, recompute), lanes)
    for step in (1, 2):  # frames are described in the first step, and known in the second
        pipeline.step(step, last=step == 2)
    assert_nothing_left(pipeline, 6 * 4 * 2 * 2)


@pytest.mark.parametrize("recomputed", [never, always])
@pytest.mark.parametrize("order", ["zero bubble", pytest.param("depth first", marks=slow)])
@pytest.mark.parametrize("placement", mostly_slow(PLACEMENTS, 2), ids=str)
def test_nothing_is_left_after_split_backwards(
    placement: Placement, order: str, recomputed: Which
) -> None:
    if order == "zero bubble":
        way = Way(placement, lambda p, m: zero_bubble(p, m, recomputed))
    else:
        way = Way(
            placement, lambda p, m: depth_first(p, m, recomputed, lambda s, mb: s % 2 == mb % 2)
        )
    pipeline = pipeline_of(way)
    for step in (1, 2):  # frames are described in the first step, and known in the second
        pipeline.step(step, last=step == 2)
    assert_nothing_left(pipeline, 6 * 4 * 2 * 2)


@pytest.mark.parametrize("lanes", [pytest.param(1, marks=slow), 2])
@pytest.mark.parametrize("placement", mostly_slow(PLACEMENTS, 2), ids=str)
def test_nothing_is_left_after_an_evaluation_pass(placement: Placement, lanes: int) -> None:
    pipeline = pipeline_of(filled(placement), lanes)
    pipeline.step(1, last=False)
    for step in (1, 2):
        Watched.seen.clear()
        seen = pipeline.stream(step, data(8, 5))
        assert len(seen) == 8
        seen.clear()
        assert_nothing_left(pipeline, 6 * 8 * 2)
        outputs = pipeline.predict(step, data(8, 5))
        outputs.clear()
        assert_nothing_left(pipeline, 6 * 8 * 2)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_closed_executor_refers_to_no_layer(placement: Placement) -> None:
    pipeline = pipeline_of(filled(placement), lanes=2)
    pipeline.step(1, last=True)
    layers = [weakref.ref(layer) for layer in pipeline.layers]
    for wiring in pipeline.wirings:
        wiring.close()
    del pipeline, wiring
    gc.collect()
    assert [layer() for layer in layers if layer() is not None] == []
