"""Warnings and notes that the user sees once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pipeworker.coordinator.effects import JobState, WritePlan
from pipeworker.coordinator.steps.progress import Start
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.step import Batch
from pipeworker.plan.text import parse
from pipeworker.wire.lines import Planned, Warned
from pipeworker.wire.messages.checkpoint import Restore
from pipeworker.wire.messages.plan import Built, Described, Ready
from pipeworker.wire.messages.presence import Heartbeat
from pipeworker.wire.messages.step import CallKind
from support.pure.coordinator import BATCH, LAYERS, ScriptedJob, of
from support.pure.orders import build

FEW = dataclasses.replace(BATCH, samples=3, microbatches=3)
SAID = (
    "--microbatches 8, the default: the first mini-batch has only 3 samples, so there are 3 "
    "micro-batches of one sample each; use larger mini-batches or a smaller --microbatches"
)


def warned(job: ScriptedJob) -> list[str]:
    return [warn.text for warn in of(job.effects, Warned)]


def test_fewer_samples_than_micro_batches_cause_one_warning() -> None:
    job = ScriptedJob(2, microbatches=8).described()
    job.ready(FEW)
    (line,), (plan,) = of(job.effects, Planned), of(job.effects, WritePlan)
    assert line.microbatches == 3
    assert line.bubble == plan.content["schedule_bubble"]
    assert line.bubble == pytest.approx(0.2)
    assert parse("\n".join(plan.content["actions"])) == build("gpipe", 2, 3, "auto")
    for step in (1, 2, 3):
        job.step(step, batch=FEW)
    assert warned(job) == [SAID]


def test_the_warning_is_not_repeated_within_a_step() -> None:
    job = ScriptedJob(2, microbatches=8, accumulate=2).described()
    job.ready(FEW)
    job.step(1, batch=FEW)
    assert warned(job) == [SAID]


def test_a_shared_accelerator_causes_one_warning() -> None:
    """The workers that replace lost ones share it too."""
    job = ScriptedJob(2, replaceable=True).described()
    job.ready(unit="GPU-0")
    job.exited(1, -9)
    job.described().ready(unit="GPU-0")
    job.step(1)
    text = "fewer accelerators than workers: stage 0, stage 1 share cpu on host"
    assert warned(job).count(text) == 1


def test_a_long_compilation_is_noted_from_time_to_time() -> None:
    job = ScriptedJob(2).running()
    at = Position(Phase.COMPILING, 1, 0, 4)
    for rank, seconds in ((1, 0.5), (0, 1.0), (1, 15.0), (1, 5.0)):
        job.now += seconds
        job.receive(Heartbeat(rank, at))
    job.receive(Heartbeat(0, Position(Phase.FORWARD, 1, 0, 1)))
    text = "compiling: stage 1, layer 4 (Linear), micro-batch 0, step 1; each new shape takes"
    assert warned(job) == [f"{text} seconds"] * 2


def test_a_small_last_mini_batch_causes_no_warning() -> None:
    job = ScriptedJob(2, microbatches=4).running()
    job.step(1, batch=FEW)
    job.step(2)
    assert warned(job) == []


def test_a_resumed_run_does_not_repeat_the_warning() -> None:
    job = ScriptedJob(
        2, microbatches=8, start=Start((JobState(7), Restore(7, "disk")), recorded=7), steps=9
    )
    job.described()
    job.ready(FEW)
    assert of(job.effects, Planned)[0].microbatches == 3
    assert warned(job) == []


def test_an_own_loop_is_warned_at_its_first_step() -> None:
    job = ScriptedJob(2, own_loop=True, steps=None, microbatches=8).running()
    assert warned(job) == []
    for rank in job.ranks:
        job.called(CallKind.STEP, rank)
    assert warned(job) == [SAID.replace("3", "4").replace("4 samples", "10 samples")]


@pytest.mark.parametrize("norms", [0, 2])
@pytest.mark.parametrize("samples", [1, 3])
def test_few_samples_and_batch_norm_cause_one_warning(norms: int, samples: int) -> None:
    job = ScriptedJob(2, microbatches=8).described()
    few = Batch(0, samples, samples, 0)
    job.receive(Ready(0, (Built(0, 0, LAYERS[:3], 1, norms),), "cpu", few))
    job.receive(Ready(1, (Built(1, 3, LAYERS[3:], 1),), "cpu", None))
    found = SAID
    if samples == 1:
        found = SAID.replace("3 samples", "1 sample").replace("are 3", "is 1")
        found = found.replace("micro-batches of one sample each", "micro-batch")
    alone = ", and batch norm normalizes each by itself; use" if norms else "; use"
    assert of(job.effects, Warned) == [Warned(found.replace("; use", alone))]


@pytest.mark.parametrize(
    ("unmatched", "expected"),
    [
        ((0, 0), []),
        ((0, 1), ["1 name of the model or of --init-from is left out; the workers' logs list it"]),
        (
            (1, 2),
            ["3 names of the model or of --init-from are left out; the workers' logs list them"],
        ),
    ],
)
def test_names_that_are_left_out_cause_one_warning(
    unmatched: tuple[int, int], expected: list[str]
) -> None:
    job = ScriptedJob(2).described()
    job.receive(Ready(0, (Built(0, 0, LAYERS[:3], 1),), "cpu", BATCH, unmatched[0]))
    job.receive(Ready(1, (Built(1, 3, LAYERS[3:], 1),), "cpu", None, unmatched[1]))
    assert warned(job) == [f"--no-init-strict: {text}" for text in expected]


def test_notes_of_the_first_worker_are_reported_once() -> None:
    job = ScriptedJob(2)
    job.join()
    for rank in job.ranks:
        job.receive(Described(rank, LAYERS, (), notes=("evaluation() is not used",)))
    assert of(job.effects, Warned) == [Warned("evaluation() is not used", note=True)]


@pytest.mark.parametrize(
    ("norms", "options", "noted"),
    [
        (2, {"microbatches": 8}, True),
        (0, {"microbatches": 8}, False),
        (2, {"microbatches": 4}, False),  # chosen
        (2, {"microbatches": 8, "samples": 64}, False),
    ],
)
def test_batch_norm_on_few_samples_of_the_default_micro_batches_is_noted(
    norms: int, options: dict[str, Any], noted: bool
) -> None:
    samples = options.pop("samples", 20)
    job = ScriptedJob(2, **options).described()
    count = options["microbatches"]
    job.receive(Ready(0, (Built(0, 0, LAYERS[:3], 1, norms),), "cpu", Batch(0, samples, count, 0)))
    job.receive(Ready(1, (Built(1, 3, LAYERS[3:], 1),), "cpu", None))
    expected = (
        "batch norm: normalizes each micro-batch by itself, and with 8 micro-batches, the default, "
        "a mini-batch of 20 leaves 2 samples in each; use fewer --microbatches, larger "
        "mini-batches, or a norm that does not depend on the batch"
    )
    assert of(job.effects, Warned) == [Warned(expected, note=True)] * noted


def test_a_note_of_a_step_is_shown() -> None:
    job = ScriptedJob(2).running()
    job.done(0, 1, notes=("layer 1 leaves a scalar",))
    job.done(1, 1)
    assert of(job.effects, Warned) == [Warned("layer 1 leaves a scalar", note=True)]
