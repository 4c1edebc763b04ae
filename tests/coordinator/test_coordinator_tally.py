"""What the mini-batches of a step come to."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from coordinator_job import (
    BATCH,
    Job,
    of,
    of_messages,
    sent_to,
)
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.coordinator.effects import (
    Commit,
    Send,
    Warn,
)
from pipeworker.coordinator.machine import State
from pipeworker.coordinator.scaler import Scaler
from pipeworker.wire.messages import (
    Advance,
    Phase,
    Position,
    RunStep,
    StepResult,
    Update,
)


def stepped(job: Job, **more: Any) -> tuple[StepResult, float]:
    """The row of step 1 and the update's scale."""
    effects = job.step(1, **more)
    (row,) = of(effects, StepResult)
    (update,) = {a.update for a in job.sent(0, Advance) if a.update}
    return row, update.scale


def test_clipping_scales_to_the_norm_over_all_stages() -> None:
    row, scale = stepped(Job(2, clip_grad_norm=1.0).running(), squares=(6.0, 2.0))
    assert row.grad_norm == 4.0
    assert scale == 1.0 / (4.0 + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    assert stepped(Job(2, clip_grad_norm=4.1).running(), squares=(6.0, 2.0))[1] == 1.0
    assert stepped(Job(2).running(), squares=(6.0, 2.0))[1] == 1.0


def test_token_weighted_losses_divide_by_the_count() -> None:
    job = Job(1, clip_grad_norm=1.0).running()
    row, scale = stepped(job, losses=(6.0, 2.0), counts=(3.0, 1.0), squares=(64.0,))
    assert (row.loss, row.grad_norm) == (2.0, 2.0)
    assert scale == 1 / 4 * (1 / (2 + 1e-6))


@given(st.lists(st.floats(0, 1e300), min_size=4, max_size=12), st.integers(1, 3))
def test_the_norm_does_not_depend_on_the_grouping(squares: list[float], cut: int) -> None:
    one, two = Job(1).running(), Job(2).running()
    one.step(1, squares=tuple(squares))
    two.done(0, 1, squares=tuple(squares[:cut]))
    two.done(1, 1, squares=tuple(squares[cut:]))
    (a,), (b,) = of(one.effects, StepResult), of(two.effects, StepResult)
    assert a.grad_norm == b.grad_norm


def test_losses_add_left_to_right() -> None:
    """As the plain loop adds them; a compensated sum would give 1.0."""
    row, _ = stepped(Job(1).running(), losses=(0.1,) * 10)
    assert row.loss == 0.9999999999999999


@pytest.mark.parametrize(
    "odd",
    [
        {"squares": (math.inf,)},
        {"squares": (math.nan,)},
        {"squares": (1.7e308, 1.7e308)},  # finite, with a sum that is not
        {"counts": (math.inf, -math.inf)},
        {"counts": (0.0,)},
        {"losses": ()},
        {"learning_rate": math.nan},
    ],
    ids=str,
)
def test_odd_numbers_end_nothing(odd: dict[str, Any]) -> None:
    job = Job(2, clip_grad_norm=1.0).running()
    stepped(job, **odd)
    assert job.machine.state is State.RUNNING


def test_a_loss_that_is_not_finite_is_a_warning() -> None:
    job = Job(1).running()
    job.step(1, losses=(math.nan, 1.0))
    (warning,) = of(job.effects, Warn)
    assert "loss is nan at step 1" in warning.text
    assert "--stop-on-nan" in warning.text
    assert math.isnan(of(job.effects, StepResult)[0].loss)
    assert job.machine.state is State.RUNNING


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_stop_on_nan_ends_before_the_update(loss: float) -> None:
    job = Job(2, stop_on_nan=True).running()
    job.step(1)
    job.step(2, losses=(loss,))
    assert f"loss is {loss} at step 2" in job.failure.message
    assert job.failure.position == Position(Phase.LOSS, 2)
    assert job.ended.exit_status == 1
    assert [a.update for a in job.sent(0, Advance)] == [None, Update(1, 1.0)]
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2]


def test_accumulation_updates_once_after_several_mini_batches() -> None:
    job = Job(2, accumulate=3, steps=2).running()
    job.now += 1.0
    for number in (1, 2):
        effects = job.step(1, losses=(0.5, 0.25))
        run = RunStep(1, BATCH, False, "", 4 * number)
        assert effects == [Send(b"w%d" % rank, Advance(None, run)) for rank in (0, 1)]
    effects = job.step(1, losses=(0.0, 0.75))
    (row,) = of(effects, StepResult)
    assert (row.loss, row.samples, row.grad_norm) == (0.75, 30, math.sqrt(2.0) / 3)
    assert sent_to(effects, 0) == [Advance(Update(1, 1 / 3), RunStep(2, BATCH, False, ""))]
    assert [a.run.last for a in job.sent(0, Advance) if a.run] == [False] * 4
    job.step(2)
    job.step(2)
    assert [a.run.last for a in job.sent(0, Advance) if a.run][-1] is True


def test_data_that_ends_within_a_step_gives_a_smaller_step() -> None:
    job = Job(1, accumulate=3, steps=None).running()
    job.step(1)
    (update,) = [a.update for a in of_messages(job.step(1, batch=None), Advance)]
    assert update == Update(1, 0.5, epoch_ended=True)


def test_counts_add_up_over_the_mini_batches_of_a_step() -> None:
    job = Job(1, accumulate=2).running()
    job.step(1, losses=(2.0,), counts=(4.0,))
    effects = job.step(1, losses=(4.0,), counts=(8.0,))
    assert of(effects, StepResult)[0].loss == 0.5
    assert of_messages(effects, Advance)[0].update == Update(1, 1 / 12)


def test_the_loss_scale_is_one_for_all_and_falls_when_a_gradient_overflows() -> None:
    job = Job(2, precision="fp16", clip_grad_norm=1.0).running()
    scale = 2.0**16
    assert [a.run.loss_scale for a in job.sent(1, Advance) if a.run] == [scale]
    effects = job.step(1, squares=((3 * scale) ** 2,))
    (row,) = of(effects, StepResult)
    assert row.grad_norm == math.sqrt(18)
    assert row.loss_scale == scale
    (advance,) = sent_to(effects, 0)
    assert isinstance(advance, Advance)
    assert advance.update == Update(1, 1 / scale / (math.sqrt(18) + 1e-6))
    effects = job.step(2, squares=(math.inf,))
    (advance,) = sent_to(effects, 1)
    assert isinstance(advance, Advance)
    assert advance.update
    assert advance.update.overflow
    assert advance.run
    assert advance.run.loss_scale == scale / 2
    job.step(3)
    assert job.saved() == [Commit(3, Scaler(scale / 2, 1))]


def test_an_overflow_without_a_loss_scale_is_no_overflow() -> None:
    effects = Job(1).running().step(1, squares=(math.inf,))
    assert of_messages(effects, Advance)[0].update == Update(1, 1.0)


def test_an_epoch_that_ends_within_a_step_has_ended() -> None:
    """Three mini-batches an epoch, two a step."""
    job = Job(1, accumulate=2, steps=None).running()
    ended = []
    for step in range(1, 7):
        epochs = [((2 * step - 1) // 3), (2 * step) // 3]  # of the mini-batches to come
        for epoch in epochs:
            effects = job.step(step, batch=dataclasses.replace(BATCH, epoch=epoch))
        (advance,) = of_messages(effects, Advance)
        assert advance.update
        ended.append(advance.update.epoch_ended)
    assert ended == [False, True, True, False, True, True]
