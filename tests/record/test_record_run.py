"""What a run records of itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.record import run
from pipeworker.record.run import Record
from pipeworker.record.rundir import RunDir

PROCESS = {"host": "here", "pid": 4}


def options(folder: Path, **changed: Any) -> dict[str, Any]:
    fields = {"job_file": str(folder / "net.py"), "stages": 2, "seed": 3, "arguments": ["x"]}
    return {**fields, **changed}


@pytest.fixture
def begun(tmp_path: Path) -> RunDir:
    """A run that has just begun."""
    (tmp_path / "net.py").write_bytes(b"first = 1\r\n\xff")
    made = RunDir(tmp_path / "run")
    made.path.mkdir()
    run.write(made, options(tmp_path), PROCESS)
    return made


def content(begun: RunDir) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(begun.run.read_text())
    return found


def test_the_beginning(begun: RunDir) -> None:
    job = begun.path / "job.py"
    assert job.read_bytes() == b"first = 1\r\n\xff"
    assert content(begun) == {
        "version": 1,
        **PROCESS,
        "job": "job.py",
        "job_sha256": hashlib.sha256(job.read_bytes()).hexdigest(),
        "arguments": ["x"],
        "seed": 3,
        "options": options(begun.path.parent),
        "resumed": [],
    }
    assert {path.name for path in begun.path.iterdir()} == {"run.json", "job.py"}
    assert Record.read(begun).options == options(begun.path.parent)


def test_a_script_that_is_no_file_has_no_copy(tmp_path: Path) -> None:
    made = RunDir(tmp_path)
    run.write(made, options(tmp_path, job_file="script"), PROCESS)
    found = content(made)
    assert (found["job"], found["job_sha256"]) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert Record.read(made).go_on(options(tmp_path, job_file="script"), PROCESS, 1) == ""


def test_each_time_it_goes_on_is_added_with_what_has_changed(begun: RunDir) -> None:
    folder, first = begun.path.parent, content(begun)
    assert Record.read(begun).go_on(options(folder, stages=4), {**PROCESS, "pid": 5}, 10) == ""
    assert Record.read(begun).options == options(folder, stages=4)
    changed = options(folder, stages=4, seed=8)
    assert Record.read(begun).go_on(changed, {**PROCESS, "pid": 6}, 20) == ""
    record = Record.read(begun)
    assert record.options == changed
    assert (record.last["pid"], record.last["step"]) == (6, 20)
    found = content(begun)
    added = [(e["step"], e["pid"], e["options"], e["job"]) for e in found.pop("resumed")]
    assert added == [(10, 5, {"stages": 4}, "job.py"), (20, 6, {"seed": 8}, "job.py")]
    assert first == {**found, "resumed": []}


def test_a_job_file_that_has_changed_is_kept_beside_the_others(begun: RunDir) -> None:
    folder = begun.path.parent
    for text, copy in (
        *(("first = 2", "job-1.py"), ("first = 2", ""), ("first = 3", "job-3.py")),
        ("first = 2", "job-4.py"),
    ):
        (folder / "net.py").write_text(text)
        assert Record.read(begun).go_on(options(folder), PROCESS, 1) == copy
    assert [entry["job"] for entry in content(begun)["resumed"]] == [
        *("job-1.py", "job-1.py", "job-3.py", "job-4.py"),
    ]
    kept = {path.name: path.read_bytes() for path in begun.path.glob("job*.py")}
    assert kept == {
        "job.py": b"first = 1\r\n\xff",
        "job-1.py": b"first = 2",
        "job-3.py": b"first = 3",
        "job-4.py": b"first = 2",
    }


def test_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match=f"{path} is not the directory of a run: no run.json"):
            Record.read(RunDir(path))
    (tmp_path / "run.json").mkdir()
    with pytest.raises(UsageError, match=r"cannot read .*run\.json: Is a directory"):
        Record.read(RunDir(tmp_path))


NONE = "it is not the record of a run"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, NONE) for text in ("", "[]", "3", "{", "\udcff", '{"version": 1}')),
        ('{"version": 1, "options": {}}', NONE),
        ('{"version": 1, "options": [[1, 2]], "resumed": []}', NONE),
        ('{"version": 1, "options": {}, "resumed": [3]}', NONE),
        ('{"version": 1, "options": {}, "resumed": "x"}', NONE),
        ('{"version": 1, "options": {}, "resumed": [{"options": null}]}', NONE),
        ("[" * 100_000, NONE),
        ('{"version": 2}', "it is of version 2, this pipeworker reads version 1"),
        ("{}", "it is of version None, this pipeworker reads version 1"),
        ('{"version": true}', "it is of version True, this pipeworker reads version 1"),
    ],
)
def test_a_record_that_is_none(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError) as caught:
        Record.read(RunDir(tmp_path))
    assert str(caught.value) == f"cannot read {path}: {expected}"
