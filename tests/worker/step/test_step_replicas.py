"""Replicas of a pipeline: bitwise equal to the loop that adds their gradients in order."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipeworker.errors import ReplicasDiffer, UsageError
from pipeworker.facts.connections import Skip
from pipeworker.plan.placement import Placement
from support.draws import draws
from support.in_process.layers import Layer, Noise, Pop, Stash, adam, data, mse
from support.in_process.pipelines import MODES, Pipeline, Way, filled
from support.in_process.plain_loop import assert_equal
from support.in_process.plain_loop import plain as plain_loop
from support.in_process.replicas import plain
from support.pure.orders import always, legal
from support.slow import slow

SIZES = (12, 7, 2, 1, 12)
"""Even, uneven, and fewer samples than replicas or micro-batches."""
FEWER = (7, 2)
"""Uneven, and fewer than micro-batches, where the layers or the optimizer are what is tested."""


def kinds(parameters: Any) -> list[torch.optim.Optimizer]:
    """Return an optimizer for matrices and one for all else, where there are such parameters."""
    every = list(parameters)
    large, small = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    found: list[torch.optim.Optimizer] = []
    if large:
        found.append(torch.optim.SGD(large, lr=0.05, momentum=0.9))
    if small:
        found.append(torch.optim.AdamW(small, lr=0.01))
    return found


def net() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Linear(6, 8), nn.Tanh(), Noise(), nn.Linear(8, 6), nn.Linear(6, 2)]


@pytest.mark.parametrize("replicas", [1, 3, *(pytest.param(n, marks=slow) for n in (2, 5))])
def test_results_equal_the_loop_that_adds_replicas_in_order(replicas: int) -> None:
    """The network has dropout; over all cases each mode has each number of stages."""
    layers, batches = net(), data(*SIZES)
    expected = plain(copy.deepcopy(layers), mse, batches, 5, replicas, adam)
    for index, mode in enumerate(MODES):
        stages = 1 + (index + replicas) % 3
        way = filled(Placement.identity(stages, replicas), mode)
        pipeline = Pipeline(
            copy.deepcopy(layers), mse, batches, way, microbatches=5, optimizer=adam
        )
        assert_equal(pipeline.train(len(batches)), expected, f"{replicas} x {stages}, {mode}")


@pytest.mark.parametrize("sharded", [False, True])
def test_several_optimizers_equal_those_of_the_loop(sharded: bool) -> None:
    """A shard of a replica may lack parameters of one kind."""
    layers, batches = [*net(), nn.LayerNorm(2)], data(*FEWER)
    counts: set[int] = set()
    for replicas in (1, 2):
        expected = plain(copy.deepcopy(layers), mse, batches, 5, replicas, kinds)
        pipeline = Pipeline(
            copy.deepcopy(layers),
            mse,
            batches,
            filled(Placement.identity(3, replicas)),
            microbatches=5,
            optimizer=kinds,
            sharded=sharded,
        )
        assert_equal(pipeline.train(len(batches)), expected, f"{replicas} replicas")
        updaters = [u for made in pipeline.copies for u in made.updaters.values()]
        counts |= {len(updater.optimizers.all) for updater in updaters}
    assert counts == ({1, 2} if sharded else {2})


def test_one_replica_is_the_plain_loop_and_more_are_close() -> None:
    layers, batches = net(), data(12, 12, 12)
    expected = plain_loop(copy.deepcopy(layers), mse, batches, 6, adam)
    assert_equal(plain(copy.deepcopy(layers), mse, batches, 6, 1, adam), expected)
    for replicas in (2, 3):
        way = filled(Placement.identity(2, replicas))
        replicated = Pipeline(
            copy.deepcopy(layers), mse, batches, way, microbatches=6, optimizer=adam
        )
        for name, weight in replicated.train(3).weights.items():
            assert torch.allclose(weight, expected.weights[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(
    "placement", [Placement(((0, 3), (1, 2)), 2), Placement.looped(2, 2).copies(2)], ids=str
)
def test_a_worker_with_several_stages_of_a_replica(placement: Placement) -> None:
    layers, batches = net(), data(*FEWER)
    expected = plain(copy.deepcopy(layers), mse, batches, 4, 2, adam)
    split_backward = Way(placement, lambda where, m: legal(where, m, _first, split=always))
    for way in (filled(placement, "always"), split_backward):
        pipeline = Pipeline(
            copy.deepcopy(layers), mse, batches, way, microbatches=4, optimizer=adam
        )
        assert_equal(pipeline.train(len(batches)), expected)


def _first(ready: Any, done: Any) -> Any:
    return ready[0]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=slow), 3])
def test_a_loss_with_a_count_is_divided_by_the_total_of_all_replicas(stages: int) -> None:
    def counted(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        seen = target[:, 0] > 0
        return (output - target)[seen].square().sum(), int(seen.sum())

    layers, batches = net(), data(*SIZES)
    expected = plain(copy.deepcopy(layers), counted, batches, 4, 3, adam)
    way = filled(Placement.identity(stages, 3))
    pipeline = Pipeline(
        copy.deepcopy(layers), counted, batches, way, microbatches=4, optimizer=adam
    )
    assert_equal(pipeline.train(len(batches)), expected)


def test_tied_weights_are_summed_over_replicas_and_then_over_uses() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2)]
    tied = [("0.weight", "2.weight")]
    batches = data(*FEWER)
    found = []
    for stages in (1, 2, 4):
        way = filled(Placement.identity(stages, 2))
        pipeline = Pipeline(
            copy.deepcopy(layers), mse, batches, way, microbatches=4, optimizer=adam, tied=tied
        )
        found.append(pipeline.train(len(batches)))
    for other in found[1:]:
        assert_equal(other, found[0])
    first = found[0].grads[0]["0.weight"]
    layers[2].weight = layers[0].weight
    expected = plain_loop(layers, mse, batches[:1], 4).grads[0]["0.weight"]
    assert first is not None
    assert expected is not None
    assert torch.allclose(first, expected, rtol=1e-5, atol=1e-6)


class Sometimes(nn.Module):
    """A layer that uses one parameter for some samples only, and another never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.seldom, self.never = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return torch.add(y, self.seldom(x)) if x[0, 0] > 100 else y


@pytest.mark.parametrize("which", [0, pytest.param(5, marks=slow), 11])
def test_a_parameter_that_a_replica_does_not_use(which: int) -> None:
    """A parameter that no replica uses gets no gradient, so the optimizer does not update it."""
    torch.manual_seed(1)
    layers = [Sometimes(), nn.Linear(6, 2)]
    batches = data(12, 12)
    batches[0][0][which, 0] = 1000.0
    expected = plain(copy.deepcopy(layers), mse, batches, 12, 3, adam)
    assert expected.grads[0]["0.seldom.weight"] is not None
    assert expected.grads[1]["0.seldom.weight"] is None
    assert expected.grads[0]["0.never.weight"] is None
    for stages in (1, 2):
        way = filled(Placement.identity(stages, 3))
        pipeline = Pipeline(
            copy.deepcopy(layers), mse, batches, way, microbatches=12, optimizer=adam
        )
        assert_equal(pipeline.train(2), expected)


def test_a_single_gradient_keeps_its_bits() -> None:
    """Adding a zero would turn -0.0 into 0.0."""

    class Minus(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.Parameter(torch.ones(1, 3)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = (x[:, :3] * self.two).sum()
            return kept + (x[:, :3] * -0.0 * self.one).sum() if x[0, 5] > 0 else kept

    batches = [(torch.ones(2, 6), torch.zeros(2))]
    batches[0][0][1, 5] = -1.0  # the second replica does not use it
    pipeline = Pipeline(
        [Minus()],
        lambda output, target: output,
        batches,
        filled(Placement.identity(1, 2)),
        microbatches=2,
    )
    gradient = pipeline.train(1).grads[0]["0.one"]
    assert gradient is not None
    assert gradient.signbit().all()


def test_accumulated_gradients_are_reduced_once() -> None:
    layers, batches = net(), data(12, 7, 12, 3)
    expected = plain(copy.deepcopy(layers), mse, batches, 4, 2, accumulate=2)
    for stages in (1, 3):
        way = filled(Placement.identity(stages, 2))
        pipeline = Pipeline(copy.deepcopy(layers), mse, batches, way, microbatches=4)
        pipeline.step(1, False, whole=False)
        pipeline.step(1, False, first=4)
        for name, gradient in pipeline.grads().items():
            other = expected.grads[0][name]
            assert gradient is not None
            assert other is not None
            assert torch.equal(gradient, other)


def test_large_gradients_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeworker.plan.partition.PIECE_ELEMENTS", 7)
    layers, batches = net(), data(*FEWER)
    expected = plain(copy.deepcopy(layers), mse, batches, 4, 3, adam)
    for lanes in (1, 2):
        way = filled(Placement.identity(2, 3))
        pipeline = Pipeline(
            copy.deepcopy(layers), mse, batches, way, microbatches=4, optimizer=adam, lanes=lanes
        )
        assert_equal(pipeline.train(len(batches)), expected)


def test_gradients_of_any_dtype_and_layout_are_reduced() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bits = nn.Parameter(torch.randn(6, 6).bfloat16())
            self.twice = nn.Parameter(torch.randn(6, 6, dtype=torch.float64).t())
            self.pairs = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
            self.empty = nn.Parameter(torch.empty(0, 6))
            self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = x @ self.bits.float() + (x.double() @ self.twice).float()
            b: torch.Tensor = (x.to(torch.complex64) @ self.pairs).abs()
            return a + b + x @ self.frozen

    torch.manual_seed(4)
    layers, batches = [Mixed(), nn.Linear(6, 2)], data(*SIZES)
    expected = plain(copy.deepcopy(layers), mse, batches, 4, 3)
    way = filled(Placement.identity(2, 3))
    pipeline = Pipeline(copy.deepcopy(layers), mse, batches, way, microbatches=4)
    assert_equal(pipeline.train(len(batches)), expected)


@pytest.mark.parametrize("replicas", [3, *(pytest.param(n, marks=slow) for n in (2, 8))])
def test_a_sharded_optimizer_equals_a_whole_one(replicas: int) -> None:
    """Eight replicas are more than a stage has parameters."""
    layers, batches = net(), data(*FEWER)
    tied = [("0.bias", "1.bias")]
    layers[1] = nn.Linear(8, 8)
    expected = Pipeline(
        copy.deepcopy(layers),
        mse,
        batches,
        filled(Placement.identity(1, replicas)),
        microbatches=8,
        optimizer=adam,
        tied=tied,
    ).train(len(batches))
    for stages in (1, 3) if replicas < 8 else (2,):
        pipeline = Pipeline(
            copy.deepcopy(layers),
            mse,
            batches,
            filled(Placement.identity(stages, replicas)),
            microbatches=8,
            optimizer=adam,
            tied=tied,
            sharded=True,
        )
        assert_equal(pipeline.train(len(batches)), expected)
        for stage in range(stages):
            updaters = [replica.updaters[stage] for replica in pipeline.copies]
            sizes = [sum(len(one.state) for one in u.optimizers.all) for u in updaters]
            assert sizes == [len(shard) for shard in updaters[0].shards]
            assert max(sizes) < len(updaters[0].parameters)


class Turned(torch.optim.SGD):
    """An optimizer that replaces each matrix by one in another order, in every second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                turned = parameter.detach().t().contiguous().t()
                parameter.data = turned if self.steps % 2 else turned.contiguous()


def test_weights_that_a_sharded_optimizer_replaces_lie_alike_on_all_replicas() -> None:
    torch.manual_seed(3)
    sizes = ((6, 6), (6, 9), (9, 6), (6, 6), (6, 2))
    layers: list[nn.Module] = [nn.Linear(*size) for size in sizes]
    for steps in (1, 2):
        batches, found = data(*(7,) * steps), []
        for sharded in (False, True):
            pipeline = Pipeline(
                copy.deepcopy(layers),
                mse,
                batches,
                filled(Placement.identity(1, 3)),
                microbatches=3,
                optimizer=lambda parameters: Turned(parameters, lr=0.1),
                tied=[("0.weight", "3.weight")],
                sharded=sharded,
            )
            found.append(pipeline.train(steps))
            for one in pipeline.copies:
                weights = [p for layer in one.layers for p in layer.parameters() if p.dim() == 2]
                assert {p.is_contiguous() for p in weights} == {steps == 2}
                assert weights[0].data_ptr() == weights[3].data_ptr()
        assert_equal(found[1], found[0])


def test_a_sparse_gradient_is_rejected_with_its_name() -> None:
    layers = [nn.Embedding(10, 6, sparse=True), nn.Linear(6, 2)]
    batches = [(torch.arange(8) % 10, torch.randn(8, 2))]
    way = filled(Placement.identity(1, 2))
    pipeline = Pipeline(layers, mse, batches, way, microbatches=4, limit=5.0)
    with pytest.raises(UsageError, match=r"gradient of 0\.weight is sparse"):
        pipeline.train(1)


def test_skip_connections_stay_within_a_replica() -> None:
    layers = [
        nn.Linear(6, 6),
        Stash("kept"),
        nn.Linear(6, 6),
        Layer(torch.tanh),
        Pop("kept"),
        nn.Linear(6, 2),
    ]
    batches = data(*FEWER)
    found = []
    for stages in (1, 3):
        pipeline = Pipeline(
            copy.deepcopy(layers),
            mse,
            batches,
            filled(Placement.identity(stages, 2)),
            microbatches=4,
            optimizer=adam,
            skips=[Skip(1, 4, "kept")],
        )
        found.append(pipeline.train(len(batches)))
    assert_equal(found[1], found[0])


@settings(max_examples=draws(6), deadline=None)
@given(
    stages=st.integers(1, 3),
    replicas=st.integers(1, 4),
    microbatches=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=3),
    mode=st.sampled_from(MODES),
)
def test_any_number_of_replicas_for_any_sizes(
    stages: int, replicas: int, microbatches: int, sizes: list[int], mode: str
) -> None:
    layers, batches = net(), data(*sizes)
    microbatches = max(microbatches, replicas)
    expected = plain(copy.deepcopy(layers), mse, batches, microbatches, replicas, adam)
    way = filled(Placement.identity(stages, replicas), mode)
    pipeline = Pipeline(
        copy.deepcopy(layers), mse, batches, way, microbatches=microbatches, optimizer=adam
    )
    assert_equal(pipeline.train(len(batches)), expected)


def test_replicas_that_update_with_other_learning_rates_are_found_at_the_next_update() -> None:
    made: list[torch.optim.Optimizer] = []

    def unlike(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.SGD(parameters, lr=0.1 / (1 + len(made))))
        return made[-1]

    layers = [nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 2)]
    layers[0].requires_grad_(False)
    batches = data(8, 8)
    way = filled(Placement.identity(1, 2))
    pipeline = Pipeline(layers, mse, batches, way, microbatches=4, optimizer=unlike, limit=5.0)
    text = r"stage 0, layer 2: `weight` differs between the replicas"
    with pytest.raises(ReplicasDiffer, match=text):
        pipeline.train(2)


class _Apart(torch.optim.SGD):
    """An optimizer whose learning rate differs between replicas in its fifth update and later."""

    made: ClassVar[list[_Apart]] = []

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self._updates = 0
        self.made.append(self)

    def step(self, closure: Any = None) -> Any:
        self._updates += 1
        if self._updates == 5 and self is self.made[-1]:
            self.param_groups[0]["lr"] = 0.2
        return super().step(closure)


def test_weights_are_compared_in_the_last_step() -> None:
    way, batches = filled(Placement.identity(1, 2)), data(*[8] * 6)
    pipeline = Pipeline(net(), mse, batches, way, microbatches=4, optimizer=_Apart)
    with pytest.raises(ReplicasDiffer):
        pipeline.train(6)
