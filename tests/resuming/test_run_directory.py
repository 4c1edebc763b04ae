"""A run directory that a stranger has prepared, or that is moved while its job runs."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from pipeworker.errors import PipeworkerError
from pipeworker.record.metrics.formats import CsvTable
from pipeworker.record.metrics.rows import Rows
from pipeworker.runs.begin import RunRequest
from support.real_jobs.jobs import Jobs, ended, pids_of, until
from support.real_jobs.sources import JOB, gated
from support.slow import mostly_slow


def test_a_resumed_run_follows_no_link(jobs: Jobs) -> None:
    words = ("--stages", "1", "--steps", "3", "--csv")
    path = jobs.train(*words).path
    theirs = jobs.folder / "theirs"
    theirs.write_text("precious\n")
    run = path.name
    again = ("launch", "--resume", "--run-dir", run, "--steps", "5", "job.py")
    for name in ("summary.json", "run.json", "plan.json", "metrics.jsonl", "metrics.csv"):
        (path / f".{name}.partial").symlink_to(theirs)  # names that were used once
    (path / "plan.json").unlink()
    (path / "plan.json").symlink_to(theirs)
    assert jobs.pipeworker(*again).returncode == 0
    assert theirs.read_text() == "precious\n"
    for number, name in enumerate(("logs/coordinator.log", "logs/worker-0.log", ".lock")):
        (path / name).unlink()
        (path / name).symlink_to(theirs)
        done = jobs.pipeworker(*again[:-2], str(6 + number), "job.py")
        assert done.returncode in (1, 2)
        expected = f"error: {path / name}: cannot be written: it is a link; remove it\n"
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
        (path / name).unlink()
        assert theirs.read_text() == "precious\n"


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "evaluation.jsonl", "checkpoints", "logs"),
        *("tensorboard", "profile", "timeline", "wandb"),
    ],
)
def test_a_link_in_place_of_a_folder_or_rows_is_rejected(tmp_path: Path, name: str) -> None:
    job_file = tmp_path / "job.py"
    job_file.touch()
    run = tmp_path / "run"
    RunRequest(str(job_file), 1, {}, run).prepare().close()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).symlink_to(theirs)
    before = sorted(run.iterdir()), (run / "run.json").read_bytes()
    with pytest.raises(PipeworkerError, match=rf"^{run / name}: is a link; put what it leads to"):
        RunRequest(str(job_file), None, {}, run, resume=True).prepare()
    assert (sorted(run.iterdir()), (run / "run.json").read_bytes()) == before
    assert not [*theirs.iterdir()]


@pytest.mark.parametrize("kind", [Rows, CsvTable])
def test_no_link_is_opened_while_a_job_runs(
    tmp_path: Path, kind: type[Rows] | type[CsvTable]
) -> None:
    theirs, rows = tmp_path / "theirs", tmp_path / "metrics.jsonl"
    theirs.write_text("step,loss\n1,2.0\n")
    link = rows if kind is Rows else tmp_path / "metrics.csv"
    if kind is CsvTable:
        rows.write_text('{"step": 1, "loss": 2.0}\n')
    link.symlink_to(theirs)
    with pytest.raises(OSError, match="symbolic link"):
        kind(rows)
    assert theirs.read_text() == "step,loss\n1,2.0\n"


DIES_ONCE = gated(
    JOB.replace(
        "x = torch.randn(10",
        """import os, pathlib
            if pathlib.Path("kill").exists():
                pathlib.Path("kill").unlink()
                os.kill(os.getpid(), 9)
            x = torch.randn(10""",
    ),
    "import os, pathlib",
    "_ == 3",
)
DIES_ONCE += """
    def evaluation():
        yield torch.ones(10, 8), torch.ones(10).long()
"""
"""Its fourth mini-batch waits for the test; the worker that reads it dies if there is a file."""


@pytest.mark.parametrize("lost", mostly_slow(["worker", "coordinator", ""], 3))
def test_a_run_continues_in_its_directory_when_that_is_moved(jobs: Jobs, lost: str) -> None:
    words = ("--stages", "2", "--checkpoint-every", "2", "--csv", "--evaluate-every", "1")
    process, path = jobs.start(*words, source=DIES_ONCE)
    until(lambda: (path / "checkpoints" / "step-00000002").exists())
    moved = path.with_name("moved")
    path.rename(moved)
    if lost == "worker":
        (jobs.folder / "kill").touch()
    if lost == "coordinator":
        (pid,) = pids_of(jobs.folder, "coordinator")
        os.kill(pid, signal.SIGKILL)
    (jobs.folder / "go").touch()
    run = ended(process, moved)
    assert not path.exists()
    assert [row["step"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
    assert run.summary["status"] == "done"
    assert run.summary["restarts"] == bool(lost)
    assert run.checkpoint.manifest.step == 6
    for name in ("metrics.csv", "evaluation.csv", "evaluation.jsonl"):
        assert len((moved / name).read_text().splitlines()) == 6 + name.endswith(".csv")
    assert f"weights: {moved}/checkpoints/step-00000006" in run.stdout
    assert f"run directory: {moved}" in run.stdout.splitlines()[-1]
    if lost != "coordinator":  # the next one begins at the new path
        text = f"warning: run directory: was moved to {moved}; the job continues there"
        assert text in run.stderr.splitlines()
    assert "/proc/" not in run.stdout + run.stderr
