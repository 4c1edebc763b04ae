"""The run directory, its checkpoints and its summary."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeworker.errors import UsageError
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record import atomic_file, manifest, run_record, rundir
from pipeworker.record.atomic_file import open_file
from pipeworker.record.manifest import Manifest
from pipeworker.record.rundir import RunDir, located
from pipeworker.wire.lines import Verdict

_LATE = [100_000_000, 100_000_001]


def test_the_layout_of_a_run_directory() -> None:
    run = RunDir(Path("r"))
    found = [
        run.plan,
        run.metrics,
        run.summary,
        run.coordinator_log(),
        run.worker_log(2),
        run.checkpoint(100),
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
    assert not [*tmp_path.iterdir()]


def test_create_makes_the_requested_directory(tmp_path: Path) -> None:
    made, folders = rundir.create(str(tmp_path / "a" / "b"), Path("job.py"))
    assert made.path == (tmp_path / "a" / "b").resolve()
    assert (made.path / "logs").is_dir()
    assert folders == (made.path, made.path.parent)


def test_remove_run_leaves_nothing(tmp_path: Path) -> None:
    made, folders = rundir.create(str(tmp_path / "a" / "b"), Path("job.py"))
    made.events.mkdir()
    table, events = made.path / "metrics.csv", made.events / "events.out.tfevents.1"
    for path in (made.run, made.metrics, table, events, made.coordinator_log(), made.worker_log(0)):
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
    advice = r"choose another --run-dir, or add --resume \(in a script, resume=True\) to continue"
    with pytest.raises(UsageError, match=f"exists already; {advice} its run"):
        rundir.create(str(tmp_path), Path("job.py"))
    assert sorted(tmp_path.rglob("*")) == before


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


def test_create_refuses_an_impossible_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"run directory .*: cannot be made: Not a directory"):
        rundir.create(str(tmp_path / "file" / "run"), Path("job.py"))


def test_a_checkpoint_exists_once_it_is_committed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    partial = run.partial_checkpoint(3)
    partial.mkdir(parents=True)
    save_file({"0.w": torch.ones(2)}, partial / "model-00001-of-00001.safetensors")
    file = manifest.describe_file(partial / "model-00001-of-00001.safetensors")
    assert not run.checkpoint(3).exists()
    run.commit_checkpoint(made := Manifest(3, 1, LayerNames.numbered(1), (file,)))
    assert not partial.exists()
    assert Manifest.read(run.checkpoint(3) / "manifest.json") == made
    index = json.loads((run.checkpoint(3) / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 8}, "weight_map": {"0.w": file.name}}


def saved(run: RunDir, losses: dict[int, float | str | None]) -> list[int]:
    """Complete a checkpoint for each loss, keep two, and return the steps of those that stay."""
    for step, loss in losses.items():
        run.checkpoint(step).mkdir(parents=True)
        row = None if loss is None or isinstance(loss, str) else {"step": step, "loss": loss}
        made = Manifest(
            step,
            1,
            LayerNames.numbered(1),
            (CheckpointFile("state-00001-of-00001.json", 1, 1),),
            evaluation=row,
        )
        atomic_file.write_json(run.checkpoint(step) / "manifest.json", made.to_json())
        if isinstance(loss, str):
            (run.checkpoint(step) / "manifest.json").write_text(loss)
    run.prune_checkpoints(2, Criterion("loss"))
    return [int(path.name.removeprefix("step-")) for path in run.checkpoint_paths()]


@pytest.mark.parametrize(
    ("losses", "stay"),
    [
        ({}, []),
        ({1: 1.0, 2: 2.0}, [1, 2]),
        ({1: None, 2: None, 3: None}, [2, 3]),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0, 5: None}, [2, 4, 5]),
        ({1: 3.0, 2: 2.0, 3: 1.0}, [2, 3]),
        ({1: 1.0, 2: 1.0, 3: 2.0, 4: 2.0}, [1, 3, 4]),  # of equal ones, the first
        ({1: math.nan, 2: -math.inf, 3: 7.0, 4: None, 5: math.nan}, [3, 4, 5]),
        ({1: "damaged", 2: 7.0, 3: "", 4: None, 5: None}, [2, 4, 5]),
        ({99_999_999: 1.0, 100_000_000: 2.0, 100_000_001: 3.0}, [99_999_999, *_LATE]),
        ({99_999_999: 3.0, 100_000_000: 2.0, 100_000_001: 1.0}, _LATE),
    ],
)
def test_the_newest_and_the_best_checkpoints_stay(
    tmp_path: Path, losses: dict[int, float | str | None], stay: list[int]
) -> None:
    assert saved(RunDir(tmp_path), losses) == stay
    assert {path.name for path in tmp_path.glob("checkpoints/*")} == {
        RunDir(tmp_path).checkpoint(step).name for step in stay
    }


def test_the_best_checkpoint_is_removed_when_there_is_a_better_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert saved(run, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}) == [1, 3, 4]
    assert saved(run, {5: 0.5}) == [4, 5]


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"x", b'{"0.w": 3}', b'{"0.w": {}}', b'{"0.w": {"data_offsets": [1]}}']
)
def test_invalid_weights_complete_no_checkpoint(tmp_path: Path, header: bytes) -> None:
    run = RunDir(tmp_path)
    partial = run.partial_checkpoint(3)
    partial.mkdir(parents=True)
    path = partial / "model-00001-of-00001.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=f"{path} is not what a worker writes"):
        run.commit_checkpoint(
            Manifest(3, 1, LayerNames.numbered(1), (manifest.describe_file(path),))
        )
    assert not run.checkpoint(3).exists()


def test_a_json_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    atomic_file.write_json(path, {"a": [1]})
    with pytest.raises(TypeError):
        atomic_file.write_json(path, {"b": object()})
    assert json.loads(path.read_text()) == {"a": [1]}
    atomic_file.write_json(path, 2)
    assert path.read_text() == "2\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.parametrize("mode", ["ab", "wb", "a+b"])
def test_a_pipe_in_place_of_a_file_to_write_is_an_error(tmp_path: Path, mode: str) -> None:
    """It may be in the directory of a run that is resumed; nothing would read it."""
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match=r"it is not a regular file|No such device or address"):
        open_file(tmp_path / "log", mode)


def test_the_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run_record.read_summary(run) == {}
    verdict = Verdict("failed", 1, 4, 1.5, (1, 2), 0.25, "lost")
    run_record.write_summary(run, verdict, 2)
    assert run_record.read_summary(run)["loss"] is None
    assert not {"best_evaluation", "best"} & run_record.read_summary(run).keys()
    run.metrics.write_text('{"step": 3, "loss": 2.0}\n{"step": 4, "loss": 1.0}\n')
    run.evaluation.write_text('{"step": 2, "loss": 3.0, "x": 1}\n{"step": 4, "loss": 4.0}\n')
    run.checkpoint(4).mkdir(parents=True)
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
