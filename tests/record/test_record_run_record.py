"""The record of a run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.record import run_record
from pipeworker.record.run_record import RunRecord
from pipeworker.record.rundir import RunDir

PROCESS = {"host": "here", "pid": 4}


def options(folder: Path, **changed: Any) -> dict[str, Any]:
    fields = {"job_file": str(folder / "net.py"), "stages": 2, "seed": 3, "arguments": ["x"]}
    return {**fields, **changed}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """Write the record of a run that begins."""
    (tmp_path / "net.py").write_bytes(b"first = 1\r\n\xff")
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    run_record.write(made, options(tmp_path), PROCESS)
    return made


def content(run_dir: RunDir) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_dir.run.read_text())
    return found


def test_the_record_of_a_run_that_begins(run_dir: RunDir) -> None:
    job = run_dir.path / "job.py"
    assert job.read_bytes() == b"first = 1\r\n\xff"
    assert content(run_dir) == {
        "version": 2,
        **PROCESS,
        "job": "job.py",
        "job_sha256": hashlib.sha256(job.read_bytes()).hexdigest(),
        "arguments": ["x"],
        "seed": 3,
        "options": options(run_dir.path.parent),
        "resumed": [],
    }
    assert {path.name for path in run_dir.path.iterdir()} == {"run.json", "job.py"}
    assert RunRecord.read(run_dir).options == options(run_dir.path.parent)


def test_a_job_that_is_not_a_file_is_not_copied(tmp_path: Path) -> None:
    made = RunDir(tmp_path)
    run_record.write(made, options(tmp_path, job_file="script"), PROCESS)
    found = content(made)
    assert (found["job"], found["job_sha256"]) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert RunRecord.read(made).add_resume(options(tmp_path, job_file="script"), PROCESS, 1) == ""


def test_each_resume_is_added_with_the_changed_options(run_dir: RunDir) -> None:
    folder, first = run_dir.path.parent, content(run_dir)
    assert (
        RunRecord.read(run_dir).add_resume(options(folder, stages=4), {**PROCESS, "pid": 5}, 10)
        == ""
    )
    assert RunRecord.read(run_dir).options == options(folder, stages=4)
    changed = options(folder, stages=4, seed=8)
    assert RunRecord.read(run_dir).add_resume(changed, {**PROCESS, "pid": 6}, 20) == ""
    record = RunRecord.read(run_dir)
    assert record.options == changed
    assert (record.last["pid"], record.last["step"]) == (6, 20)
    found = content(run_dir)
    added = [(e["step"], e["pid"], e["options"], e["job"]) for e in found.pop("resumed")]
    assert added == [(10, 5, {"stages": 4}, "job.py"), (20, 6, {"seed": 8}, "job.py")]
    assert first == {**found, "resumed": []}


def test_a_changed_job_file_is_copied_beside_the_others(run_dir: RunDir) -> None:
    folder = run_dir.path.parent
    for text, copy in (
        *(("first = 2", "job-1.py"), ("first = 2", ""), ("first = 3", "job-3.py")),
        ("first = 2", "job-4.py"),
    ):
        (folder / "net.py").write_text(text)
        assert RunRecord.read(run_dir).add_resume(options(folder), PROCESS, 1) == copy
    assert [entry["job"] for entry in content(run_dir)["resumed"]] == [
        *("job-1.py", "job-1.py", "job-3.py", "job-4.py"),
    ]
    kept = {path.name: path.read_bytes() for path in run_dir.path.glob("job*.py")}
    assert kept == {
        "job.py": b"first = 1\r\n\xff",
        "job-1.py": b"first = 2",
        "job-3.py": b"first = 3",
        "job-4.py": b"first = 2",
    }


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.py").touch()
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "job.py"):
        with pytest.raises(UsageError, match=f"{path}: not the directory of a run; give one"):
            RunRecord.read(RunDir(path))
    (tmp_path / "run.json").mkdir()
    with pytest.raises(UsageError, match=r"run\.json: cannot be read: Is a directory"):
        RunRecord.read(RunDir(tmp_path))


FIRST = """
{"version": 1, "pid": 7, "job": null, "job_sha256": null, "arguments": [], "seed": 0,
 "options": {"job_file": "/jobs/net.py", "stages": 3, "microbatches": 12, "arguments": [],
  "steps": 30, "epochs": null, "schedule": "gpipe", "recompute": "auto", "balance": null,
  "clip_grad_norm": null, "clip_grad_value": null, "precision": "fp32", "accumulate": 1,
  "evaluate_every": null, "deferred_batch_norm": false, "seed": 0, "threads": 1,
  "device": "auto", "backend": "auto", "interface": null, "stop_on_nan": false,
  "worker_timeout": 60.0, "checkpoint_every": null, "checkpoint_busy": "skip", "keep": 2,
  "snapshot_every": null, "restarts": 5, "elastic": 2, "init_from": "/jobs/w.safetensors",
  "init_partial": true, "own_loop": false, "replicas": 2, "shard_optimizer": false,
  "read_data": "once", "csv": false, "tensorboard": false, "compile": false,
  "deterministic": false},
 "resumed": [{"step": 10, "pid": 8, "options": {"restarts": 7, "read_data": "every"}}]}
"""
"""A ``run.json`` of version 1, resumed once, as the last pipeworker of that version wrote it."""


def test_a_record_of_version_1_is_read_under_the_present_names(tmp_path: Path) -> None:
    made = RunDir(tmp_path)
    made.run.write_text(FIRST)
    read = Options.of(RunRecord.read(made).options)
    assert (read.max_restarts, read.min_stages, read.init_strict) == (7, 2, False)
    assert (read.data_reader, read.replicas, read.steps) == ("every", 2, 30)
    assert read.checkpoint_every == "30m"
    changed = {**RunRecord.read(made).options, "data_reader": "first", "min_stages": 1}
    RunRecord.read(made).add_resume(changed, PROCESS, 20)
    found = content(made)
    assert found["version"] == 2
    assert found["options"] == json.loads(FIRST)["options"]  # what was written stays
    assert found["resumed"][-1]["options"] == {"data_reader": "first", "min_stages": 1}
    assert RunRecord.read(made).options == changed


WHAT, REMEDY = "it is not the record of a run", "; give another run"
VERSIONS = ", and this pipeworker reads version 1 or 2; use the pipeworker that wrote it"
NONE = f"{WHAT}{REMEDY}"
RUN = '{"version": 1, "options": %s}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, NONE) for text in ("", "{", "\udcff", "[" * 100_000)),
        ('{"version": 1, "x": %s}' % ("[" * 40 + "]" * 40), NONE),
        ('{"version": 1, "x": %s}' % ("9" * 101), NONE),
        *(
            (text, f"{WHAT} ({wrong}){REMEDY}")
            for text, wrong in (
                ("[]", "Expected `object`, got `array`"),
                ('{"version": 1}', "Object missing required field `options`"),
                ('{"version": 1, "options": {}}', "Object missing required field `resumed`"),
                (
                    RUN % '[[1, 2]], "resumed": []',
                    "Expected `object`, got `array` - at `$.options`",
                ),
                (RUN % '{}, "resumed": [3]', "Expected `object`, got `int` - at `$.resumed[...]`"),
                (RUN % '{}, "resumed": "x"', "Expected `array`, got `str` - at `$.resumed`"),
                (
                    RUN % '{}, "resumed": [{"options": null}]',
                    "Expected `object`, got `null` - at `$.resumed[...].options`",
                ),
                (
                    RUN % '{}, "resumed": [], "host": {}',
                    "Expected `str | null`, got `object` - at `$.host`",
                ),
            )
        ),
        (
            RUN % '{"epochs": {}}, "resumed": []',
            f"--epochs {{}}: must be of type int, not object{REMEDY}",
        ),
        ('{"version": 3}', f"it has version 3{VERSIONS}"),
        ("{}", NONE),
        ('{"version": true}', f"it has version True{VERSIONS}"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as caught:
        RunRecord.read(RunDir(tmp_path))
    assert str(caught.value).replace("[0]", "[...]") == f"{path}: cannot be read: {expected}"
