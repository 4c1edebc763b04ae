"""The text of failures, and the lines sent to the parent."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pipeworker.coordinator.effects import WritePlan
from pipeworker.coordinator.report import (
    describe,
    location,
    shared_accelerators,
)
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Phase, Position
from pipeworker.facts.speed import Speed
from pipeworker.facts.step import Batch
from pipeworker.job.options import Options
from pipeworker.plan.text import parse
from pipeworker.record.run_record import write_summary
from pipeworker.record.rundir import RunDir
from pipeworker.wire import lines
from pipeworker.wire.lines import Configuration, WorkerExited
from pipeworker.wire.messages.plan import Built, Ready
from pipeworker.wire.messages.presence import Failed, Hello
from support.pure.coordinator import BATCH, ScriptedJob, of
from support.pure.orders import build

FORWARD = Position(Phase.FORWARD, step=7, microbatch=2, layer=3)


@pytest.mark.parametrize(
    ("stage", "position", "layer_class", "text"),
    [
        ("stage 1", FORWARD, "Block", "stage 1, layer 3 (Block), micro-batch 2, step 7"),
        ("stage 1", FORWARD, "", "stage 1, layer 3, micro-batch 2, step 7"),
        ("stage 0", Position(Phase.READING, step=2), "", "stage 0, step 2"),
        ("stage 0", Position(Phase.BUILDING, layer=0), "", "stage 0, layer 0"),
        ("", Position(Phase.LOSS, step=0, microbatch=0), "", "micro-batch 0, step 0"),
        ("", Position(), "Block", ""),
    ],
)
def test_a_location_has_the_known_parts(
    stage: str, position: Position, layer_class: str, text: str
) -> None:
    failure = Failure(Cause.USER, "m", -1, position, layer_class, stage=stage)
    assert location(failure) == text
    if stage:  # the stage is preferred to the rank
        assert location(dataclasses.replace(failure, rank=7)) == text


def test_each_shared_accelerator_is_named_once() -> None:
    def warning_for(*units: tuple[str, str, str]) -> str:
        """Return the warning for workers with these hosts, devices and units."""
        workers = [
            (Hello(rank, host, 1, ()), Ready(rank, (), device, None, accelerator=unit))
            for rank, (host, device, unit) in enumerate(units)
        ]
        return shared_accelerators(workers, lambda rank: f"stage {rank}")

    first, second = ("a", "cuda:0", "GPU-0"), ("a", "cuda:1", "GPU-1")
    assert warning_for(first, second, ("b", "cuda:0", "GPU-0")) == ""
    assert warning_for(("a", "cpu", ""), ("a", "cpu", "")) == ""
    assert warning_for(first, ("a", "cuda:0", "GPU-1")) == ""  # each task sees only its own device
    assert warning_for(first, second, first, second, ("b", "xpu:0", "xpu:0")) == (
        "fewer accelerators than workers: stage 0, stage 2 share cuda:0 on a; "
        "stage 1, stage 3 share cuda:1 on a"
    )
    many = [("a", f"cuda:{n}", str(n)) for n in range(9)]
    more = [("a", "cuda:9", "9")]
    assert warning_for(*many, *many).endswith("; and 1 more is shared")
    assert warning_for(*many, *many, *more, *more).endswith("; and 2 more are shared")


def test_a_rank_without_known_stages_is_named_by_its_number() -> None:
    assert location(Failure(Cause.LOST, "m", 3, Position(step=2))) == "rank 3, step 2"


def test_a_failure_of_the_users_code_has_location_and_traceback() -> None:
    failure = Failure(
        Cause.USER,
        "layer 3 (Block) raised ValueError: no",
        1,
        FORWARD,
        "Block",
        "Traceback\n  x\n",
        "stage 1",
    )
    assert describe(failure).splitlines() == [
        "layer 3 (Block) raised ValueError: no",
        "  in forward: stage 1, layer 3 (Block), micro-batch 2, step 7",
        "",
        "Traceback",
        "  x",
    ]


@pytest.mark.parametrize("phase", set(Phase) - {Phase.STARTING})
def test_the_phase_is_named(phase: Phase) -> None:
    shown = describe(Failure(Cause.LOST, "gone", 0, Position(phase), stage="stage 0"))
    before_a_step = {
        Phase.SURVEY: "the trial of the layers",
        Phase.UPDATE: "making the optimizer",
    }
    activity = before_a_step.get(phase, phase.name.lower())
    assert shown == f"gone\n  in {activity}: stage 0"


def test_an_update_of_a_step_is_named() -> None:
    update = Position(Phase.UPDATE, step=7)
    shown = describe(Failure(Cause.USER, "gone", 0, update, stage="stage 0"))
    assert shown == "gone\n  in update: stage 0, step 7"


def test_unknown_parts_are_omitted() -> None:
    assert describe(Failure(Cause.LOST, "gone")) == "gone"
    assert describe(Failure(Cause.LOST, "gone", 2, stage="stage 2")) == "gone\n  stage 2"


def test_a_usage_error_has_no_location() -> None:
    assert describe(Failure(Cause.USAGE, "fix it", 1, FORWARD)) == "fix it"


def test_a_usage_error_whose_message_lacks_the_place_has_a_location() -> None:
    failure = Failure(
        Cause.USAGE, "no terminal", 0, FORWARD, "P", stage="stage 0", lacks_place=True
    )
    shown = "stage 0, layer 3 (P), micro-batch 2, step 7"
    assert describe(failure) == f"no terminal\n  in forward: {shown}"


def test_a_configuration_survives_encoding() -> None:
    options = Options("job.py", 4, 8, arguments=("-x", "1"), balance=(1, 2, 3, 4), steps=3)
    sent = Configuration(
        options.to_json(), "run", "t" * 32, "127.0.0.1", generation=2, parent_rank=0
    )
    received = lines.decode(lines.encode(sent))
    assert received == sent
    assert isinstance(received, Configuration)
    assert Options.from_json(received.options) == options


def test_a_position_survives_encoding() -> None:
    exited = WorkerExited(1, 2, -9, FORWARD)
    assert lines.decode(lines.encode(exited)) == exited


def plan(
    batch: Batch = BATCH, length: int = 0, **options: Any
) -> tuple[dict[str, Any], lines.Planned]:
    """Return ``plan.json`` and the line of a job with two workers on two hosts."""
    options.setdefault("recompute", "never")
    job = ScriptedJob(2, layers=("Linear", "ReLU", "Linear"), **options)
    for rank, host in enumerate(("here", "there")):
        job.receive(Hello(rank, host, 10 + rank))
    job.describe()
    ready = Ready(0, (Built(0, 0, ("Linear", "ReLU"), 40),), "cpu", batch, epoch_length=length)
    job.receive(ready)
    effects = job.receive(Ready(1, (Built(1, 2, ("Linear",), 20),), "cpu", None))
    (written,), (line,) = of(effects, WritePlan), of(effects, lines.Planned)
    return json.loads(json.dumps(written.content)), line


def test_the_plan_as_json() -> None:
    content, _ = plan()
    assert content["balance"] == [2, 1]
    assert content["schedule_bubble"] == pytest.approx(0.2)
    assert (content["bubble"], content["step_seconds"]) == (None, None)  # from no facts
    assert [stage["layers"] for stage in content["stages"]] == [[0, 2], [2, 3]]
    assert content["stages"][1]["classes"] == ["Linear"]
    assert content["stages"][1]["live_activations"] == 4
    unknown = {"forward": None, "recompute": None, "backward": None}  # as in `plan --json`
    assert [stage["seconds"] for stage in content["stages"]] == [unknown] * 2
    # The plan shows the schedule that runs.
    assert parse("\n".join(content["actions"])) == build("gpipe", 2, 4, "never")


def test_a_stage_without_a_plan_of_its_memory_recomputes_always() -> None:
    content, _ = plan(recompute="auto")
    assert [stage["recompute"] for stage in content["stages"]] == ["always"] * 2
    assert content["recompute"] == "auto"


def test_the_plan_as_a_line() -> None:
    content, line = plan()
    assert line == lines.Planned(
        "gpipe", 4, (2, 1), ((0,), (1,)), content["schedule_bubble"], steps=3, device="cpu", hosts=2
    )


def test_the_plan_has_the_actual_number_of_micro_batches() -> None:
    """A mini-batch with fewer samples than micro-batches has fewer micro-batches."""
    content, line = plan(Batch(0, 3, 3, 0), microbatches=8)
    assert line.microbatches == content["microbatches"] == 3
    assert parse("\n".join(content["actions"])).microbatches == 3
    assert line.bubble == content["schedule_bubble"] == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    ("options", "length", "steps"),
    [
        ({"steps": 3}, 7, 3),
        ({}, 7, 4),
        ({"epochs": 3}, 7, 12),
        ({"epochs": 3}, 0, 0),
        ({}, 0, 0),
    ],
)
def test_the_number_of_steps_is_reported_if_known(
    options: dict[str, Any], length: int, steps: int
) -> None:
    """Each step has two mini-batches."""
    _, line = plan(length=length, accumulate=2, **{"steps": None, **options})
    assert line.steps == steps


def test_the_verdict_as_a_line_and_as_json(tmp_path: Path) -> None:
    job = ScriptedJob(2, steps=9).running()
    for step in range(1, 7):
        job.now += 1.0
        job.step(step)
    job.receive(Failed(1, Failure(Cause.HUNG, "stuck", 1, FORWARD)))
    error = "stuck\n  in forward: stage 1, layer 3, micro-batch 2, step 7"
    bubble, busy = job.job.progress.bubble, job.job.progress.busy
    line = lines.Verdict("failed", 1, 6, 6.0, (6, 106), bubble, error, busy=busy)
    line = dataclasses.replace(line, speed=Speed(1.0, 10.0, 0.0, (3.0, 3.0), 0.0))
    assert job.ended == line
    write_summary(RunDir(tmp_path), line, 2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {
        "status": "failed",
        "steps": 6,
        "seconds": 6.0,
        "peak_memory_bytes": [6, 106],
        "bubble": 0.5,
        "median_step_seconds": 1.0,
        "samples_per_second": 10.0,
        "tokens_per_second": None,
        "busy_seconds": [3.0, 3.0],
        "data_seconds": 0.0,
        "error": error,
    }.items() <= summary.items()
