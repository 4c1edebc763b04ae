"""The speed of the steps: without start-up, evaluation passes and checkpoints."""

from __future__ import annotations

from dataclasses import replace

from pipeworker.coordinator.steps.speed import SpeedMeter
from pipeworker.facts.speed import Speed
from pipeworker.facts.step import StepResult
from support.pure.coordinator import BATCH, ScriptedJob, of


def row(seconds: float, tokens: int | None = None) -> StepResult:
    return StepResult(1, 0.5, 8, seconds, 8 / seconds, 1.0, 0.1, 0.5, 0, None, tokens)


def test_the_first_step_of_new_workers_is_left_out() -> None:
    meter = SpeedMeter()
    assert meter.speed(()) is None
    meter.add(row(60.0, 32), 0.5)
    assert meter.speed((1.0,)) == Speed(60.0, 8 / 60, 32 / 60, (1.0,), 0.5)  # there is no other
    for seconds in (1.0, 4.0, 1.0):
        meter.add(row(seconds, 32), 0.5)
    assert meter.speed((1.0, 2.0)) == Speed(1.0, 4.0, 16.0, (1.0, 2.0), 2.0)
    meter.begin()
    meter.add(row(60.0), 0.5)
    assert meter.speed(()) == Speed(1.0, 4.0, 16.0, (), 2.5)


def test_evaluation_and_start_up_are_no_part_of_the_speed() -> None:
    job = ScriptedJob(2, steps=3, evaluate_every=1)
    job.now += 100.0
    job.running()
    batch = replace(BATCH, tokens=640)
    for rank in job.ranks:
        job.done(rank, 1, batch=batch if rank == 0 else None, data_seconds=0.25)
    for step in (2, 3):
        job.now += 50.0
        job.evaluated(step - 1)
        job.now += 2.0
        for rank in job.ranks:
            job.done(rank, step, batch=batch if rank == 0 else None, data_seconds=0.25)
    job.now += 50.0
    job.evaluated(3)
    job.checkpointed()
    assert [found.tokens for found in of(job.effects, StepResult)] == [None, 640, 640]
    assert job.ended.seconds == 254.0
    assert job.ended.speed == Speed(2.0, 5.0, 320.0, (1.5, 1.5), 0.75)
