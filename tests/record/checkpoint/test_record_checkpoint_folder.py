"""The checkpoints of a run: complete or not there, and pruned."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeworker.errors import UsageError
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.criterion import Criterion
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint import manifest
from pipeworker.record.checkpoint.folder import held
from pipeworker.record.checkpoint.manifest import Manifest
from pipeworker.record.files import atomic_file
from pipeworker.record.rundir import RunDir
from pipeworker.runs import resume

_LATE = [100_000_000, 100_000_001]


def test_a_checkpoint_exists_once_it_is_committed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    partial = run.checkpoints.partial(3)
    partial.mkdir(parents=True)
    save_file({"0.w": torch.ones(2)}, partial / "model-00001-of-00001.safetensors")
    file = manifest.describe_file(partial / "model-00001-of-00001.safetensors")
    assert not run.checkpoints.at(3).exists()
    run.checkpoints.commit(made := Manifest(3, 1, LayerNames.numbered(1), (file,)))
    assert not partial.exists()
    assert Manifest.read(run.checkpoints.at(3) / "manifest.json") == made
    index = json.loads((run.checkpoints.at(3) / "model.safetensors.index.json").read_text())
    assert index == {"metadata": {"total_size": 8}, "weight_map": {"0.w": file.name}}


STATE = "state-00001-of-00001.json"


def saved_again(run: RunDir, text: str) -> None:
    """Save a checkpoint of step 7, which may exist already."""
    partial = run.checkpoints.partial(7)
    partial.mkdir(parents=True)
    (partial / STATE).write_text(text)
    file = manifest.describe_file(partial / STATE)
    run.checkpoints.commit(Manifest(7, 1, LayerNames.numbered(1), (file,)))


def test_a_step_that_is_saved_again_has_the_new_checkpoint(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    saved_again(run, "one")
    saved_again(run, "two")
    assert [path.name for path in run.checkpoints.path.iterdir()] == ["step-00000007"]
    assert (run.checkpoints.at(7) / STATE).read_text() == "two"


@pytest.mark.parametrize("error", [OSError("no reply"), KeyboardInterrupt()], ids=["fails", "ends"])
def test_a_step_that_is_not_saved_again_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    run = RunDir(tmp_path)
    saved_again(run, "one")
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(type(error)):
        saved_again(run, "two")
    assert run.checkpoints.steps() == ([7] if isinstance(error, OSError) else [])
    assert resume.find_resume_point(run).step == 7
    run.checkpoints.remove_leftovers()
    assert [path.name for path in run.checkpoints.path.iterdir()] == ["step-00000007"]
    assert (run.checkpoints.at(7) / STATE).read_text() == "one"


@pytest.mark.parametrize("resumes", [True, False])
def test_a_replaced_checkpoint_that_was_not_removed_does_not_prevent_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """Another coordinator may continue the job without a resume."""
    run = RunDir(tmp_path)
    saved_again(run, "one")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)  # as of a process that is killed
        saved_again(run, "two")
    assert len([*run.checkpoints.path.iterdir()]) == 2
    if resumes:
        assert resume.find_resume_point(run).step == 7
    else:
        saved_again(run, "two")
    assert [path.name for path in run.checkpoints.path.iterdir()] == ["step-00000007"]
    assert (run.checkpoints.at(7) / STATE).read_text() == "two"


def test_a_folder_that_cannot_be_read_is_not_one_without_checkpoints(tmp_path: Path) -> None:
    """Else a resume would begin at the first step, and remove all rows."""
    run = RunDir(tmp_path)
    assert run.checkpoints.last_step() == -1
    run.checkpoints.path.symlink_to(run.checkpoints.path)
    with pytest.raises(OSError, match="symbolic links"):
        run.checkpoints.last_step()
    with pytest.raises(UsageError, match=f"{run.checkpoints.path}: .*symbolic links"):
        resume.find_resume_point(run)


def saved(run: RunDir, losses: dict[int, float | str | None]) -> list[int]:
    """Complete a checkpoint for each loss, keep two, and return the steps of those that stay."""
    for step, loss in losses.items():
        run.checkpoints.at(step).mkdir(parents=True)
        row = None if loss is None or isinstance(loss, str) else {"step": step, "loss": loss}
        made = Manifest(
            step,
            1,
            LayerNames.numbered(1),
            (CheckpointFile("state-00001-of-00001.json", 1, 1),),
            evaluation=row,
        )
        atomic_file.write_json(run.checkpoints.at(step) / "manifest.json", made.to_json())
        if isinstance(loss, str):
            (run.checkpoints.at(step) / "manifest.json").write_text(loss)
    run.checkpoints.prune(2, Criterion("loss"))
    return [int(path.name.removeprefix("step-")) for path in run.checkpoints.paths()]


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
        RunDir(tmp_path).checkpoints.at(step).name for step in stay
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
    partial = run.checkpoints.partial(3)
    partial.mkdir(parents=True)
    path = partial / "model-00001-of-00001.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=f"{path} is not what a worker writes"):
        run.checkpoints.commit(
            Manifest(3, 1, LayerNames.numbered(1), (manifest.describe_file(path),))
        )
    assert not run.checkpoints.at(3).exists()


HOLDS = """
import sys
from pathlib import Path
from pipeworker.record.checkpoint.folder import held

with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("used", "criterion", "stay"),
    [
        ("files.bounded_file._open", Criterion("loss"), [1, 2]),
        ("checkpoint.folder.open_file", Criterion("loss", more=True), [2]),
    ],
)
def test_a_lack_of_descriptors_removes_no_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    used: str,
    criterion: Criterion,
    stay: list[int],
) -> None:
    """It says nothing of the best one, nor of whether a process reads one."""
    run = RunDir(tmp_path)
    assert saved(run, {1: 0.1, 2: 0.2}) == [1, 2]

    def lacking(path: Path, *_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(f"pipeworker.record.{used}", lacking)
        with pytest.raises(OSError, match="Too many open files"):
            run.checkpoints.prune(1, criterion)
    assert run.checkpoints.steps() == [1, 2]
    run.checkpoints.prune(1, criterion)
    assert run.checkpoints.steps() == stay


def test_a_checkpoint_that_a_process_reads_is_removed_later(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (7, 8):
        (run.checkpoints.partial(step)).mkdir(parents=True)
        run.checkpoints.commit(Manifest(step, 1, LayerNames.numbered(1), ()))
    reader = [sys.executable, "-c", HOLDS, str(run.checkpoints.at(7))]
    pipe = subprocess.PIPE
    with subprocess.Popen(reader, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        run.checkpoints.prune(1, Criterion("loss"))
        assert run.checkpoints.steps() == [7, 8]
        process.communicate()
    run.checkpoints.prune(1, Criterion("loss"))
    assert run.checkpoints.steps() == [8]
    with (
        pytest.raises(UsageError, match="its run has just removed it"),
        held(run.checkpoints.at(7)),
    ):
        pass
