"""How the end of a job reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.record.rundir import RunDir
from pipeworker.session.show.ending import Ending, Measured, excess
from pipeworker.session.show.plain import best_of, newest_of
from pipeworker.session.show.view import View, Ways, typed
from pipeworker.wire.lines import Verdict

VERDICT = Verdict("done", 0, 60, 12.34, (2**20, 3 * 2**20), 0.2, None, busy=(0.8, 0.8))
WAYS = Ways(("pipeworker",), ("pipeworker", "launch"), ("job.py",))
ENDING = Ending(
    VERDICT,
    "/a/runs/x",
    Measured(0.15, workers=2, cores=2, seconds=0.5),
    loss=0.25,
    best=(40, 0.5),
    checkpoint=(60, "/a/runs/x/checkpoints/step-00000060"),
    export="pipeworker export it",
    resume="pipeworker launch --resume it",
)


def ended(**changes: Any) -> list[str]:
    verdict = {k: changes.pop(k) for k in list(changes) if k in Verdict.__dataclass_fields__}
    found = dataclasses.replace(VERDICT, **verdict)
    return dataclasses.replace(ENDING, verdict=found, **changes).lines()


def test_what_a_job_came_to_and_how_to_get_on() -> None:
    assert ended() == [
        "done: 60 steps in 12.3 s",
        "loss: 0.2500, best evaluation: 0.5000, after step 40",
        "bubble: 20.0% measured, 15.0% by the schedule",
        "peak memory by stage: 1, 3 MiB",
        "weights: /a/runs/x/checkpoints/step-00000060",
        "export: pipeworker export it",
        "train further: pipeworker launch --resume it",
        "run directory: /a/runs/x",
    ]


@pytest.mark.parametrize(
    ("steps", "before", "said"),
    [
        (1, 0, "done: 1 step in 12.3 s"),
        (100, 60, "done: 100 steps, 40 of them now, in 12.3 s"),
        (61, 60, "done: 61 steps, 1 of them now, in 12.3 s"),
        (60, 60, "done: 60 steps, 0 of them now, in 12.3 s"),
    ],
)
def test_the_time_is_that_of_the_steps_it_took(steps: int, before: int, said: str) -> None:
    """A run that goes on has others, which took another time."""
    assert ended(steps=steps, before=before)[0] == said


def test_what_nobody_knows_is_left_out() -> None:
    """As when the coordinator was killed, or the user did not wait for it."""
    assert ended(
        status="interrupted",
        peak_memory=(0, 0),
        bubble=0.0,
        busy=(),
        measured=None,
        loss=None,
        best=None,
        checkpoint=(50, "/a/step-00000050"),
    ) == [
        "interrupted: 60 steps in 12.3 s",
        "weights: /a/step-00000050, after step 50",
        "export: pipeworker export it",
        "go on: pipeworker launch --resume it",
        "run directory: /a/runs/x",
    ]
    assert "loss: 0.2500" in ended(best=None)
    assert "best evaluation: 0.5000, after step 40" in ended(loss=None)
    assert "peak memory by worker: ?, 2 MiB" in ended(peak_memory=(0, 2**21), replicas=2)


def test_a_job_without_a_checkpoint_has_nothing_to_go_on_from() -> None:
    lines = ended(status="failed", checkpoint=None)
    assert lines[-2:] == [
        "weights: none, as no checkpoint was complete yet (--checkpoint-every)",
        "run directory: /a/runs/x",
    ]
    assert not any("pipeworker" in line for line in lines)
    assert ended(steps=0) == []


MEASURED = Measured(0.15, workers=3, cores=4, microbatches=10, seconds=0.5)


@pytest.mark.parametrize(
    ("bubble", "busy", "changes", "why"),
    [
        (0.2, (0.9, 0.1), {"cores": 1}, ""),  # as good as the schedule's
        (0.5, (0.5, 0.5, 0.5), {}, ""),
        (0.5, (0.5, 0.5, 0.5), {"cores": 2}, "3 workers share 2 cores"),
        (0.5, (0.5,), {"cores": 2, "threads": 2}, "3 workers with 2 threads each share 2 cores"),
        (0.5, (0.5, 0.5, 0.5), {"cores": 1, "workers": 2}, "2 workers share 1 core"),
        (0.5, (0.3, 0.9, 0.3), {}, "stage 1 is busy 3.0 times as long as the others (--balance)"),
        (0.5, (0.3, 0.9, 0.3), {"cores": 2}, "stage 1 is busy 3.0 times as long as the others"),
        (0.5, (0.9, 0.3), {}, "stage 0 is busy 3.0 times as long as the others (--balance, or"),
        (0.5, (0.3, 0.4, 0.3), {}, ""),
        (0.5, (0.5, 0.5), {"seconds": 0.004}, "a stage computes 0.2 ms for a micro-batch"),
        (0.9, (0.0, 0.0), {}, ""),
        (0.9, (), {}, ""),
    ],
)
def test_a_bubble_larger_than_the_schedules_is_explained(
    bubble: float, busy: tuple[float, ...], changes: dict[str, Any], why: str
) -> None:
    found = excess(bubble, busy, dataclasses.replace(MEASURED, **changes))
    assert found.startswith(why)
    assert bool(found) == bool(why)
    said = ended(bubble=bubble, busy=busy, measured=dataclasses.replace(MEASURED, **changes))
    assert (f"  larger than the schedule's: {found}" in said) == bool(why)


def test_the_commands_are_as_they_are_typed() -> None:
    ways = Ways(("python", "-m", "pipeworker"), ("torchrun", "-m", "pipeworker"), ("a job.py",))
    assert ways.export("my runs/1") == (
        "python -m pipeworker export 'my runs/1' weights.safetensors"
    )
    again = "torchrun -m pipeworker --resume --run-dir 'my runs/1'"
    assert ways.resume("my runs/1") == f"{again} 'a job.py'"
    assert ways.resume("my runs/1", ("steps", 9)) == f"{again} --steps 9 'a job.py'"


def test_where_nobody_knows_the_command_it_is_the_same_one() -> None:
    cluster = dataclasses.replace(WAYS, begin=())
    assert cluster.resume("/runs/1") == "the same command, with --resume --run-dir /runs/1"
    script = "the same script, with resume=True, run_dir='runs/1'"
    assert Ways().resume("runs/1") == script
    assert Ways().resume("runs/1", ("epochs", 8)) == f"{script}, epochs=8"


def test_a_path_is_typed_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert typed(str(tmp_path / "here" / "runs" / "x")) == "runs/x"
    assert typed(str(tmp_path / "there")) == str(tmp_path / "there")


def test_the_best_evaluation_is_of_the_whole_run(tmp_path: Path) -> None:
    """Those before it went on among them; of equal ones, the newest."""
    run_dir = RunDir(tmp_path)
    assert best_of(run_dir) is None
    rows = '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.25}\n{"step": 3, "loss": 0.25}\n'
    run_dir.evaluation.write_text(rows + '{"step": 4, "loss": NaN}\n{"step": 5, "lo')
    assert best_of(run_dir) == (3, 0.25)


def test_the_newest_checkpoint_is_where_the_weights_are(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert newest_of(run_dir) is None
    for step in (9, 10):
        run_dir.checkpoint(step).mkdir(parents=True)
    assert newest_of(run_dir) == (10, str(run_dir.checkpoint(10)))


def test_what_is_shown_makes_sense() -> None:
    assert [View().shows, View(quiet=True).shows, View(quiet=True, output="all").shows] == [
        "stage",
        "none",
        "all",
    ]
    with pytest.raises(UsageError, match="--quiet and --verbose: choose one"):
        View(quiet=True, verbose=True)
    with pytest.raises(UsageError, match="--log-every 0: must be 1 or more"):
        View(log_every=0)
    with pytest.raises(UsageError, match="--log-every '3': a str"):
        View(log_every="3")  # type: ignore[arg-type]
