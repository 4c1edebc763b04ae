"""The run directory: where things are, and that they are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeworker.errors import UsageError
from pipeworker.record import manifest, rundir
from pipeworker.record.manifest import Manifest
from pipeworker.record.rundir import RunDir
from pipeworker.wire.lines import Verdict


def test_where_things_are() -> None:
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
        "logs/stage-2.log",
        "checkpoints/step-00000100",
    ]


def test_the_directory_asked_for_is_made(tmp_path: Path) -> None:
    made = rundir.create(str(tmp_path / "a" / "b"), Path("job.py"))
    assert made.path == (tmp_path / "a" / "b").resolve()
    assert (made.path / "logs").is_dir()


def test_one_that_exists_is_not_touched(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exists already: choose another --run-dir"):
        rundir.create(str(tmp_path), Path("job.py"))
    assert list(tmp_path.iterdir()) == []


def test_the_default_is_new_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20000101-000000")
    names = [rundir.create(None, Path("/jobs/net.py")).path for _ in range(3)]
    stem = tmp_path.resolve() / "runs" / "net-20000101-000000"
    assert names == [stem, Path(f"{stem}-2"), Path(f"{stem}-3")]


def test_one_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot make run directory .*: Not a directory"):
        rundir.create(str(tmp_path / "file" / "run"), Path("job.py"))


def test_a_checkpoint_is_there_once_it_is_committed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    partial = run.partial_checkpoint(3)
    partial.mkdir(parents=True)
    save_file({"0.w": torch.ones(2)}, partial / "model-00001-of-00001.safetensors")
    file = manifest.described(partial / "model-00001-of-00001.safetensors")
    assert not run.checkpoint(3).exists()
    run.commit_checkpoint(made := Manifest(3, 1, ("0",), (file,)))
    assert not partial.exists()
    assert Manifest.read(run.checkpoint(3) / "manifest.json") == made
    index = json.loads((run.checkpoint(3) / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 8}, "weight_map": {"0.w": file.name}}


@pytest.mark.parametrize(
    "header", [b"", b"[]", b"x", b'{"0.w": 3}', b'{"0.w": {}}', b'{"0.w": {"data_offsets": [1]}}']
)
def test_weights_that_no_stage_wrote_complete_no_checkpoint(tmp_path: Path, header: bytes) -> None:
    run = RunDir(tmp_path)
    partial = run.partial_checkpoint(3)
    partial.mkdir(parents=True)
    path = partial / "model-00001-of-00001.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=f"{path} is not what a stage writes"):
        run.commit_checkpoint(Manifest(3, 1, ("0",), (manifest.described(path),)))
    assert not run.checkpoint(3).exists()


def test_a_json_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    rundir.write_json(path, {"a": [1]})
    with pytest.raises(TypeError):
        rundir.write_json(path, {"b": object()})
    assert json.loads(path.read_text()) == {"a": [1]}
    rundir.write_json(path, 2)
    assert path.read_text() == "2\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.json"]


def test_the_summary(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    rundir.write_summary(run, Verdict("failed", 1, 4, 1.5, (1, 2), 0.25, "lost"), 2)
    assert json.loads(run.summary.read_text()) == {
        "status": "failed",
        "steps": 4,
        "stages": 2,
        "restarts": 0,
        "seconds": 1.5,
        "peak_memory_bytes": [1, 2],
        "bubble": 0.25,
        "error": "lost",
    }
