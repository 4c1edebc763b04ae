"""The final summary of a job."""

from __future__ import annotations

import dataclasses
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from pipeworker.display.lines import LineDisplay
from pipeworker.display.summary import PlanContext, Summary, explain_bubble
from pipeworker.facts.speed import Speed
from pipeworker.job.options import Options
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Verdict

VERDICT = Verdict("done", 0, 60, 12.34, (2**20, 3 * 2**20), 0.2, None, busy=(0.8, 0.8))
SUMMARY = Summary(
    VERDICT,
    "/a/runs/x",
    PlanContext(0.15, workers=2, cores=2, seconds=0.5),
    loss=0.25,
    best=(40, "loss", 0.5),
    checkpoint=(60, "/a/runs/x/checkpoints/step-00000060"),
    export="pipeworker export it",
    best_checkpoint=(40, "/a/runs/x/checkpoints/step-00000040"),
    export_best="pipeworker export --best it",
    resume="pipeworker launch --resume it",
)


def ended(**changes: Any) -> list[str]:
    verdict = {k: changes.pop(k) for k in list(changes) if k in Verdict.__dataclass_fields__}
    found = dataclasses.replace(VERDICT, **verdict)
    return [*dataclasses.replace(SUMMARY, verdict=found, **changes).lines()]


def test_results_and_continuation() -> None:
    assert ended() == [
        "done: 60 steps in 12.3 s",
        "loss: 0.2500, best evaluation: 0.5000, after step 40",
        "bubble: 20.0% measured, 15.0% by the schedule",
        "peak memory by worker: 1, 3 MB",
        "weights: /a/runs/x/checkpoints/step-00000060",
        "export: pipeworker export it",
        "best weights: /a/runs/x/checkpoints/step-00000040, after step 40",
        "export them: pipeworker export --best it",
        "train further: pipeworker launch --resume it",
        "run directory: /a/runs/x",
    ]


@pytest.mark.parametrize(
    ("steps", "before", "line"),
    [
        (1, 0, "done: 1 step in 12.3 s"),
        (100, 60, "done: 100 steps, 40 of them now, in 12.3 s"),
        (61, 60, "done: 61 steps, 1 of them now, in 12.3 s"),
        (60, 60, "done: 60 steps, 0 of them now, in 12.3 s"),
    ],
)
def test_the_time_belongs_to_the_steps_since_the_resume(steps: int, before: int, line: str) -> None:
    assert ended(steps=steps, resumed_at=before)[0] == line


def test_the_speed_of_the_steps() -> None:
    speed = Speed(0.0125, 640.0, 0.0, (8.0, 9.04), 0.0)
    assert ended(speed=speed)[2:4] == [
        "speed: 0.0125 s a step (median), 640.0 samples/s",
        "busy: 8.0, 9.0 s by worker",
    ]
    speed = dataclasses.replace(speed, tokens_per_second=5120.0, data=1.5)
    assert ended(speed=speed)[2:4] == [
        "speed: 0.0125 s a step (median), 640.0 samples/s, 5120.0 tokens/s",
        "busy: 8.0, 9.0 s by worker; data(): 1.5 s",
    ]


def test_unknown_facts_are_left_out() -> None:
    """The coordinator may have been killed, or the user did not wait for it."""
    assert ended(
        status="interrupted",
        peak_memory=(0, 0),
        bubble=0.0,
        busy=(),
        context=None,
        loss=None,
        best=None,
        best_checkpoint=None,
        checkpoint=(50, "/a/step-00000050"),
    ) == [
        "interrupted: 60 steps in 12.3 s",
        "weights: /a/step-00000050, after step 50",
        "export: pipeworker export it",
        "resume: pipeworker launch --resume it",
        "run directory: /a/runs/x",
    ]
    assert "loss: 0.2500" in ended(best=None)
    assert "best evaluation: 0.5000, after step 40" in ended(loss=None)
    better = "best evaluation: accuracy 0.9000, after step 60"
    newest = ended(loss=None, best=(60, "accuracy", 0.9), best_checkpoint=SUMMARY.checkpoint)
    assert better in newest
    assert not any("best weights" in line for line in newest)
    assert "peak memory by worker: ?, 2 MB" in ended(peak_memory=(0, 2**21))


def test_a_job_without_a_checkpoint_starts_again() -> None:
    lines = ended(status="failed", checkpoint=None)
    assert lines[-3:] == [
        "weights: none, because no checkpoint was complete yet (--checkpoint-every)",
        "start again, from step 1: pipeworker launch --resume it",
        "run directory: /a/runs/x",
    ]
    assert not any(line.startswith("export") for line in lines)
    assert ended(steps=0) == []


def test_a_job_whose_run_directory_was_removed_cannot_be_resumed() -> None:
    lines = ended(status="failed", checkpoint=None, resume="")
    assert not any("weights" in line or "again" in line for line in lines)
    assert lines[-1] == "run directory: /a/runs/x, which was removed"


def test_a_mistake_before_the_first_step_of_a_resume_has_no_summary() -> None:
    assert ended(status="failed", exit_status=2, resumed_at=60) == []
    assert ended(status="failed", exit_status=1, resumed_at=60)


CONTEXT = PlanContext(0.15, workers=3, cores=4, microbatches=10, seconds=0.5)


@pytest.mark.parametrize(
    ("bubble", "busy", "changes", "reason"),
    [
        (0.2, (0.9, 0.1), {"cores": 1}, ""),  # close to the schedule's
        (0.5, (0.5, 0.5, 0.5), {}, ""),
        (0.5, (0.5, 0.5, 0.5), {"cores": 2}, "3 workers share 2 cores"),
        (0.5, (0.5,), {"cores": 2, "threads": 2}, "3 workers with 2 threads each share 2 cores"),
        (0.5, (0.5, 0.5, 0.5), {"cores": 1, "workers": 2}, "2 workers share 1 core"),
        (0.5, (0.3, 0.9, 0.3), {}, "worker 1 computes 3.0 times as long as the others (--balance)"),
        (0.5, (0.3, 0.9, 0.3), {"cores": 2}, "worker 1 computes 3.0 times as long as the others"),
        (0.5, (0.9, 0.3), {}, "worker 0 computes 3.0 times as long as the others (--balance, or"),
        (0.5, (0.3, 0.4, 0.3), {}, ""),
        (0.5, (0.5, 0.5), {"seconds": 0.004}, "a worker computes 0.2 ms for a micro-batch"),
        (0.9, (0.0, 0.0), {}, ""),
        (0.9, (), {}, ""),
    ],
)
def test_a_bubble_larger_than_the_schedules_is_explained(
    bubble: float, busy: tuple[float, ...], changes: dict[str, Any], reason: str
) -> None:
    found = explain_bubble(bubble, busy, dataclasses.replace(CONTEXT, **changes))
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
    lines = ended(bubble=bubble, busy=busy, context=dataclasses.replace(CONTEXT, **changes))
    assert (f"  larger than the schedule's: {found}" in lines) == bool(reason)


def shown(run_dir: RunDir) -> list[str]:
    """Return the lines of a verdict, with the facts that are on record."""
    out = StringIO()
    LineDisplay(Options("job.py", 2, 8), run_dir, out=out).show(VERDICT)
    return out.getvalue().splitlines()


def test_the_best_evaluation_of_the_whole_run(tmp_path: Path) -> None:
    """Evaluations before the run was resumed count; of equally good ones the first is best."""
    run_dir = RunDir(tmp_path)
    assert not any("best evaluation" in line for line in shown(run_dir))
    rows = '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n{"step": 3, "loss": 0.25}\n'
    run_dir.evaluation.write_text(rows + '{"step": 4, "loss": NaN}\n{"step": 5, "lo')
    assert "best evaluation: 0.2500, after step 2" in shown(run_dir)


def test_the_loss_of_the_last_step_on_record(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.metrics.write_text('{"step": 59, "loss": 0.5}\n')
    assert "loss: 0.5000" not in shown(run_dir)
    run_dir.metrics.write_text('{"step": 60, "loss": 0.5}\n')
    assert "loss: 0.5000" in shown(run_dir)


def test_the_newest_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert f"run directory: {tmp_path}, which was removed" in shown(run_dir)
    run_dir.run.touch()
    assert any(line.startswith("weights: none") for line in shown(run_dir))
    for step in (9, 10):
        run_dir.checkpoints.at(step).mkdir(parents=True)
    assert f"weights: {run_dir.checkpoints.at(10)}, after step 10" in shown(run_dir)
    run_dir.metrics.mkdir()  # which cannot be read
    assert f"weights: {run_dir.checkpoints.at(10)}, after step 10" in shown(run_dir)


PREDICTED = PlanContext(0.15, 2, cores=4, microbatches=10, predicted=0.5, computing=(0.4, 0.3))
SPEED = Speed(0.5, 20.0, 0.0, (30.0, 30.0), 0.0)


@pytest.mark.parametrize(
    ("speed", "busy", "changes", "reason"),
    [
        ({"median_step": 0.57}, (0.8, 0.6), {}, ""),
        ({"median_step": 0.6}, (0.8, 0.6), {"predicted": 0.0}, ""),
        ({"median_step": 0.6}, (0.8, 0.6), {"computing": (0.005, 0.001)}, ""),  # overhead
        ({"median_step": 0.01}, (0.8, 0.6), {"predicted": 0.0065}, ""),
        (
            {"median_step": 0.6},
            (0.85, 0.5),
            {},
            "0.5000 s a step; it took 20% longer: worker 0 computed 0.5100 s a step, and 0.4000 s "
            "by the measured times of its layers",
        ),
        ({"median_step": 0.6}, (0.9, 0.5), {"cores": 1}, "longer: 2 workers share 1 core"),
        ({"median_step": 0.6, "data": 6.0}, (0.9, 0.5), {}, "longer: data() took 0.1000 s a step"),
        ({"median_step": 6.0, "data": 6.0}, (0.9, 0.5), {}, "worker 0 computed 5.4000 s a step"),
        (
            {"median_step": 0.6},
            (0.68, 0.5),
            {},
            "the workers computed as long as predicted",
        ),
        (
            {"median_step": 0.6},
            (0.2, 0.5),
            {},
            "the workers computed less than predicted, and waited more",
        ),
        (
            {"median_step": 1.0},
            (0.55, 0.3),
            {},
            "100% longer: the workers waited more than predicted",
        ),
        ({"median_step": 0.4}, (0.75, 0.75), {}, "20% less: worker 0 computed 0.3000 s a step"),
        (
            {"median_step": 0.4},
            (0.98, 0.95),
            {},
            "the workers computed more than predicted, and waited less",
        ),
    ],
)
def test_a_wrong_prediction_is_explained(
    speed: dict[str, Any], busy: tuple[float, ...], changes: dict[str, Any], reason: str
) -> None:
    measured = dataclasses.replace(SPEED, **speed)
    context = dataclasses.replace(PREDICTED, **changes)
    lines = ended(speed=measured, busy=busy, context=context)
    found = [line for line in lines if line.startswith("predicted: ")]
    assert len(found) == bool(reason)
    assert reason in "".join(found)
