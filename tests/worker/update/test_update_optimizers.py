"""Several optimizers of a stage, and their schedulers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job.file import JobFile
from pipeworker.wire.messages.step import Update
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


@pytest.mark.parametrize(
    ("layers", "rate"), [([nn.LayerNorm(2), nn.Linear(2, 2)], 0.25), ([nn.Linear(2, 2)], 0.5)]
)
def test_the_learning_rate_is_that_of_the_first_parameter(
    layers: list[nn.Module], rate: float
) -> None:
    """It does not depend on the number of stages: the first stage has the first parameter."""
    assert make(layers).optimizers.learning_rate == rate


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


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (lambda every: schedules.ExponentialLR(every[0], 0.5), "an ExponentialLR for a list of 2"),
        (lambda every: [schedules.ExponentialLR(every[0], 0.5)], "a list of 1 for a list of 2"),
        (lambda every: halving(every[::-1]), "an ExponentialLR of another optimizer"),
        (lambda every: [3, None], "an int; return a learning-rate scheduler"),
        (lambda every: [schedules.StepLR, None], "a type; return a learning-rate scheduler"),
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
        (lambda params: [torch.optim.LBFGS(params)], "a list with a LBFGS, which evaluates"),
    ],
)
def test_a_list_that_is_none(returned: Any, text: str) -> None:
    with pytest.raises(UsageError, match=rf"^optimizer\(params\) returned {text}"):
        make([nn.Linear(2, 2)], returned)
