"""Learning-rate schedulers of a stage: their optimizers, and when each one steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.job.file import JobFile
from pipeworker.wire.messages.step import Update
from pipeworker.worker.update.update import Updater
from support.in_process.updates import layer, make_updater, never, sgd, weights


def test_the_place_of_the_learning_rate_is_that_of_the_first_parameter_of_the_part() -> None:
    layers = [nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 2)]
    layers[0].requires_grad_(requires_grad=False)
    job = JobFile(None, never, sgd, None, None)
    whole = Updater(layers, 5, job)
    parts = [Updater(layers, 5, job, replica=number, replicas=2) for number in (0, 1)]
    assert whole.leading_place == (6, 0)
    assert sorted(part.leading_place for part in parts) == [(6, 0), (6, 1)]


def test_the_scheduler_steps_after_the_optimizer_once_a_step() -> None:
    made = layer(1.0)
    updater = make_updater(
        [made], sgd, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    )
    rates = []
    for _ in range(4):
        for parameter in made.parameters():
            parameter.grad = torch.ones(1)
        rates.append(updater.optimizers.learning_rate)
        updater.apply(Update(1, scale=1.0))
    assert rates == pytest.approx([0.5, 0.5, 0.05, 0.05])
    assert weights(made) == pytest.approx([1 - 2 * 0.5 - 2 * 0.05])


def test_a_scheduler_that_is_none() -> None:
    with pytest.raises(UsageError, match=r"scheduler\(optimizer\) returned a NoneType"):
        make_updater([nn.Linear(1, 1)], sgd, lambda optimizer: None)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    other = sgd([nn.Parameter(torch.ones(1))])
    with pytest.raises(UsageError, match="returned a StepLR of another optimizer, so"):
        make_updater([nn.Linear(1, 1)], sgd, lambda _: torch.optim.lr_scheduler.StepLR(other, 1))


def test_a_scheduler_whose_step_takes_the_epoch_is_refused() -> None:
    """It would fail at the end of the first epoch."""

    def step(epoch: int, metric: float | None = None) -> None:
        raise AssertionError(epoch, metric)

    made = SimpleNamespace(step=step, state_dict=dict, load_state_dict=print)
    with pytest.raises(UsageError, match=r"a SimpleNamespace with step\(epoch, ...\); return"):
        make_updater([nn.Linear(1, 1)], sgd, lambda _: made)


def test_a_scheduler_that_names_no_optimizer_is_let_through() -> None:
    made = SimpleNamespace(step=lambda: None, state_dict=dict, load_state_dict=print)
    assert make_updater([nn.Linear(1, 1)], sgd, lambda _: made).optimizers.schedulers == [made]


def test_an_overflow_skips_the_optimizer_and_not_the_scheduler() -> None:
    made = layer(2.0)
    updater = make_updater(
        [made], sgd, lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    )
    updater.apply(Update(1, scale=1.0))
    made.get_parameter("0").grad = torch.tensor([2.0])
    updater.apply(Update(2, scale=1.0, overflow=True))
    assert weights(made) == [0.0]
    assert updater.optimizers.learning_rate == 0.125
    assert all(parameter.grad is None for parameter in made.parameters())


def test_a_scheduler_by_epoch_steps_when_one_ends() -> None:
    made = layer(1.0)
    updater = make_updater(
        [made],
        sgd,
        lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
        scheduler_interval="epoch",
    )
    rates = []
    for step in range(1, 5):
        updater.apply(Update(step, scale=1.0, epoch_ended=step % 2 == 0))
        rates.append(updater.optimizers.learning_rate)
    assert rates == [0.5, 0.25, 0.25, 0.125]
    updater.end_epoch(4)  # by the user's own loop
    assert updater.optimizers.learning_rate == 0.0625


@pytest.mark.parametrize(("interval", "kind"), [("step", "exponential"), ("epoch", "plateau")])
def test_the_end_of_an_epoch_steps_no_other_scheduler(interval: str, kind: str) -> None:
    schedulers = torch.optim.lr_scheduler
    chosen: Any = {
        "exponential": lambda opt: schedulers.ExponentialLR(opt, 0.5),
        "plateau": lambda opt: schedulers.ReduceLROnPlateau(opt, factor=0.5, patience=0),
    }[kind]
    updater = make_updater([layer(1.0)], sgd, chosen, scheduler_interval=interval)
    before = updater.states[0].schedule
    updater.end_epoch(1)
    assert updater.states[0].schedule == before


def test_a_plateau_for_a_figure_of_which_more_is_better_leaves_the_loss_alone() -> None:
    def plateau(opt: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(opt, "max", factor=0.5, patience=0)

    updater = make_updater([layer(1.0)], sgd, plateau)
    assert updater.optimizers.wants_more
    rates = []
    for loss, best in ((1.0, 0.5), (1.0, 0.6), (0.5, None), (0.4, 0.6), (0.7, 0.7)):
        updater.optimizers.report_evaluation(loss, best)
        rates.append(updater.optimizers.learning_rate)
    assert rates == [0.5, 0.5, 0.25, 0.125, 0.125]


def test_a_plateau_looks_at_the_evaluation_alone() -> None:
    def plateau(opt: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0)

    updater = make_updater([layer(1.0)], sgd, plateau)
    assert updater.optimizers.wants_metric
    for step in range(1, 4):
        updater.apply(Update(step, scale=1.0))
    assert updater.optimizers.learning_rate == 0.5
    for loss in (1.0, 0.9, 0.9):
        updater.optimizers.report_evaluation(loss)
    assert updater.optimizers.learning_rate == 0.25
