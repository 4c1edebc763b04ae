"""What the user is told once, though nothing is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from pipeworker.coordinator import report
from pipeworker.coordinator.effects import Planned, Warn
from pipeworker.coordinator.job import Start
from pipeworker.coordinator.steps.snapshots import Mark
from pipeworker.plan import orders
from pipeworker.wire.messages.calls import CallKind
from pipeworker.wire.messages.plan import Described
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Heartbeat
from support.coordinator import BATCH, LAYERS, Scripted, of

FEW = dataclasses.replace(BATCH, samples=3, microbatches=3)
SAID = (
    "the first mini-batch has 3 samples, fewer than the 8 micro-batches of a step: there are 3 of "
    "one sample each; give larger mini-batches, or a smaller --microbatches"
)


def warned(job: Scripted) -> list[str]:
    return [warn.text for warn in of(job.effects, Warn)]


def test_fewer_samples_than_micro_batches_are_a_warning_once_and_shown_as_they_are() -> None:
    job = Scripted(2, microbatches=8)
    job.join()
    job.describe()
    job.ready(FEW)
    (planned,) = of(job.effects, Planned)
    line = report.planned_line(planned, job.options)
    assert line.microbatches == 3
    assert line.bubble == report.planned_json(planned, job.options)["bubble"]
    assert line.bubble == pytest.approx(0.2)
    assert planned.schedule == orders.build("gpipe", 2, 3, "auto")
    for step in (1, 2, 3):
        job.step(step, batch=FEW)
    assert warned(job) == [SAID]


def test_nor_is_it_said_for_each_mini_batch_of_a_step() -> None:
    job = Scripted(2, microbatches=8, accumulate=2)
    job.join()
    job.describe()
    job.ready(FEW)
    job.step(1, batch=FEW)
    assert warned(job) == [SAID]


def test_who_shares_an_accelerator_is_a_warning_once() -> None:
    job = Scripted(2)
    job.join()
    job.describe()
    job.ready(unit="GPU-0")
    job.step(1)
    said = "fewer accelerators than workers: stage 0, stage 1 share cpu on host"
    assert warned(job) == [said]


def test_what_is_compiled_for_long_is_said_now_and_then() -> None:
    job = Scripted(2).running()
    at = Position(Phase.COMPILING, 1, 0, 4)
    for rank, seconds in ((1, 0.5), (0, 1.0), (1, 15.0), (1, 5.0)):
        job.now += seconds
        job.says(Heartbeat(rank, at))
    job.says(Heartbeat(0, Position(Phase.FORWARD, 1, 0, 1)))
    said = (
        "compiling: stage 1, layer 4 (Linear), micro-batch 0, step 1; each shape that is new takes"
    )
    assert warned(job) == [f"{said} seconds"] * 2


def test_a_last_mini_batch_that_is_small_is_none() -> None:
    job = Scripted(2, microbatches=4).running()
    job.step(1, batch=FEW)
    job.step(2)
    assert warned(job) == []


def test_a_run_that_goes_on_has_been_told() -> None:
    job = Scripted(2, microbatches=8, start=Start(Mark(7), recorded=7), steps=9)
    job.join()
    job.describe()
    job.ready(FEW)
    assert of(job.effects, Planned)[0].microbatches == 3
    assert warned(job) == []


def test_a_loop_of_the_users_own_is_told_with_its_first_step() -> None:
    job = Scripted(2, own_loop=True, steps=None, microbatches=8).running()
    assert warned(job) == []
    for rank in job.ranks:
        job.called(CallKind.STEP, rank)
    assert warned(job) == [SAID.replace("3", "4").replace("4 samples", "10 samples")]


def test_what_the_first_worker_notes_is_said_once() -> None:
    job = Scripted(2)
    job.join()
    for rank in job.ranks:
        job.says(Described(rank, LAYERS, (), notes=("evaluation() is not used",)))
    assert of(job.effects, Warn) == [Warn("evaluation() is not used", note=True)]
