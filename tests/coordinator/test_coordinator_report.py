"""How a failure reads, and what is told to the starter."""

from __future__ import annotations

import json

import pytest

from pipeworker.coordinator.effects import Ended, Planned, StagePlan, Status
from pipeworker.coordinator.report import (
    Configuration,
    describe,
    ended_json,
    place,
    planned_json,
)
from pipeworker.job.options import Options
from pipeworker.plan.proof import prove
from pipeworker.plan.schedule import build, parse
from pipeworker.wire.messages import Cause, Failure, Phase, Position

FORWARD = Position(Phase.FORWARD, step=7, microbatch=2, layer=3)


@pytest.mark.parametrize(
    ("rank", "position", "layer_class", "text"),
    [
        (1, FORWARD, "Block", "stage 1, layer 3 (Block), micro-batch 2, step 7"),
        (1, FORWARD, "", "stage 1, layer 3, micro-batch 2, step 7"),
        (0, Position(Phase.READING, step=2), "", "stage 0, step 2"),
        (0, Position(Phase.BUILDING, layer=0), "", "stage 0, layer 0"),
        (-1, Position(Phase.LOSS, step=0, microbatch=0), "", "micro-batch 0, step 0"),
        (-1, Position(), "Block", ""),
    ],
)
def test_place_says_what_applies(
    rank: int, position: Position, layer_class: str, text: str
) -> None:
    assert place(Failure(Cause.USER, "m", rank, position, layer_class)) == text


def test_a_failure_of_the_users_code_is_whole() -> None:
    failure = Failure(
        Cause.USER, "layer 3 (Block) raised ValueError: no", 1, FORWARD, "Block", "Traceback\n  x\n"
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
    shown = describe(Failure(Cause.LOST, "gone", 0, Position(phase)))
    assert shown == f"gone\n  in {phase.name.lower()}: stage 0"


def test_nothing_is_said_that_is_not_known() -> None:
    assert describe(Failure(Cause.LOST, "gone")) == "gone"
    assert describe(Failure(Cause.LOST, "gone", 2)) == "gone\n  stage 2"


def test_a_mistake_of_the_user_needs_no_place() -> None:
    assert describe(Failure(Cause.USAGE, "fix it", 1, FORWARD)) == "fix it"


def test_a_configuration_comes_through_its_pipe() -> None:
    options = Options("job.py", 4, 8, arguments=("-x", "1"), balance=(1, 2, 3, 4), steps=3)
    sent = Configuration(options, "run", "t" * 32, "127.0.0.1", generation=2, starter=0)
    assert Configuration.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_a_position_comes_through_its_pipe() -> None:
    assert Position.from_json(json.loads(json.dumps(FORWARD.to_json()))) == FORWARD


def test_the_plan_as_json() -> None:
    schedule = build("gpipe", 2, 4, "never")
    stages = (
        StagePlan((0, 2), ("Linear", "ReLU"), 40, "cpu", "here", 10),
        StagePlan((2, 3), ("Linear",), 20, "cpu", "there", 11),
    )
    options = Options("job.py", 2, 4, recompute="never")
    plan = json.loads(json.dumps(planned_json(Planned(stages, prove(schedule), schedule), options)))
    assert plan["balance"] == [2, 1]
    assert plan["bubble"] == pytest.approx(0.2)
    assert [stage["layers"] for stage in plan["stages"]] == [[0, 1], [2]]
    assert plan["stages"][1]["classes"] == ["Linear"]
    assert plan["stages"][1]["live_activations"] == 4
    assert parse("\n".join(plan["actions"])) == schedule  # what is shown is what runs


def test_the_verdict_as_json() -> None:
    failure = Failure(Cause.HUNG, "stuck", 1, FORWARD)
    verdict = ended_json(Ended(Status.FAILED, 1, 6, (5, 7), 0.25, failure), 2.5)
    assert verdict == {
        "status": "failed",
        "exit_status": 1,
        "steps": 6,
        "seconds": 2.5,
        "peak_memory_bytes": [5, 7],
        "bubble": 0.25,
        "error": "stuck\n  in forward: stage 1, layer 3, micro-batch 2, step 7",
    }
    assert ended_json(Ended(Status.DONE, 0, 6, (), 0.0, None), 1.0)["error"] is None
