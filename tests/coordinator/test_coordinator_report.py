"""How a failure reads, and what is told to the starter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pipeworker.coordinator.effects import Ended, Planned, StagePlan, Status
from pipeworker.coordinator.report import (
    describe,
    place,
    planned_json,
    planned_line,
    sharing,
    verdict,
)
from pipeworker.job.options import Options
from pipeworker.plan.check import check
from pipeworker.plan.orders import build
from pipeworker.plan.schedule import parse
from pipeworker.plan.simulate import simulate
from pipeworker.record.rundir import RunDir, write_summary
from pipeworker.wire import lines
from pipeworker.wire.lines import Configuration, WorkerExited
from pipeworker.wire.messages.failure import Cause, Failure
from pipeworker.wire.messages.plan import Ready
from pipeworker.wire.messages.position import Phase, Position
from pipeworker.wire.messages.presence import Hello
from pipeworker.wire.messages.step import Batch
from support.coordinator import Scripted, of

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
def test_place_says_what_applies(
    stage: str, position: Position, layer_class: str, text: str
) -> None:
    failure = Failure(Cause.USER, "m", -1, position, layer_class, stage=stage)
    assert place(failure) == text
    if stage:  # what it is called by goes before its number
        assert place(dataclasses.replace(failure, rank=7)) == text


def test_who_shares_an_accelerator_is_said_once() -> None:
    def told(*units: tuple[str, str, str]) -> str:
        """Of workers on a host, with a device that is a unit there."""
        workers = [
            (Hello(rank, host, 1, ()), Ready(rank, (), device, None, unit=unit))
            for rank, (host, device, unit) in enumerate(units)
        ]
        return sharing(workers, lambda rank: f"stage {rank}")

    first, second = ("a", "cuda:0", "GPU-0"), ("a", "cuda:1", "GPU-1")
    assert told(first, second, ("b", "cuda:0", "GPU-0")) == ""
    assert told(("a", "cpu", ""), ("a", "cpu", "")) == ""
    assert told(first, ("a", "cuda:0", "GPU-1")) == ""  # each task is shown its own
    assert told(first, second, first, second, ("b", "xpu:0", "xpu:0")) == (
        "fewer accelerators than workers: stage 0, stage 2 share cuda:0 on a; "
        "stage 1, stage 3 share cuda:1 on a"
    )
    many = [("a", f"cuda:{n}", str(n)) for n in range(9)]
    assert told(*many, *many).endswith("; and 1 more are shared")


def test_a_rank_that_holds_nothing_known_is_called_by_its_number() -> None:
    assert place(Failure(Cause.LOST, "m", 3, Position(step=2))) == "rank 3, step 2"


def test_a_failure_of_the_users_code_is_whole() -> None:
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
def test_the_phase_is_a_word(phase: Phase) -> None:
    shown = describe(Failure(Cause.LOST, "gone", 0, Position(phase), stage="stage 0"))
    assert shown == f"gone\n  in {phase.name.lower()}: stage 0"


def test_nothing_is_said_that_is_not_known() -> None:
    assert describe(Failure(Cause.LOST, "gone")) == "gone"
    assert describe(Failure(Cause.LOST, "gone", 2, stage="stage 2")) == "gone\n  stage 2"


def test_a_mistake_of_the_user_needs_no_place() -> None:
    assert describe(Failure(Cause.USAGE, "fix it", 1, FORWARD)) == "fix it"


def test_a_configuration_comes_through_its_pipe() -> None:
    options = Options("job.py", 4, 8, arguments=("-x", "1"), balance=(1, 2, 3, 4), steps=3)
    sent = Configuration(options.to_json(), "run", "t" * 32, "127.0.0.1", generation=2, starter=0)
    received = lines.decode(lines.encode(sent))
    assert received == sent
    assert isinstance(received, Configuration)
    assert Options.from_json(received.options) == options


def test_a_position_comes_through_its_pipe() -> None:
    exited = WorkerExited(1, 2, -9, FORWARD)
    assert lines.decode(lines.encode(exited)) == exited


def planned() -> Planned:
    schedule = build("gpipe", 2, 4, "never")
    stages = (
        StagePlan(0, 0, (0, 2), ("Linear", "ReLU"), 40, 0, "cpu", "here", 10),
        StagePlan(0, 1, (2, 3), ("Linear",), 20, 1, "cpu", "there", 11),
    )
    return Planned(stages, schedule, check(schedule), simulate(schedule), 4)


def test_the_plan_as_json() -> None:
    options = Options("job.py", 2, 4, recompute="never")
    plan = json.loads(json.dumps(planned_json(planned(), options)))
    assert plan["balance"] == [2, 1]
    assert plan["bubble"] == pytest.approx(0.2)
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 1], [2]]
    assert plan["stages"][1]["classes"] == ["Linear"]
    assert plan["stages"][1]["live_activations"] == 4
    # What is shown is what runs.
    assert parse("\n".join(plan["actions"])) == planned().schedule


def test_the_plan_as_a_line() -> None:
    line = planned_line(planned(), Options("job.py", 2, 4, recompute="never"))
    bubble = planned().timing.bubble
    assert line == lines.Planned("gpipe", 4, (2, 1), bubble, device="cpu", hosts=2)


def test_the_plan_is_of_the_micro_batches_that_there_are() -> None:
    """A mini-batch with fewer samples than micro-batches were asked for has fewer."""
    job = Scripted(2, microbatches=8, recompute="never")
    job.join()
    job.describe()
    (plan,) = of(job.ready(Batch(0, 3, 3, 0)), Planned)
    assert (plan.microbatches, plan.schedule.microbatches) == (3, 3)
    assert plan.timing.bubble == pytest.approx(1 / 4)
    options = Options("job.py", 2, 8)
    assert planned_json(plan, options)["microbatches"] == 3
    assert planned_line(plan, options).microbatches == 3


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
def test_the_steps_of_a_job_are_told_where_they_are_known(
    options: dict[str, Any], length: int, steps: int
) -> None:
    """Two mini-batches each."""
    made = dataclasses.replace(planned(), length=length)
    assert planned_line(made, Options("job.py", 2, 4, accumulate=2, **options)).steps == steps


def test_the_verdict_as_a_line_and_as_json(tmp_path: Path) -> None:
    failure = Failure(Cause.HUNG, "stuck", 1, FORWARD, stage="stage 1")
    line = verdict(Ended(Status.FAILED, 1, 6, (5, 7), 0.25, failure), 2.5)
    error = "stuck\n  in forward: stage 1, layer 3, micro-batch 2, step 7"
    assert line == lines.Verdict("failed", 1, 6, 2.5, (5, 7), 0.25, error)
    write_summary(RunDir(tmp_path), line, 2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {
        "status": "failed",
        "steps": 6,
        "seconds": 2.5,
        "peak_memory_bytes": [5, 7],
        "bubble": 0.25,
        "error": error,
    }.items() <= summary.items()
    assert verdict(Ended(Status.DONE, 0, 6, (), 0.0, None), 1.0).error is None
