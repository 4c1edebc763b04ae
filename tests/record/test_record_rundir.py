"""The run directory, its checkpoints and its summary."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.record import run_record, rundir
from pipeworker.record.files.located import located
from pipeworker.record.rundir import Request, RunDir
from pipeworker.wire.lines import Verdict


def test_the_layout_of_a_run_directory() -> None:
    run = RunDir(Path("r"))
    found = [
        run.plan,
        run.metrics,
        run.summary,
        run.coordinator_log,
        run.worker_log(2),
        run.checkpoints.at(100),
    ]
    assert [str(path.relative_to("r")) for path in found] == [
        "plan.json",
        "metrics.jsonl",
        "summary.json",
        "logs/coordinator.log",
        "logs/worker-2.log",
        "checkpoints/step-00000100",
    ]


def test_an_open_run_directory_is_used_wherever_it_is_moved(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    run = RunDir.open(before)
    before.rename(after)
    (run.root / "file").write_text("here")
    assert (run.path, (after / "file").read_text()) == (after, "here")
    assert located(f"[{run.metrics}]") == f"[{after}/metrics.jsonl]"
    shutil.rmtree(after)
    with pytest.raises(FileNotFoundError):
        run.metrics.touch()
    assert run.path == after
    assert located(run.metrics) == f"{after}/metrics.jsonl"
    assert not [*tmp_path.iterdir()]


@pytest.mark.root
def test_a_directory_that_is_unmounted_was_not_moved(tmp_path: Path) -> None:
    """The system shows its path from the root of its file system: ``/tmp``, a folder of others."""
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(mounted)], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this system mounts nothing")
    try:
        (mounted / "tmp").mkdir()
        run = RunDir.open(mounted / "tmp")
    finally:
        subprocess.run(["umount", "--lazy", str(mounted)], check=True)
    assert located(run.root) == "/tmp"
    assert run.path == mounted / "tmp"


def test_a_directory_that_cannot_be_searched_has_no_request() -> None:
    assert not RunDir(Path("x" * 5000)).requested(Request.CANCEL)


def test_create_makes_the_requested_directory(tmp_path: Path) -> None:
    made, folders = rundir.create(str(tmp_path / "a" / "b"), Path("job.py"))
    assert made.path == (tmp_path / "a" / "b").resolve()
    assert (made.path / "logs").is_dir()
    assert folders == (made.path, made.path.parent)


def test_create_leaves_nothing_where_the_folder_of_logs_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def refuse(path: Path, *args: Any, **options: Any) -> None:
        if path.name == "logs":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        make(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)  # Python 3.10 has taken os.mkdir before
    with pytest.raises(UsageError, match="cannot be made: No space left on device"):
        rundir.create(str(tmp_path / "a" / "b"), Path("job.py"))
    assert list(tmp_path.iterdir()) == []


def test_remove_run_leaves_nothing(tmp_path: Path) -> None:
    made, folders = rundir.create(str(tmp_path / "a" / "b"), Path("job.py"))
    made.events.mkdir()
    table, events = made.path / "metrics.csv", made.events / "events.out.tfevents.1"
    for path in (made.run, made.metrics, table, events, made.coordinator_log, made.worker_log(0)):
        path.touch()
    made.remove_run(folders)
    assert list(tmp_path.iterdir()) == []


def test_remove_run_keeps_files_of_others(tmp_path: Path) -> None:
    made, folders = rundir.create(str(tmp_path / "a" / "b"), Path("job.py"))
    for path in (made.run, made.path / "notes.txt", made.path.parent / "b-2"):
        path.touch()
    made.remove_run(folders)
    assert [path.name for path in made.path.iterdir()] == ["notes.txt"]
    assert sorted(path.name for path in made.path.parent.iterdir()) == ["b", "b-2"]


@pytest.mark.parametrize("theirs", ["notes.txt", "logs/notes.txt", ".lock/notes", "job.py"])
def test_create_refuses_a_directory_with_anything_in_it(tmp_path: Path, theirs: str) -> None:
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="exists already and is no run; choose another --run-dir"):
        rundir.create(str(tmp_path), Path("job.py"))
    assert sorted(tmp_path.rglob("*")) == before
    RunDir(tmp_path).run.touch()
    advice = r"choose another --run-dir, or add --resume \(in a script, resume=True\) to continue"
    with pytest.raises(UsageError, match=f"exists already; {advice} its run"):
        rundir.create(str(tmp_path), Path("job.py"))


def test_create_refuses_a_link_in_place_of_the_logs(tmp_path: Path) -> None:
    run, theirs = tmp_path / "run", tmp_path / "theirs"
    run.mkdir()
    theirs.mkdir()
    (run / "logs").symlink_to(theirs)
    with pytest.raises(UsageError, match="exists already"):
        rundir.create(str(run), Path("job.py"))


@pytest.mark.parametrize("left", [(), (".lock",), ("logs/", ".lock", f".{'0' * 16}.partial")])
def test_create_takes_what_a_killed_start_has_left(tmp_path: Path, left: tuple[str, ...]) -> None:
    for name in left:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    made, folders = rundir.create(str(tmp_path), Path("job.py"))
    assert (made.path, folders) == (tmp_path.resolve(), ())
    made.remove_run(folders)
    assert [*tmp_path.iterdir()] == []


def test_the_default_directory_is_new_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20000101-000000")
    names = [rundir.create(None, Path("/jobs/net.py"))[0].path for _ in range(3)]
    stem = tmp_path.resolve() / "runs" / "net-20000101-000000"
    assert names == [stem, Path(f"{stem}-2"), Path(f"{stem}-3")]


def test_create_refuses_a_link_that_leads_nowhere_in_place_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").symlink_to(tmp_path / "unmounted")
    with pytest.raises(UsageError, match="cannot be made: runs is a link that leads nowhere"):
        rundir.create(None, Path("job.py"))


def test_create_refuses_an_impossible_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"run directory .*: cannot be made: Not a directory"):
        rundir.create(str(tmp_path / "file" / "run"), Path("job.py"))


@pytest.mark.parametrize("blocked", ["evaluation", "summary"])
def test_why_no_summary_can_be_written_names_the_present_path(tmp_path: Path, blocked: str) -> None:
    verdict = Verdict("failed", 1, 4, 1.5, (1, 2), 0.25, "lost")
    run = RunDir.open(tmp_path)
    assert run_record.summary_problem(run, verdict, 2, "loss") == ""
    run.summary.unlink()
    (tmp_path / getattr(run, blocked).name / "in_the_way").mkdir(parents=True)
    problem = run_record.summary_problem(run, verdict, 2, "loss")
    assert problem.startswith(f"{tmp_path / 'summary.json'}: cannot be written: ")
    assert "Is a directory" in problem
    assert "/proc/" not in problem


def test_the_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run_record.read_summary(run) == {}
    verdict = Verdict("failed", 1, 4, 1.5, (1, 2), 0.25, "lost")
    run_record.write_summary(run, verdict, 2)
    assert run_record.read_summary(run)["loss"] is None
    assert not {"best_evaluation", "best"} & run_record.read_summary(run).keys()
    run.metrics.write_text('{"step": 3, "loss": 2.0}\n{"step": 4, "loss": 1.0}\n')
    run.evaluation.write_text('{"step": 2, "loss": 3.0, "x": 1}\n{"step": 4, "loss": 4.0}\n')
    run.checkpoints.at(4).mkdir(parents=True)
    run_record.write_summary(run, verdict, 2, "max:loss")
    entry = {"step": 4, "name": "loss", "value": 4.0, "path": "checkpoints/step-00000004"}
    assert run_record.read_summary(run)["best"] == entry
    run_record.write_summary(run, verdict, 2)
    assert json.loads(run.summary.read_text()) == run_record.read_summary(run)
    assert run_record.read_summary(run) == {
        "status": "failed",
        "steps": 4,
        "stages": 2,
        "restarts": 0,
        "causes": [],
        "seconds": 1.5,
        "loss": 1.0,
        "best_evaluation": {"step": 2, "loss": 3.0, "x": 1},
        "best": {"step": 2, "name": "loss", "value": 3.0, "path": None},
        "peak_memory_bytes": [1, 2],
        "bubble": 0.25,
        "stopped_early": None,
        "error": "lost",
    }
