"""Tests of ``pipeworker cancel``: a job that runs, one that waits in a queue, and none."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from support.real_jobs.compare import assert_same
from support.real_jobs.jobs import Jobs, Record, Reference, ended, steps_of, until
from support.real_jobs.sources import CALM

STEPS = ("--steps", "12", "--microbatches", "4")
SLOW = CALM.replace("sleep(0.05)", "sleep(0 if Path('cancelled').exists() else 0.3)").replace(
    "import time", "import time\n    from pathlib import Path", 1
)
"""A job that is slow until a test makes a file."""


def program(folder: Path, name: str, text: str) -> None:
    """Write a program that logs its words, and prints a text."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f"#!{sys.executable} -S\nimport sys\n"
        f"print(*sys.argv, file=open({str(folder / 'calls')!r}, 'a'))\nprint({text!r})\n"
    )
    path.chmod(0o755)


def test_a_running_job_is_ended_with_a_checkpoint_and_can_be_resumed(
    jobs: Jobs, reference: Reference
) -> None:
    process, path = jobs.start("--stages", "2", *STEPS, source=SLOW)
    until(lambda: steps_of(path))
    done = jobs.pipeworker("cancel", path.name)
    assert done.returncode == 0, done.stderr
    summary = ended(process, path, 130).summary
    assert summary["status"] == "interrupted"
    step = summary["steps"]
    assert 0 < step < 12
    saved = f"{path.name}/checkpoints/step-{step:08}"
    assert f"{path.name}: the job has ended; its last checkpoint is {saved}" in done.stdout
    assert (path / "cancelled").exists()  # a script that requeues the job looks for it
    (jobs.folder / "cancelled").touch()
    resumed = jobs.pipeworker("launch", "--resume", path.name)
    assert resumed.returncode == 0, resumed.stderr
    assert not (path / "cancelled").exists()
    assert_same(Record(path), reference("--stages", "1", *STEPS))


def test_a_job_that_waits_in_the_queue_is_cancelled_by_its_run_directory(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(jobs.folder, "squeue", f"17 {jobs.folder}/elsewhere\n18 {jobs.folder}/waits")
    program(jobs.folder, "scontrol", "JobId=18 JobState=PENDING Reason=Resources ExitCode=0:0")
    program(jobs.folder, "scancel", "")
    monkeypatch.setenv("PATH", str(jobs.folder / "bin"))
    done = jobs.pipeworker("cancel", "waits")
    assert (done.returncode, done.stdout) == (0, "job 18 of Slurm is cancelled\n")
    assert (jobs.folder / "calls").read_text().splitlines()[-1].endswith("scancel 18")


def test_a_job_of_kubernetes_is_deleted(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"name": "train", "namespace": "a", "annotations": {"pipeworker/run-dir": "/runs/1"}}
    program(jobs.folder, "kubectl", json.dumps({"items": [{"metadata": metadata}]}))
    monkeypatch.setenv("PATH", str(jobs.folder / "bin"))
    done = jobs.pipeworker("cancel", "/runs/1")
    assert "job train in namespace a is deleted; its pods save a checkpoint in" in done.stdout
    assert "kubectl delete job train" in (jobs.folder / "calls").read_text().splitlines()[-1]


def test_without_a_job_there_is_one_message(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (jobs.folder / "empty").mkdir()
    for run in ("empty", "nowhere"):
        done = jobs.pipeworker("cancel", run)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {run}: no job is running there; ")
