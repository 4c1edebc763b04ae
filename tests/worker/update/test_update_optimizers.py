"""Several optimizers of a stage, and their schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job.file import JobFile
from pipeworker.wire.messages.step import Update
from pipeworker.worker.blame import UserCodeError
from pipeworker.worker.update.update import Updater

schedules = torch.optim.lr_scheduler


def kinds(params: Any) -> list[torch.optim.Optimizer]:
    """Return an optimizer for matrices and one for all else, where a stage has such parameters."""
    params = list(params)
    large, small = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    found: list[torch.optim.Optimizer] = []
    if large:
        found.append(torch.optim.SGD(large, lr=0.5))
    if small:
        found.append(torch.optim.SGD(small, lr=0.25))
    return found


def halving(optimizers: Any) -> list[Any]:
    return [schedules.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]


class Stateless:
    """A scheduler that no run can resume."""

    def step(self) -> None: ...


class Lookahead(torch.optim.SGD):
    """An optimizer with state beside its own, as those that wrap another one."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": torch.zeros(2)}


def make(layers: list[nn.Module], optimizer: Any = kinds, scheduler: Any = None) -> Updater:
    return Updater(layers, 0, JobFile(None, print, optimizer, None, scheduler), steps=8)


def step(updater: Updater, number: int = 1) -> None:
    for parameter in updater.parameters:
        parameter.grad = torch.ones_like(parameter)
    updater.apply(Update(number))


def rates(updater: Updater) -> list[float]:
    return [one.param_groups[0]["lr"] for one in updater.optimizers.all]


def test_each_optimizer_and_each_scheduler_steps() -> None:
    layer = nn.Linear(2, 2)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    updater = make([layer], scheduler=halving)
    step(updater)
    assert torch.equal(layer.weight, before[0] - 0.5)
    assert torch.equal(layer.bias, before[1] - 0.25)
    assert rates(updater) == [0.25, 0.125]
    assert [state.schedule["last_epoch"] for state in updater.states] == [1, 1]


def test_a_stage_may_have_fewer() -> None:
    updater = make([nn.LayerNorm(2)], scheduler=halving)
    step(updater)
    assert rates(updater) == [0.125]


def both(params: Any) -> list[torch.optim.Optimizer]:
    """Return an optimizer for matrices and one for all else, whatever parameters a stage has."""
    large, small = (p for p in params if p.dim() > 1), (p for p in params if p.dim() < 2)
    return [torch.optim.SGD(large, lr=0.5), torch.optim.SGD(small, lr=0.25)]


def each_its_own(every: Any) -> list[Any]:
    return [schedules.ExponentialLR(every[0], 0.1), schedules.ExponentialLR(every[1], 0.5)]


def test_an_optimizer_may_have_no_parameters_of_a_stage() -> None:
    updater = make([nn.LayerNorm(2)], both, each_its_own)
    assert updater.optimizers.learning_rate == 0.25
    step(updater)
    assert rates(updater) == [0.125]
    assert len(updater.states) == 1
    updater.optimizers.restart_schedulers(2)
    assert rates(updater) == [0.0625]
    assert len(updater.states) == 1
    with pytest.raises(ValueError, match="empty parameter list"):  # torch is as before
        torch.optim.SGD([], lr=0.5)


@pytest.mark.parametrize("layer", [nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2, bias=False)])
def test_groups_with_names_may_have_no_parameters(layer: nn.Module) -> None:
    def grouped(named_parameters: Any) -> torch.optim.Optimizer:
        small = [(name, p) for name, p in named_parameters if p.dim() < 2]
        large = [(name, p) for name, p in named_parameters if p.dim() > 1]
        groups: list[dict[str, Any]] = [{"params": small}, {"params": large, "lr": 0.25}]
        made = torch.optim.SGD(groups, lr=0.5)
        made.add_param_group({"params": iter(())})
        return made

    updater = make([layer], grouped)
    groups = updater.optimizers.all[0].param_groups
    assert [group["lr"] for group in groups] == [0.5, 0.25, 0.5]
    assert [len(group["param_names"]) for group in groups] == [
        *(len(group["params"]) for group in groups)
    ]
    assert sum(len(group["params"]) for group in groups) == len(updater.parameters)
    step(updater)


@pytest.mark.parametrize("wrong", [3, None, torch.zeros(2)])
def test_parameters_that_torch_rejects_are_an_error_of_its_own(wrong: Any) -> None:
    with pytest.raises(UserCodeError, match=r"optimizer\(\) raised TypeError"):
        make([nn.Linear(2, 2)], lambda params: torch.optim.SGD(wrong, lr=0.1))


def test_a_parameter_that_another_stage_has_is_explained() -> None:
    def chosen(named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([dict(named_parameters)["7.weight"]], lr=0.1)

    with pytest.raises(UserCodeError, match=r"'7.weight' \(each stage calls it with its own"):
        make([nn.Linear(2, 2)], chosen)


@pytest.mark.parametrize(
    ("layers", "rate"), [([nn.LayerNorm(2), nn.Linear(2, 2)], 0.25), ([nn.Linear(2, 2)], 0.5)]
)
def test_the_learning_rate_is_that_of_the_first_parameter(
    layers: list[nn.Module], rate: float
) -> None:
    """It does not depend on the number of stages: the first stage has the first parameter."""
    assert make(layers).optimizers.learning_rate == rate


def test_the_learning_rate_is_that_of_the_group_of_the_first_trained_parameter() -> None:
    """A stage need not have the frozen parameters before it, or those of the first group."""

    def by_dim(params: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p for p in params if p.dim() == n], "lr": n / 8} for n in (2, 1)]
        return torch.optim.SGD(groups)

    frozen, norm, linear = nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2)
    frozen.requires_grad_(requires_grad=False)
    every = [frozen, norm, linear]
    for part in (every, every[1:], every[1:2]):
        assert make(part, by_dim).optimizers.learning_rate == 1 / 8


@pytest.mark.parametrize("rate", [None, "fast", float("nan"), torch.ones(2)])
def test_a_learning_rate_that_is_no_number(rate: Any) -> None:
    updater = make([nn.Linear(2, 2)])
    updater.optimizers.all[0].param_groups[0]["lr"] = rate
    with pytest.raises(
        UsageError, match=r"^the learning rate of the optimizer is .*, not a number"
    ):
        _ = updater.optimizers.learning_rate


def test_an_optimizer_may_have_no_learning_rate() -> None:
    updater = make([nn.Linear(2, 2)])
    del updater.optimizers.all[0].param_groups[0]["lr"]
    assert math.isnan(updater.optimizers.learning_rate)


def test_a_scheduler_may_be_none() -> None:
    updater = make(
        [nn.Linear(2, 2)], scheduler=lambda every: [schedules.ExponentialLR(every[0], 0.5), None]
    )
    step(updater)
    assert rates(updater) == [0.25, 0.25]
    assert updater.states[1].schedule is None


def test_schedulers_of_both_kinds_are_stepped_each_in_its_way() -> None:
    updater = make(
        [nn.Linear(2, 2)],
        scheduler=lambda every: [
            schedules.ReduceLROnPlateau(every[0], factor=0.5, patience=0),
            schedules.ExponentialLR(every[1], 0.5),
        ],
    )
    step(updater)
    assert rates(updater) == [0.5, 0.125]
    for loss in (1.0, 2.0):
        updater.optimizers.report_evaluation(loss)
    assert rates(updater) == [0.25, 0.125]


def test_schedulers_are_made_again_for_another_number_of_steps() -> None:
    def cosine(every: Any, steps: int) -> list[Any]:
        return [schedules.CosineAnnealingLR(one, steps) for one in every]

    updater, uncut = (make([nn.Linear(2, 2)], scheduler=cosine) for _ in range(2))
    for number in range(1, 4):
        step(uncut, number)
    updater.optimizers.restart_schedulers(3)
    assert rates(updater) == rates(uncut)
    assert [updater.states[i].schedule for i in (0, 1)] == [
        uncut.states[i].schedule | {"_step_count": 4} for i in (0, 1)
    ]


def test_a_rate_that_a_scheduler_has_made_of_the_optimizers_is_made_of_it_again() -> None:
    def one_cycle(every: Any, steps: int) -> list[Any]:
        return [
            schedules.OneCycleLR(one, [group["lr"] for group in one.param_groups], steps)
            for one in every
        ]

    updater, uncut = (make([nn.Linear(2, 2)], scheduler=one_cycle) for _ in range(2))
    for number in range(1, 4):
        step(uncut, number)
    updater.optimizers.restart_schedulers(3)
    assert rates(updater) == rates(uncut)
    updater.optimizers.all[1].param_groups[0]["initial_lr"] *= 2  # of another job file
    updater.optimizers.restart_schedulers(3)
    assert rates(updater)[0] == rates(uncut)[0]
    assert rates(updater)[1] < rates(uncut)[1]


def test_a_rate_that_is_a_tensor_begins_again_as_the_optimizer_had_it() -> None:
    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=torch.tensor(0.5))

    def warm_up(optimizer: Any, steps: int) -> Any:
        return schedules.LinearLR(optimizer, 0.25, total_iters=steps)

    updater, uncut = (make([nn.Linear(2, 2)], adam, warm_up) for _ in range(2))
    for number in range(1, 4):
        step(uncut, number)
    tensor = updater.optimizers.all[0].param_groups[0]["lr"]
    updater.optimizers.restart_schedulers(3)
    assert rates(updater) == rates(uncut)
    assert updater.optimizers.all[0].param_groups[0]["lr"] is tensor


def test_a_scheduler_that_uses_the_evaluation_loss_is_left_alone_when_others_are_made_again() -> (
    None
):
    def of_both_kinds(every: Any, steps: int) -> list[Any]:
        return [
            schedules.ReduceLROnPlateau(every[0], factor=0.5, patience=0),
            schedules.CosineAnnealingLR(every[1], steps),
        ]

    updater = make([nn.Linear(2, 2)], scheduler=of_both_kinds)
    for loss in (1.0, 2.0):
        updater.optimizers.report_evaluation(loss)
    by_loss, by_step = updater.optimizers.schedulers
    updater.optimizers.restart_schedulers(4)
    assert rates(updater) == [0.25, 0.125]
    assert updater.optimizers.schedulers[0] is by_loss
    assert updater.optimizers.schedulers[1] is not by_step


def test_an_optimizer_without_a_scheduler_keeps_its_rate_when_the_others_are_made_again() -> None:
    def first(every: Any, steps: int) -> list[Any]:
        return [schedules.CosineAnnealingLR(every[0], steps), None]

    updater = make([nn.Linear(2, 2)], scheduler=first)
    step(updater)
    before = rates(updater)
    updater.optimizers.restart_schedulers(1)
    assert rates(updater) == before


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda every: schedules.ExponentialLR(every[0], 0.5), "an ExponentialLR for a list of 2"),
        (lambda every: [schedules.ExponentialLR(every[0], 0.5)], "a list of 1 for a list of 2"),
        (lambda every: halving(every[::-1]), "an ExponentialLR of another optimizer"),
        (lambda every: [3, None], "an int; return a learning-rate scheduler"),
        (lambda every: [schedules.StepLR, None], "a type; return a learning-rate scheduler"),
        (lambda every: [Stateless(), None], "a Stateless without state_dict"),
    ],
)
def test_each_optimizer_has_its_scheduler(returned: Any, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^scheduler\(optimizer\) returned {text}"):
        make([nn.Linear(2, 2)], scheduler=returned)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda params: [], "a list with none of `params`"),
        (lambda params: [torch.optim.SGD(params), 3], "a list with an int; return a torch.optim"),
        (lambda params: [torch.optim.SGD(params)] * 2, "two optimizers with the same parameter"),
        (lambda params: [torch.optim.LBFGS(params)], "a list with an LBFGS, which evaluates"),
        (lambda params: [Lookahead(params)], "a list with a Lookahead, whose state_dict"),
    ],
)
def test_a_list_that_is_none(returned: Any, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^optimizer\(params\) returned {text}"):
        make([nn.Linear(2, 2)], returned)


def test_a_parameter_of_no_layer_is_not_trained() -> None:
    temperature = nn.Parameter(torch.ones(3))
    layer = nn.Linear(2, 2)
    updater = make([layer], lambda params: torch.optim.SGD([*params, temperature]))
    step(updater)  # a parameter of another stage has no gradient
    temperature.grad = torch.ones(3)
    with pytest.raises(
        UsageError, match=r"trains a tensor of shape \[3\] that is none of `params`"
    ):
        step(updater)


def test_parameter_groups_that_a_resume_would_not_have() -> None:
    def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params[:1], lr=0.1)

    layer = nn.Linear(2, 2)
    updater = make([layer], optimizer)
    step(updater)
    updater.optimizers.all[0].add_param_group({"params": [layer.bias]})
    with pytest.raises(UsageError, match="has 2 parameter groups, and had 1 at the start"):
        step(updater)


def test_state_of_another_optimizer_is_recognized() -> None:
    updater = make([nn.Linear(2, 2)], torch.optim.AdamW)
    adam, one = updater.optimizers.all[0], updater.parameters[0]
    adam.state[one] = {"momentum_buffer": torch.zeros(2, 2)}  # as SGD leaves it
    with pytest.raises(UserCodeError, match=r"KeyError: '\w+' \(its state may be that of another"):
        step(updater)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def made(optimizer: Any = sgd, scheduler: Any = None, **options: Any) -> Updater:
    job = JobFile(None, print, optimizer, None, scheduler)
    return Updater([nn.Linear(1, 1, bias=False)], 0, job, steps=8, **options)


def test_a_replica_that_updates_nothing_drops_its_gradients() -> None:
    """With more replicas than parameters one has no optimizer, and its gradients begin anew too."""
    updater = made(replica=1, replicas=2)
    (parameter,) = updater.parameters
    parameter.grad = torch.ones_like(parameter)
    updater.apply(Update(1))
    assert not updater.optimizers.all
    assert parameter.grad is None


def test_the_number_of_steps_is_kept_for_a_scheduler_that_takes_it() -> None:
    """Another scheduler is not made again in a run that is resumed with other steps."""

    def constant(optimizer: Any) -> Any:
        return schedules.ConstantLR(optimizer)

    def linear(optimizer: Any, steps: int) -> Any:
        return schedules.LinearLR(optimizer, total_iters=steps)

    assert made(scheduler=constant).steps == 0
    assert made(scheduler=linear).steps == 8


class Closing(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def test_an_optimizer_whose_step_needs_a_closure_is_refused() -> None:
    with pytest.raises(UsageError, match="evaluates the model inside its step"):
        made(lambda params: Closing(params, lr=0.5))


class HalfSaved(Stateless):
    """A scheduler whose state nothing loads."""

    def state_dict(self) -> dict[str, Any]:
        return {}


class Named(HalfSaved):
    """A scheduler with a text in place of its optimizer."""

    optimizer = "sgd"

    def load_state_dict(self, state: Any) -> None: ...


def test_a_scheduler_needs_both_halves_of_its_state() -> None:
    with pytest.raises(UsageError, match="without state_dict"):
        made(scheduler=lambda _: HalfSaved())
    made(scheduler=lambda _: Named())
