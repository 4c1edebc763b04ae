"""The optimizer step of a stage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.facts.connections import Tie
from pipeworker.facts.position import Phase, Position
from pipeworker.host.position import Tracker
from pipeworker.job.file import JobFile
from pipeworker.wire.messages.step import Update
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.stage import rng
from pipeworker.worker.update.ties import Ties
from pipeworker.worker.update.update import Updater
from support.in_process.updates import layer, make_updater, never, sgd, weights


def test_each_parameter_is_in_the_optimizer_of_one_replica() -> None:
    """So the groups of a sharded optimizer have together what those of a whole one have."""
    layers = [nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)]
    layers[1].requires_grad_(requires_grad=False)
    job = JobFile(None, never, sgd, None, None)
    updaters = [Updater(layers, 0, job, replica=number, replicas=2) for number in (0, 1)]
    found = [
        parameter
        for updater in updaters
        for optimizer in updater.optimizers.all
        for parameter in optimizer.param_groups[0]["params"]
    ]
    assert sorted(map(id, found)) == sorted(map(id, nn.ModuleList(layers).parameters()))
    shards = [[id(parameter) for parameter in shard] for shard in updaters[0].shards]
    assert not set(map(id, layers[1].parameters())) & {one for shard in shards for one in shard}


def test_parameters_are_each_once_in_model_order() -> None:
    a, b = nn.Linear(2, 3), nn.Linear(3, 3)
    assert make_updater([a, nn.ReLU(), b, a]).parameters == [a.weight, a.bias, b.weight, b.bias]


def test_the_update_is_scaled_and_clears() -> None:
    made = layer(2.0, None, 4.0)
    updater = make_updater([made], sgd)
    updater.apply(Update(1, scale=0.25))
    assert weights(made) == [0.75, 1.0, 0.5]
    assert all(parameter.grad is None for parameter in made.parameters())


def test_a_frozen_stage_that_begins_to_train_is_an_error() -> None:
    made = layer(None, None).requires_grad_(False)
    updater = make_updater([made], never, first=3)
    updater.apply(Update(1))
    next(made.parameters()).requires_grad_(True)
    with pytest.raises(UsageError, match="of layers 3 to 3 requires grad now, while none did"):
        updater.apply(Update(2))


def test_a_scale_of_one_leaves_the_gradients_alone() -> None:
    made = layer(1.0)
    (parameter,) = made.parameters()
    gradient = parameter.grad
    assert gradient is not None
    version = gradient._version
    make_updater([made], sgd, None).apply(Update(1, scale=1.0))
    assert weights(made) == [0.5]
    assert gradient._version == version


def test_what_divides_comes_before_what_scales() -> None:
    made = layer(3.0, 7.0)
    make_updater([made]).apply(Update(1, divisor=3.0, scale=0.5))
    expected = [1 - 0.5 * (torch.tensor(g) / 3 * 0.5).item() for g in (3.0, 7.0)]
    assert weights(made) == [torch.tensor(w).item() for w in expected]


def test_a_scale_is_not_rounded_to_the_dtype_of_the_gradient() -> None:
    """As torch's clip_grad_norm_ applies it; in place of 0.1056 bfloat16 has 0.1055."""
    made = nn.ParameterList([nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))])
    gradient = torch.linspace(1, 2, 64).bfloat16()
    made[0].grad = gradient.clone()
    make_updater([made]).apply(Update(1, scale=0.1056))
    assert torch.equal(made[0], gradient.mul(0.1056).mul(-0.5))


def test_gradients_of_one_kind_are_divided_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the last bit depends on what else is in a list, and that on the stages."""
    calls: list[list[torch.dtype]] = []

    def divide(gradients: list[torch.Tensor], _: float) -> None:
        calls.append([gradient.dtype for gradient in gradients])

    monkeypatch.setattr("pipeworker.worker.update.update.divide", divide)
    layers = [nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64), nn.Linear(2, 2)]
    for parameter in nn.ModuleList(layers).parameters():
        parameter.grad = torch.ones_like(parameter)
    make_updater(layers).apply(Update(1, divisor=3.0))
    assert calls == [[torch.float32] * 4, [torch.float64] * 2]


def test_clear_forgets_without_an_update() -> None:
    made = layer(1.0)
    make_updater([made], sgd, None).clear()
    assert weights(made) == [1.0]
    assert [parameter.grad for parameter in made.parameters()] == [None]


def test_squares_are_taken_in_float64_and_in_model_order() -> None:
    made = layer(3.0, None, 1e-30, 1e30)
    assert make_updater([made], sgd, None).squares() == pytest.approx([9.0, 1e-60, 1e60], rel=1e-6)


def test_squares_of_a_large_gradient() -> None:
    linear = nn.Linear(300, 333, bias=False)
    linear.weight.grad = torch.randn(300, 333, generator=torch.Generator().manual_seed(0)).t()
    elements = linear.weight.grad.double().flatten().tolist()
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(make_updater([linear], sgd, None).squares())
    torch.set_num_threads(threads)
    assert found[0] == found[1]  # each part is computed by one thread
    assert len(found[0]) > 1
    assert math.fsum(found[0]) == pytest.approx(math.fsum(x * x for x in elements), rel=1e-12)


def test_a_parameter_that_is_unfrozen_late_is_rejected_by_a_sharded_optimizer() -> None:
    """The first replica would update it, and the others would never receive it."""
    one = layer(1.0, 1.0)
    _, body = one.parameters()
    body.requires_grad_(False)
    job = JobFile(None, never, sgd, None, None)
    updater = Updater([one], 3, job, seed=5, replica=0, replicas=2)
    updater.apply(Update(1))
    body.requires_grad_(True)
    with pytest.raises(UsageError, match="of layers 3 to 3 requires grad now, and did not at the"):
        updater.apply(Update(2))
    make_updater([one], first=3).apply(Update(2))


def test_a_sparse_gradient_is_not_clipped_by_value() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="--clip-grad-value: a parameter of layers 3 to 3 has a"):
        make_updater([embedding], first=3, clip_value=0.5).apply(Update(1))


def test_a_complex_gradient_is_not_clipped_by_value() -> None:
    made = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    made[0].grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(UsageError, match="has a complex gradient, which torch cannot clip"):
        make_updater([made], clip_value=0.5).apply(Update(1))


def test_squares_of_low_precision() -> None:
    linear = nn.Linear(100, 1, bias=False).half()
    linear.weight.grad = torch.full((1, 100), 300.0, dtype=torch.float16)
    assert make_updater([linear], sgd, None).squares() == pytest.approx([9e6])


def test_squares_of_sparse_and_complex_gradients() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    nn.init.ones_(embedding.weight)
    embedding(torch.tensor([1, 1, 3])).sum().backward()
    wave = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    wave[0].grad = torch.tensor([3 + 4j, 0]).conj()
    updater = make_updater([embedding, wave], sgd, None)
    assert updater.squares() == pytest.approx([2 * 4 + 2 * 1, 25])
    before = embedding.weight.detach().clone()
    updater.apply(Update(1, scale=0.5))
    assert torch.equal(before[1] - embedding.weight[1], torch.full((2,), 0.5))


def test_without_gradients_there_are_no_squares() -> None:
    updater = make_updater([layer(None)], sgd, None)
    assert updater.squares() == []
    updater.apply(Update(1, scale=0.5))


def test_a_stage_without_parameters_has_no_optimizer() -> None:
    def never(_: Any) -> Any:
        pytest.fail("called")

    updater = make_updater([nn.ReLU(), nn.Identity()], never, never)
    assert updater.optimizers.returned is None
    assert math.isnan(updater.optimizers.learning_rate)
    assert updater.squares() == []
    updater.apply(Update(1, scale=0.5))
    updater.clear()


@pytest.mark.parametrize("built", [None, 3, [sgd]])
def test_an_optimizer_that_is_none(built: Any) -> None:
    what = "list with a function" if isinstance(built, list) else type(built).__name__
    with pytest.raises(UsageError, match=rf"returned an? {what}; return a"):
        make_updater([nn.Linear(1, 1)], lambda params: built)


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    other = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="returned an SGD with none of `params`"):
        make_updater([nn.Linear(1, 1)], lambda params: sgd(other.parameters()))


def test_an_optimizer_may_choose_among_its_parameters_and_have_others() -> None:
    other = nn.Parameter(torch.ones(1))
    made = make_updater([nn.Linear(1, 1)], lambda params: sgd([params[1], other]))
    assert made.optimizers.all


def test_who_raised_is_named() -> None:
    def raises(_: Any) -> Any:
        raise ValueError("no")

    with pytest.raises(UserCodeError, match=r"^optimizer\(\) raised ValueError: no$"):
        make_updater([nn.Linear(1, 1)], raises)
    with pytest.raises(UserCodeError, match=r"^scheduler\(\) raised ValueError: no$"):
        make_updater([nn.Linear(1, 1)], sgd, raises)


def test_lbfgs_is_refused() -> None:
    with pytest.raises(UsageError, match="an LBFGS, which evaluates the model inside its step"):
        make_updater([nn.Linear(1, 1)], torch.optim.LBFGS, None)


def test_the_optimizer_is_given_a_list_it_may_read_twice() -> None:
    def groups(params: Any) -> torch.optim.Optimizer:
        large = [p for p in params if p.dim() > 1]
        small = [p for p in params if p.dim() < 2]
        both: list[dict[str, Any]] = [{"params": large, "lr": 2.0}, {"params": small}]
        return torch.optim.SGD(both, lr=1.0)

    updater = make_updater([nn.Linear(2, 2)], groups, None)
    assert updater.optimizers.learning_rate == 2.0
    (optimizer,) = updater.optimizers.all
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


def test_elements_are_clipped_after_the_scale() -> None:
    made = layer(2.0, -8.0)
    make_updater([made], clip_value=0.75).apply(Update(1, scale=0.25))
    assert weights(made) == [1 - 0.5 * 0.5, 1 + 0.5 * 0.75]


def test_without_a_gradient_nothing_is_clipped() -> None:
    """A step may leave all layers of a stage unused."""
    made = layer(None, None)
    make_updater([made], clip_value=0.75).apply(Update(1))
    assert weights(made) == [1, 1]


def test_before_update_sees_a_layer_at_a_time_under_a_stream_of_its_own() -> None:
    """The hook's random numbers depend on the step and the layer, not on earlier actions."""

    def drawn(*, first: int, count: int, step: int) -> list[list[float]]:
        seen = []

        def noise(params: list[nn.Parameter]) -> None:
            seen.append([torch.rand(()).item() for _ in params])

        layers = [layer(1.0, 1.0), layer(None), nn.ReLU(), layer(1.0)][first:][:count]
        torch.manual_seed(first)
        make_updater(layers, first=first, before_update=noise).apply(Update(step, scale=1.0))
        return seen

    whole = drawn(first=0, count=4, step=3)
    assert [len(layer) for layer in whole] == [2, 1]  # none without a gradient
    assert whole == drawn(first=0, count=2, step=3) + drawn(first=2, count=2, step=3)
    assert whole != drawn(first=0, count=4, step=4)


def test_an_optimizer_draws_from_a_stream_of_its_own() -> None:
    """Nor does a scheduler that an epoch steps depend on what ran before, as an evaluation pass."""

    def drawn(before: int, step: int) -> list[float]:
        seen: list[float] = []

        def noisy(params: Any) -> torch.optim.Optimizer:
            optimizer = sgd(params)
            optimizer.register_step_pre_hook(lambda *_: seen.append(torch.rand(()).item()))
            return optimizer

        def schedule(optimizer: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: torch.rand(()).item())

        updater = make_updater([layer(1.0)], noisy, schedule, scheduler_interval="epoch")
        torch.manual_seed(before)
        updater.apply(Update(step))
        torch.manual_seed(before)
        updater.end_epoch(step)
        return [*seen, updater.optimizers.learning_rate]

    assert drawn(1, 3) == drawn(2, 3)
    assert drawn(1, 3) != drawn(1, 4)


def test_the_position_has_the_layer_of_before_update() -> None:
    tracker = Tracker()
    seen: list[Position] = []
    tied = [layer(1.0), layer(1.0)]
    ties = Ties(0, [Tie(("0.0", "4.0"), (1, 0))], {4: tied[1]}, lambda _: tied[0])

    def look(_: list[nn.Parameter]) -> None:
        seen.append(tracker.get())

    job = JobFile(None, never, sgd, before_update=look)
    layers = [layer(1.0), tied[1], nn.ReLU(), layer(1.0)]
    updater = Updater(layers, 3, job, ties=ties, tracker=tracker)
    ties.add_up({1: [torch.ones(1)]})
    updater.apply(Update(7))
    assert seen == [Position(Phase.UPDATE, 7, layer=index) for index in (4, 3, 6)]
    assert tracker.get() == Position(Phase.UPDATE, 7)  # of the optimizer


def test_what_an_update_draws_on_an_accelerator_does_not_depend_on_what_ran_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = torch.Generator()  # stands for it
    monkeypatch.setattr(rng, "accelerator_generator", lambda _: accelerator)
    seen = []

    def draw(*_: Any) -> None:
        seen.append(torch.rand((), generator=accelerator).item())

    def noisy(params: Any) -> torch.optim.Optimizer:
        optimizer = sgd(params)
        optimizer.register_step_pre_hook(draw)
        return optimizer

    for before in range(2):
        accelerator.manual_seed(before)
        make_updater([layer(1.0)], noisy, before_update=draw).apply(Update(1, scale=1.0))
    assert seen[:2] == seen[2:]
    assert seen[0] != seen[1]


def test_before_update_sees_gradients_scaled_and_clipped() -> None:
    seen = []

    def look(params: list[nn.Parameter]) -> None:
        for parameter in params:
            assert parameter.grad is not None
            seen.append(parameter.grad.item())
            parameter.grad.zero_()

    made = layer(4.0, 100.0)
    make_updater([made], clip_value=2.0, before_update=look).apply(Update(1, scale=0.25))
    assert seen == [1.0, 2.0]
    assert weights(made) == [1.0, 1.0]


def test_names_are_those_of_the_whole_model() -> None:
    given = {}

    def optimizer(named_parameters: Any) -> torch.optim.Optimizer:
        given.update(named_parameters)
        return torch.optim.SGD(given.values(), lr=0.5)

    first, second = nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 1, bias=False))
    make_updater([first, second], optimizer, first=7)
    assert list(given) == ["7.weight", "7.bias", "8.1.weight"]
    assert given["8.1.weight"] is second[1].weight
