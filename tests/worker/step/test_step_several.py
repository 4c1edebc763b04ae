"""Several stages per worker: local neighbours pass tensors in memory; the bits stay the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import pipeworker
from pipeworker.errors import SkipError, UsageError
from pipeworker.facts.connections import Skip
from pipeworker.plan.actions import Kind
from pipeworker.plan.placement import Placement
from pipeworker.plan.recompute import recomputed
from support.draws import some
from support.in_process.layers import Apply, Layer, Noise, Pop, Stash, data, mlp, mse
from support.in_process.pipelines import MODES, Pipeline, Way, filled
from support.in_process.plain_loop import Batches, Trained, assert_equal, plain
from support.pure.orders import Orders, Which, by, depth_first, legal, written
from support.slow import mostly_slow, slow

LOOPED, VEE = Placement.looped(2, 2), Placement(((0, 3), (1, 2)))
TOGETHER = Placement(((0, 1, 2, 3),))
PLACEMENTS = {"looped": LOOPED, "vee": VEE, "adjacent": Placement(((0, 1), (2, 3)))}
FOUR = 4


def mode_of(mode: str) -> Which:
    return lambda stage, m: m in recomputed(mode, FOUR)


def breadth_first(placement: Placement, microbatches: int, recompute: Which) -> Orders:
    """Return the order in which each stage runs all micro-batches before the next stage."""
    pick = by(Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, deep=False)
    return legal(placement, microbatches, pick, recompute=recompute)


def one_forward_one_backward(placement: Placement, microbatches: int, recompute: Which) -> Orders:
    """Return the order with few micro-batches in flight."""
    pick = by(Kind.BACKWARD, Kind.RECOMPUTE, Kind.FORWARD, limit=placement.stages)
    return legal(placement, microbatches, pick, recompute=recompute)


ORDERS: dict[str, Callable[[Placement, int, Which], Orders]] = {
    "breadth first": breadth_first,
    "depth first": depth_first,
    "one forward, one backward": one_forward_one_backward,
}
INTERLEAVED = written(
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
)
"""As Megatron-LM's interleaved schedule (Narayanan et al. 2021, section 2.2)."""
V_SHAPED = written(
    "0F0 0F1 0F2 3F0 3B0 0F3 3F1 3B1 0B0 3F2 3B2 0B1 3F3 3B3 0B2 0B3",
    "1F0 2F0 1F1 2F1 1F2 2F2 2B0 1B0 1F3 2B1 1B1 2F3 2B2 1B2 2B3 1B3",
)


def _compute(
    make: Callable[[Placement, int, Which], Orders], recompute: Which, placement: Placement, m: int
) -> Orders:
    return make(placement, m, recompute)


@functools.cache
def ways(mode: str = "never") -> list[tuple[str, Way]]:
    """Return all ways with several stages per worker, by name."""
    recompute = mode_of(mode)
    found = [
        (f"{where} {name} {mode}", Way(placement, partial(_compute, make, recompute)))
        for where, placement in PLACEMENTS.items()
        for name, make in ORDERS.items()
    ]
    found += [(f"{where} filled {mode}", filled(p, mode)) for where, p in PLACEMENTS.items()]
    found.append((f"together filled {mode}", filled(TOGETHER, mode)))
    if mode == "never":
        found.append(("interleaved", Way(LOOPED, lambda p, m: INTERLEAVED)))
        found.append(("v-shaped", Way(VEE, lambda p, m: V_SHAPED)))
    return found


@functools.cache
def fewer_ways(mode: str) -> list[tuple[str, Way]]:
    """Return a quarter of the ways; over all modes, each order occurs in each placement."""
    names = (*PLACEMENTS, *ORDERS, "filled")
    turn = MODES.index(mode)
    return [
        (case, way)
        for case, way in ways(mode)
        if (words := case.partition(" "))[0] not in PLACEMENTS
        or (names.index(words[0]) + names.index(words[2].removesuffix(f" {mode}")) + turn) % 4 == 0
    ]


def check(
    layers: Sequence[nn.Module],
    batches: Batches,
    *,
    skips: Sequence[Skip] = (),
    balance: tuple[int, ...] | None = None,
    lanes: int = 1,
    every: int = 2,
    turn: int = 0,
) -> Trained:
    """Compare the plain loop with one worker and with ways of every mode.

    Each `every`-th of them is tried in an ordinary run, beginning with number `turn`.
    """
    expected = plain(copy.deepcopy(layers), mse, copy.deepcopy(batches), FOUR)
    one = Pipeline(
        layers, mse, batches, filled(Placement.identity(1)), microbatches=FOUR, skips=skips
    )
    assert_equal(one.train(len(batches)), expected, "one worker")
    which = ways if every == 1 else fewer_ways
    for case, way in some((one for mode in MODES for one in which(mode)), every, turn):
        pipeline = Pipeline(
            layers,
            mse,
            copy.deepcopy(batches),
            way,
            balance=balance,
            microbatches=FOUR,
            skips=skips,
            lanes=lanes,
        )
        assert_equal(pipeline.train(len(batches)), expected, case)
    return expected


@slow
def test_equals_the_plain_loop() -> None:
    check(mlp(), data(8, 8), every=1)


def test_two_lanes_equal_the_plain_loop() -> None:
    check(mlp(), data(8, 8), lanes=2, turn=1)


@slow
def test_mini_batches_of_changing_size_equal_the_plain_loop() -> None:
    """The number of micro-batches stays; their shapes change."""
    check(mlp(), data(8, 5, 11))


SKIPPING: dict[str, tuple[list[Callable[[], nn.Module]], tuple[Skip, ...]]] = {
    "everywhere": (
        [
            lambda: nn.Linear(6, 6),
            lambda: Stash("a"),
            lambda: nn.Linear(6, 6),
            lambda: Stash("b"),
            Noise,
            lambda: Pop("b"),
            lambda: Pop("a"),
            lambda: nn.Linear(6, 2),
        ],
        (Skip(1, 6, "a"), Skip(3, 5, "b")),
    ),
    "from the first stage to all": (
        [
            lambda: nn.Linear(6, 6),
            lambda: nn.Sequential(Stash("a"), Stash("b"), Stash("c")),
            lambda: nn.Linear(6, 6),
            lambda: Pop("c"),
            lambda: nn.Tanh(),
            lambda: Pop("a"),
            lambda: Pop("b"),
            lambda: nn.Linear(6, 2),
        ],
        (Skip(1, 5, "a"), Skip(1, 6, "b"), Skip(1, 3, "c")),
    ),
    "of the data": (
        [
            lambda: Stash("a"),
            lambda: nn.Linear(6, 6),
            lambda: nn.Linear(6, 6),
            lambda: Pop("a"),
            lambda: nn.Linear(6, 6),
            lambda: nn.Linear(6, 2),
        ],
        (Skip(0, 3, "a"),),
    ),
}


@pytest.mark.parametrize("name", mostly_slow(SKIPPING, 3))
def test_skip_connections_on_one_worker_and_across(name: str) -> None:
    """Every pair of stages is on one worker in one placement, and on two in another."""
    makers, skips = SKIPPING[name]
    check([make() for make in makers], data(8, 8), skips=skips)


@slow
def test_skip_connections_over_two_lanes() -> None:
    makers, skips = SKIPPING["everywhere"]
    check([make() for make in makers], data(8, 8), skips=skips, lanes=2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def tied() -> list[nn.Module]:
    """Return layers with a weight used four times, a bias twice, and a layer twice."""
    layers = [nn.Linear(6, 6) for _ in range(7)]
    for place in (2, 4, 6):
        layers[place].weight = layers[0].weight
    layers[5].bias = layers[1].bias
    layers[3] = layers[1]
    return [*layers, Noise(), nn.Linear(6, 2)]


@pytest.mark.parametrize("recompute", mostly_slow(MODES, 2))
def test_tied_weights_on_one_worker_and_across(recompute: str) -> None:
    """Gradients of the uses are added in model order, for any placement."""
    batches = data(8, 8, 8)

    def train(way: Way) -> Trained:
        pipeline = Pipeline(tied(), mse, batches, way, microbatches=FOUR, optimizer=sgd)
        return pipeline.train(3)

    torch.manual_seed(1)
    expected = train(filled(Placement.identity(1), recompute))
    assert not torch.equal(expected.weights["0.weight"], tied()[0].get_parameter("weight"))
    for places in ("0.weight 2.weight 4.weight 6.weight", "1.bias 3.bias 5.bias"):
        first, *others = places.split()
        assert all(torch.equal(expected.weights[first], expected.weights[o]) for o in others)
    identities = ((f"{k} workers", filled(Placement.identity(k), recompute)) for k in (2, 3, 4))
    for case, way in some([*identities, *fewer_ways(recompute)], 2, MODES.index(recompute) // 2):
        torch.manual_seed(1)
        assert_equal(train(way), expected, case)


def test_nested_values_passed_to_a_local_stage() -> None:
    layers = [
        Apply("x", "h"),
        Apply("h", "h"),
        Layer(lambda v: {**v, "h": v["h"] + v["x"], "t": v["h"].t(), "same": v["h"], "n": 3}),
        Layer(lambda v: v["h"] * v["t"].t() + v["same"] * v["n"]),
        nn.Linear(6, 2),
    ]
    check(layers, [({"x": x}, y) for x, y in data(8, 8)], turn=1)


@slow
def test_a_gradient_that_is_none_in_some_steps_and_one_that_always_is() -> None:
    def choose(value: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = value["a"]
        return out + value["b"] if value["flag"].any() else out

    layers = [
        Apply("x", "a", 6, 2),
        Apply("x", "b", 6, 2),
        Apply("x", "unused"),
        nn.Identity(),
        Layer(choose),
    ]
    flags = [torch.zeros(8), torch.ones(8), torch.tensor([0, 0, 1.0, 0, 0, 0, 0, 0])]
    batches = [
        ({"x": x, "flag": flag}, y) for (x, y), flag in zip(data(8, 8, 8), flags, strict=True)
    ]
    check(layers, batches)


@slow
def test_an_in_place_first_layer_after_a_local_stage() -> None:
    """The layer would change the output of the previous stage, which recompute needs."""
    relu = nn.ReLU(inplace=True)
    layers = [nn.Linear(6, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 2)]
    check(layers, data(8, 8), balance=(1, 2, 1, 1))
    check([nn.Hardtanh(-0.5, 0.5, inplace=True), *layers], data(8, 8), balance=(1, 1, 2, 2))


class PopInPlace(nn.Module):
    """A layer that changes a popped tensor in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pipeworker.pop("a").mul_(2) + x


@slow
@pytest.mark.parametrize("linear", [True, False], ids=["saved", "not saved"])
def test_a_popped_tensor_may_be_changed_in_place(linear: bool) -> None:
    """Recompute needs the tensor as it was stashed."""
    layers = [
        nn.Linear(6, 6),
        Stash("a"),
        Layer(lambda x: x * 0.5),  # which saves nothing of its input for backward
        nn.Sequential(PopInPlace(), nn.Linear(6, 6) if linear else nn.Identity()),
        nn.Linear(6, 2),
    ]
    check(layers, data(8, 8), skips=[Skip(1, 3, "a")])
    batches = data(8, 8)
    expected = plain(copy.deepcopy(layers), mse, batches, FOUR)
    for balance in ((5,), (3, 2), (2, 1, 2)):
        for mode in MODES:
            pipeline = Pipeline(
                layers,
                mse,
                batches,
                filled(Placement.identity(len(balance)), mode),
                balance=balance,
                microbatches=FOUR,
                skips=[Skip(1, 3, "a")],
            )
            assert_equal(pipeline.train(2), expected, f"{balance} {mode}")


def changed_after_the_stash(inplace: bool) -> list[nn.Module]:
    torch.manual_seed(1)
    return [
        nn.Linear(6, 6),
        Stash("a"),
        nn.Sequential(nn.ReLU(inplace=inplace), nn.Linear(6, 6)),
        nn.Sequential(Pop("a"), nn.Linear(6, 2)),
    ]


@pytest.mark.parametrize(
    ("placement", "recompute"),
    [
        pytest.param(placement, mode, marks=slow if (number + turn) % 2 else ())
        for number, placement in enumerate([TOGETHER, LOOPED, VEE, Placement.identity(4)])
        for turn, mode in enumerate(MODES)
    ],
    ids=str,
)
def test_a_stashed_tensor_may_be_changed_in_place_by_another_stage(
    placement: Placement, recompute: str
) -> None:
    """A tensor that leaves a stage twice becomes two tensors, on one worker as on two."""
    batches = data(8, 8)
    expected = plain(changed_after_the_stash(False), mse, batches, FOUR)
    pipeline = Pipeline(
        changed_after_the_stash(True),
        mse,
        batches,
        filled(placement, recompute),
        microbatches=FOUR,
        skips=[Skip(1, 3, "a")],
    )
    assert_equal(pipeline.train(2), expected)


def test_a_stashed_tensor_changed_in_place_by_the_same_stage_is_rejected() -> None:
    pipeline = Pipeline(
        changed_after_the_stash(True),
        mse,
        data(8),
        filled(Placement.identity(2)),
        balance=(3, 1),
        microbatches=FOUR,
        skips=[Skip(1, 3, "a")],
        limit=0.2,
    )
    with pytest.raises(SkipError, match="changed in place after it was stashed"):
        pipeline.step(1, last=True)


def with_views(of: Callable[[torch.Tensor], torch.Tensor], inplace: bool) -> list[nn.Module]:
    """Return layers of which the second gets a tensor and another one made of it."""
    torch.manual_seed(1)
    return [
        nn.Sequential(nn.Linear(6, 6), Layer(lambda h: (h, of(h)))),
        Layer(lambda pair: (pair[0].add_(1) if inplace else pair[0] + 1)[:, :3] + pair[1]),
        nn.Linear(3, 2),
    ]


@pytest.mark.parametrize(
    ("placement", "recompute"),
    [
        (Placement.identity(3), "always"),
        (LOOPED, "never"),
        pytest.param(Placement.identity(3), "never", marks=slow),
        pytest.param(LOOPED, "always", marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("of", "inplace"),
    [(lambda h: h[:, :3], True), (lambda h: h[:, :3], False), (lambda h: h[:, :3].clone(), True)],
    ids=["changed view", "view", "changed copy"],
)
def test_a_change_that_a_view_on_another_stage_would_show_is_rejected(
    placement: Placement, recompute: str, of: Callable[[torch.Tensor], torch.Tensor], inplace: bool
) -> None:
    batches = data(8, 8)
    layers = with_views(of, inplace)
    if placement is LOOPED:
        layers.append(nn.Identity())
    pipeline = Pipeline(
        layers, mse, batches, filled(placement, recompute), microbatches=FOUR, limit=0.5
    )
    if inplace and of(torch.ones(2, 6))._base is not None:
        with pytest.raises(UsageError, match="layer 0 returned another one in the same memory"):
            pipeline.step(1, last=True)
        return
    expected = plain(with_views(of, inplace), mse, batches, FOUR)
    assert_equal(pipeline.train(2), expected)


@pytest.mark.parametrize(
    ("placement", "recompute"),
    [
        pytest.param(placement, mode, marks=slow if (number + turn) % 4 else ())
        for number, placement in enumerate(
            [*map(Placement.identity, (1, 2, 4)), *PLACEMENTS.values(), TOGETHER]
        )
        for turn, mode in enumerate(MODES)
    ],
    ids=str,
)
def test_batch_norm_statistics_are_updated_once(placement: Placement, recompute: str) -> None:
    layers = [nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Linear(4, 2)]
    batches = data(8, 8, 8)
    reference = copy.deepcopy(layers)
    plain(reference, mse, batches, FOUR)
    pipeline = Pipeline(layers, mse, batches, filled(placement, recompute), microbatches=FOUR)
    pipeline.train(3)
    for name, buffer in reference[1].named_buffers():
        assert torch.equal(pipeline.layers[1].get_buffer(name), buffer), name


def test_most_ways_have_different_schedules() -> None:
    texts = [
        str(Pipeline(mlp(), mse, data(8), way, microbatches=FOUR).schedule(FOUR))
        for _, way in [*ways("never"), *ways("always")]
    ]
    assert len(set(texts)) > 0.8 * len(texts)
