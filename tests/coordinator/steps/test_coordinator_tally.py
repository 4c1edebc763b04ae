"""The outcome of a step."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.coordinator.effects import Send
from pipeworker.coordinator.loss_scaler import LossScaler
from pipeworker.coordinator.steps.tally import Tally
from pipeworker.coordinator.waiting import State
from pipeworker.errors import ProtocolError, UsageError
from pipeworker.exact_sum import partials
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Batch, StepResult
from pipeworker.plan.placement import Placement
from pipeworker.wire.lines import Warned
from pipeworker.wire.messages.directions import Advance
from pipeworker.wire.messages.step import RunStep, StepDone, Update
from support.pure.coordinator import BATCH, ScriptedJob, commit, messages_of, of, updates


def stepped(job: ScriptedJob, **more: Any) -> tuple[StepResult, Update]:
    """Return the row of step 1 and the update."""
    effects = job.step(1, **more)
    (row,) = of(effects, StepResult)
    update, *others = updates(effects)
    assert len(others) + 1 == len(job.ranks)
    assert all(repr(other) == repr(update) for other in others)
    return row, update


def test_clipping_scales_to_the_norm_over_all_stages() -> None:
    row, update = stepped(ScriptedJob(2, clip_grad_norm=1.0).running(), squares=(6.0, 2.0))
    assert row.grad_norm == 4.0
    clipped = 1.0 / (4.0 + 1e-6)  # as torch.nn.utils.clip_grad_norm_
    assert update == Update(1, divisor=1.0, scale=clipped)
    assert stepped(ScriptedJob(2, clip_grad_norm=4.1).running(), squares=(6.0, 2.0))[1] == Update(1)
    assert stepped(ScriptedJob(2).running(), squares=(6.0, 2.0))[1] == Update(1)


@pytest.mark.parametrize("largest", [2.0, math.inf, math.nan])
def test_clipping_scales_as_torch_does_where_the_norm_is_not_finite(largest: float) -> None:
    """With an infinite norm finite gradients become 0; with one that is NaN all become NaN."""
    one, other = (torch.nn.Parameter(torch.zeros(())) for _ in range(2))
    one.grad, other.grad = torch.tensor(1.0), torch.tensor(largest)
    torch.nn.utils.clip_grad_norm_([one, other], 1.0)
    job = ScriptedJob(1, clip_grad_norm=1.0).running()
    _, update = stepped(job, squares=(1.0, largest**2))
    assert float(one.grad) == pytest.approx(update.scale, nan_ok=True)


def test_token_weighted_losses_divide_by_the_count() -> None:
    job = ScriptedJob(1, clip_grad_norm=1.0).running()
    row, update = stepped(job, losses=(6.0, 2.0), counts=(3.0, 1.0), squares=(64.0,))
    assert (row.loss, row.grad_norm) == (2.0, 2.0)
    assert update == Update(1, divisor=4.0, scale=1 / (2 + 1e-6))


def test_a_count_below_one_divides_too() -> None:
    """A count may be a sum of weights."""
    row, update = stepped(
        ScriptedJob(1).running(), losses=(0.5, 0.0), counts=(0.25, 0.0), squares=(1.0,)
    )
    assert (row.loss, row.grad_norm, update) == (2.0, 4.0, Update(1, divisor=0.25))


def test_without_clipping_a_count_divides_and_nothing_scales() -> None:
    """The plain loop divides by the count too: a product with 1/count would differ in a bit."""
    _, update = stepped(ScriptedJob(2).running(), losses=(6.0, 0.0), counts=(3.0, 4.0))
    assert update == Update(1, divisor=7.0, scale=1.0)


def test_the_norm_that_is_clipped_is_that_of_the_divided_gradient() -> None:
    job = ScriptedJob(1, clip_grad_norm=1.0).running()
    assert stepped(job, losses=(0.75,), counts=(8.0,), squares=(64.0,))[1] == Update(
        1, divisor=8.0, scale=1.0 / (1.0 + 1e-6)
    )
    job = ScriptedJob(1, clip_grad_norm=1.0).running()
    assert stepped(job, losses=(0.75,), counts=(9.0,), squares=(64.0,))[1] == Update(
        1, divisor=9.0, scale=1.0
    )


@given(st.lists(st.floats(0, 1e300), min_size=4, max_size=12), st.integers(1, 3))
def test_the_norm_does_not_depend_on_the_grouping(squares: list[float], cut: int) -> None:
    one, two = ScriptedJob(1).running(), ScriptedJob(2).running()
    one.step(1, squares=partials(squares))
    two.done(0, 1, squares=partials(squares[:cut]))
    two.done(1, 1, squares=partials(squares[cut:]))
    (a,), (b,) = of(one.effects, StepResult), of(two.effects, StepResult)
    assert a.grad_norm == b.grad_norm == math.sqrt(math.fsum(squares))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "squares", [(math.inf, 1.0), (math.nan, 1.0), (math.inf, math.nan), (1e308, 1e308)], ids=str
)
def test_a_gradient_that_is_not_finite_is_found_on_any_worker(
    squares: tuple[float, float], precision: str
) -> None:
    """The terms themselves or their partial sums, on one worker or on two.

    A norm is infinite, as in torch, unless a term is no number.
    """
    norm = math.nan if any(map(math.isnan, squares)) else math.inf
    together = tuple((terms, terms) for terms in (squares, partials(squares)))
    apart = (partials(squares[:1]), partials(squares[1:]))
    for first, second in (*together, apart, apart[::-1]):
        job = ScriptedJob(2, precision=precision, clip_grad_norm=1.0).running()
        job.done(0, 1, squares=first)
        effects = job.done(1, 1, squares=second)
        assert str(of(effects, StepResult)[0].grad_norm) == str(norm)
        assert [update.overflow for update in updates(effects)] == [precision == "fp16"] * 2
        assert job.state() is State.STEPPING


def test_a_sum_of_squares_is_not_negative() -> None:
    """A partial sum may be negative, but not the whole."""
    job = ScriptedJob(1).running()
    with pytest.raises(ProtocolError, match="a negative sum of squares"):
        job.step(1, squares=(1.0, -1.5))
    row, _ = stepped(job, squares=(1.0, -(2.0**-60)))
    assert row.grad_norm == 1.0


def test_losses_add_left_to_right() -> None:
    """As the plain loop adds them; a compensated sum would give 1.0."""
    row, _ = stepped(ScriptedJob(1).running(), losses=(0.1,) * 10)
    assert row.loss == 0.9999999999999999


@pytest.mark.parametrize(
    "odd",
    [
        {"squares": (math.inf,)},
        {"squares": (math.nan,)},
        {"squares": (1.7e308, 1.7e308)},  # finite terms whose sum is not finite
        {"losses": (1.0, 2.0), "counts": (math.inf, -math.inf)},
        {"losses": (1.0,), "counts": (0.0,)},
        {"losses": ()},
        {"learning_rate": math.nan},
    ],
    ids=str,
)
def test_unusual_numbers_do_not_end_the_job(odd: dict[str, Any]) -> None:
    job = ScriptedJob(2, clip_grad_norm=1.0).running()
    stepped(job, **odd)
    assert job.state() is State.STEPPING


def test_a_loss_that_is_not_finite_is_a_warning() -> None:
    job = ScriptedJob(1).running()
    job.step(1, losses=(math.nan, 1.0))
    (warning,) = of(job.effects, Warned)
    assert "loss is nan at step 1" in warning.text
    assert "--stop-on-nan" in warning.text
    assert math.isnan(of(job.effects, StepResult)[0].loss)
    assert job.state() is State.STEPPING


def test_only_the_first_of_several_steps_that_are_not_finite_is_a_warning() -> None:
    job = ScriptedJob(1, steps=None).running()
    for step, loss in enumerate((1.0, math.nan, math.inf, 1.0, math.nan), 1):
        job.step(step, losses=(loss,))
    texts = [warning.text.partition(";")[0] for warning in of(job.effects, Warned)]
    assert texts == ["loss is nan at step 2", "loss is nan at step 5"]


def test_a_gradient_that_is_not_finite_is_a_warning() -> None:
    job = ScriptedJob(1, steps=None).running()
    job.step(1, squares=(math.nan,))
    (warning,) = of(job.effects, Warned)
    assert "the gradient is not finite at step 1; training continues" in warning.text


def test_stop_on_nan_ends_before_a_gradient_that_is_not_finite_is_used() -> None:
    job = ScriptedJob(1, stop_on_nan=True).running()
    job.step(1, squares=(math.inf,))
    assert "the gradient is not finite at step 1" in job.failure.message
    assert [a.update for a in job.sent(0, Advance)] == [None]


def test_fp16_warns_once_when_the_loss_scale_can_fall_no_further() -> None:
    job = ScriptedJob(1, steps=None, precision="fp16", stop_on_nan=True).running()
    for step in range(1, 43):  # from 2**16 to 2**-24 in 40 steps
        before = len(of(job.effects, Warned))
        job.step(step, squares=(math.inf,))
        assert len(of(job.effects, Warned)) - before == (step == 40)
    (warning,) = of(job.effects, Warned)
    assert "--precision fp16: a gradient is not finite at step 40" in warning.text


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_stop_on_nan_ends_before_the_update(loss: float) -> None:
    job = ScriptedJob(2, stop_on_nan=True).running()
    job.step(1)
    job.step(2, losses=(loss,))
    assert f"loss is {loss} at step 2" in job.failure.message
    assert job.failure.position == Position(Phase.LOSS, 2)
    assert job.ended.exit_status == 1
    assert [a.update for a in job.sent(0, Advance)] == [None, Update(1)]
    assert [row.step for row in of(job.effects, StepResult)] == [1, 2]


def test_accumulation_updates_once_after_several_mini_batches() -> None:
    job = ScriptedJob(2, accumulate=3, steps=2).running()
    job.now += 1.0
    for number in (1, 2):
        effects = job.step(1, losses=(0.5, 0.25))
        run = RunStep(1, BATCH, False, "", 4 * number)
        assert effects == [Send(b"w%d" % rank, Advance(run), 1) for rank in (0, 1)]
    effects = job.step(1, losses=(0.0, 0.75))
    (row,) = of(effects, StepResult)
    assert (row.loss, row.samples, row.grad_norm) == (0.75, 30, math.sqrt(2.0) / 3)
    advance = Advance(RunStep(2, BATCH, False, ""), Update(1, divisor=3.0))
    assert messages_of(effects, Advance) == [advance] * 2
    assert [run.last for run in job.runs(0)] == [False] * 4
    job.step(2)
    job.step(2)
    assert [run.last for run in job.runs(0)] == [False] * 5 + [True]
    job.now += 1.0
    job.step(2)
    job.checkpointed()
    assert job.ended.busy == (1.5, 1.5)  # of two seconds; half a second in each mini-batch


def test_data_that_ends_within_a_step_gives_a_smaller_step() -> None:
    job = ScriptedJob(1, accumulate=3, steps=None).running()
    job.step(1)
    assert updates(job.step(1, batch=None)) == [Update(1, divisor=2.0, epoch_ended=True)]


def test_counts_add_up_over_the_mini_batches_of_a_step() -> None:
    job = ScriptedJob(1, accumulate=2).running()
    job.step(1, losses=(2.0,), counts=(4.0,))
    effects = job.step(1, losses=(4.0,), counts=(8.0,))
    assert of(effects, StepResult)[0].loss == 0.5
    assert updates(effects) == [Update(1, divisor=12.0)]


def test_one_loss_scale_for_all_halves_when_a_gradient_overflows() -> None:
    job = ScriptedJob(2, precision="fp16", clip_grad_norm=1.0).running()
    scale = 2.0**16
    assert [run.loss_scale for run in job.runs(1)] == [scale]
    effects = job.step(1, squares=((3 * scale) ** 2,))
    (row,) = of(effects, StepResult)
    assert row.grad_norm == math.sqrt(18)
    assert row.loss_scale == scale
    clipped = 1 / (math.sqrt(18) + 1e-6)
    assert updates(effects) == [Update(1, divisor=scale, scale=clipped)] * 2
    (first, second) = updates(job.step(2, squares=(math.inf,)))
    assert first.overflow
    assert second.overflow
    assert [run.loss_scale for run in job.runs(1)] == [scale, scale, scale / 2]
    job.step(3)
    assert job.saved() == [commit(3, LossScaler(scale / 2, 1))]


def test_without_a_loss_scale_there_is_no_overflow() -> None:
    effects = ScriptedJob(1).running().step(1, squares=(math.inf,))
    assert updates(effects) == [Update(1)]


def test_an_epoch_that_ends_within_a_step_has_ended() -> None:
    """Three mini-batches per epoch, two per step."""
    job = ScriptedJob(1, accumulate=2, steps=None).running()
    ended = []
    for step in range(1, 7):
        epochs = [((2 * step - 1) // 3), (2 * step) // 3]  # of the following mini-batches
        for epoch in epochs:
            effects = job.step(step, batch=dataclasses.replace(BATCH, epoch=epoch))
        (update,) = updates(effects)
        ended.append(update.epoch_ended)
    assert ended == [False, True, True, False, True, True]


def test_with_epochs_a_step_ends_with_its_epoch() -> None:
    """Three mini-batches per epoch, two per step."""
    job = ScriptedJob(1, accumulate=2, steps=None, epochs=2).running()
    epochs, steps = [0, 0, 1, 1, 1, None], [1, 1, 2, 3, 3, 4]
    for step, epoch in zip(steps, epochs, strict=True):
        batch = None if epoch is None else dataclasses.replace(BATCH, epoch=epoch)
        job.step(step, batch=batch)
    assert [row.samples for row in of(job.effects, StepResult)] == [20, 10, 20, 10]
    assert [row.epoch for row in of(job.effects, StepResult)] == [0, 0, 1, 1]
    assert [run.step for run in job.runs(0)] == steps


def test_the_divisor_includes_the_loss_scale_and_the_mini_batches() -> None:
    job = ScriptedJob(2, precision="fp16", accumulate=3).running()
    for _ in range(3):
        effects = job.step(1)
    assert updates(effects) == [Update(1, divisor=3.0 * 2.0**16)] * 2


def test_the_learning_rate_is_that_of_the_first_trained_parameter_of_any_replica() -> None:
    """A worker may have a later stage too, and with a sharded optimizer lack the parameter."""
    placement = Placement.identity(2, 2)
    places = {(4, 0): 0.5, (1, 1): 0.25, (1, 0): 0.125, (3, 0): 0.0625}
    done = [
        StepDone(rank, 1, (), (), (), 0.0, rate, 0, None, leading=place)
        for rank, (place, rate) in enumerate(places.items())
    ]
    tally = Tally(1, placement, 0.0)
    tally.add(done, Batch(0, 4, 2, 0))
    assert tally.outcome(None, 1.0, None, None)[0].lr == 0.125


@pytest.mark.parametrize("counts", [[(2.0,), ()], [(2.0,), (2.0,)], [(), ()]])
def test_scalars_and_pairs_of_one_step_are_refused(counts: list[tuple[float, ...]]) -> None:
    """Each replica sees the losses of its own micro-batches alone."""
    tally = Tally(1, Placement.identity(1, 2), 0.0)

    def add(counts: list[tuple[float, ...]]) -> None:
        every = enumerate(counts)
        done = [StepDone(r, 1, (1.0,), one, (), 0.0, 0.1, 0, None) for r, one in every]
        tally.add(done, Batch(0, 4, 2, 0))

    if counts[0] == counts[1]:
        add(counts)
        counts = [() if one else (2.0,) for one in counts]
    with pytest.raises(UsageError, match=r"for some micro-batches of step 1 and a scalar for"):
        add(counts)
