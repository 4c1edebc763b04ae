"""The checkpoint from which a run resumes, and the removal of later records."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint.manifest import MANIFEST, Manifest, file_names
from pipeworker.record.rundir import RunDir
from pipeworker.runs import resume
from pipeworker.runs.resume import ResumePoint
from support.in_process.checkpoints import complete
from support.slow import slow


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


Damage = Callable[[Path], None]
FILES = file_names(0, 1)
DAMAGES: dict[str, tuple[str, Damage, str]] = {
    **{f"{name} flipped": (name, flip, "its checksum does not match") for name in FILES},
    **{f"{name} truncated": (name, truncate, " bytes, not ") for name in FILES},
    **{f"{name} missing": (name, Path.unlink, " is missing") for name in FILES},
    "a folder": (FILES[0], make_folder, "it is not a file"),
    "manifest missing": (MANIFEST, Path.unlink, "No such file or directory"),
    "manifest truncated": (MANIFEST, truncate, "it is not the manifest of a checkpoint"),
    "version": (MANIFEST, lambda path: rewrite(path, version=99), "it has version 99"),
    "another step": (
        MANIFEST,
        lambda path: rewrite(path, step=2, crc32=None),
        "its manifest is of",
    ),
    "manifest flipped": (
        MANIFEST,
        lambda path: rewrite(path, step=2),
        "its checksum does not match",
    ),
}


def damage(checkpoint: Path, kind: str = "version") -> None:
    name, change, _ = DAMAGES[kind]
    change(checkpoint / name)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_a_run_resumes_from_its_newest_checkpoint(run: RunDir) -> None:
    assert resume.find_resume_point(run) == ResumePoint()
    for step in (99_999_999, 100_000_000, 7):
        complete(run, step)
    run.checkpoints.partial(100_000_001).mkdir()
    (run.checkpoints.path / "step-x").mkdir()
    assert resume.find_resume_point(run) == ResumePoint(
        run.checkpoints.at(100_000_000), 100_000_000
    )


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_checkpoints_are_reported_and_skipped(run: RunDir, kind: str) -> None:
    good, late = complete(run, 1), complete(run, 3)
    damage(late, kind)
    before = tree(run.path)
    found = resume.find_resume_point(run)
    assert (found.path, found.step) == (good, 1)
    ((path, why),) = found.damaged.items()
    assert path == late
    assert str(late) in why
    assert DAMAGES[kind][2] in why
    assert tree(run.path) == before


@pytest.mark.parametrize("name", ["read", "check_files"])
def test_a_lack_of_descriptors_is_no_damage(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Else the run would continue from an older checkpoint."""
    complete(run, 1)
    late = complete(run, 3)
    real, limits = getattr(Manifest, name), resource.getrlimit(resource.RLIMIT_NOFILE)

    def lack(*args: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            return real(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            monkeypatch.undo()  # the older one could be read

    monkeypatch.setattr(Manifest, name, lack)
    with pytest.raises(UsageError, match=f"{late}.*: Too many open files"):
        resume.find_resume_point(run)


@slow
def test_a_flipped_bit_of_a_manifest_is_detected(run: RunDir) -> None:
    """Only bits of the name of the checksum's own field may flip unnoticed."""
    scaler, row = {"scale": 65536.0, "good_steps": 7}, {"step": 1, "loss": 0.25}
    ties = (("0.weight", "2.weight"),)
    path = complete(run, 1, ties=ties, scaler=scaler, evaluation=row) / MANIFEST
    whole, data = Manifest.read(path), path.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with suppress(UsageError):
            assert Manifest.read(path) == whole


def test_every_damaged_checkpoint_is_reported(run: RunDir) -> None:
    for step, kind in enumerate(DAMAGES, 1):
        damage(complete(run, step), kind)
    with pytest.raises(UsageError) as caught:
        resume.find_resume_point(run)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{run.checkpoints.path}: every checkpoint is damaged; restore one:"
    assert len(lines) == len(DAMAGES)
    for step, line in zip(range(len(lines), 0, -1), lines, strict=True):
        assert line.startswith(f"  step-{step:08}: ")
        assert [*DAMAGES.values()][step - 1][2] in line
    complete(run, 100)
    assert resume.find_resume_point(run) == ResumePoint(
        run.checkpoints.at(100), 100
    )  # older ones are not read


ROWS = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("rows", "step", "remaining"),
    [
        (ROWS, 2, ROWS[:2]),
        (ROWS, 4, ROWS),
        (ROWS, 9, ROWS),
        (ROWS, 0, []),
        ([], 2, []),
        ([*ROWS[:2], ROWS[2][:9]], 2, ROWS[:2]),
        ([*ROWS[:2], ROWS[2][:9]], 3, ROWS[:2]),
        ([*ROWS[:2], ROWS[1][:-1]], 2, ROWS[:2]),  # the number may have been cut off
        ([ROWS[0], "\0\0\n", "[]\n", '{"step": "1"}\n', "\udcff\n", ROWS[1]], 2, ROWS[:2]),
    ],
)
def test_rows_of_later_steps_are_removed(
    tmp_path: Path, rows: list[str], step: int, remaining: list[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(rows), errors="surrogateescape")
    before = path.stat().st_ino
    resume.truncate_rows(path, step)
    assert path.read_text() == "".join(remaining)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (path.stat().st_ino == before) is (rows == remaining)


def test_a_file_that_cannot_be_rewritten_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(ROWS))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        resume.truncate_rows(path, 2)
    assert path.read_text() == "".join(ROWS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_directory_is_rolled_back_to_the_checkpoint(run: RunDir) -> None:
    for step in (2, 3, 4):
        complete(run, step)
    damage(run.checkpoints.at(3))
    damage(run.checkpoints.at(4))
    earlier = run.checkpoints.path / "damaged-step-00000004"
    for name in (".step-00000003.partial", ".step-00000001.gone", earlier.name):
        (run.checkpoints.path / name).mkdir()
        (run.checkpoints.path / name / "file").touch()
    run.profiles.mkdir()
    for folder in (run.path, run.profiles):
        (folder / ".0123456789abcdef.partial").touch()  # of a killed writer
    for path in (run.metrics, run.evaluation):
        path.write_text("".join(ROWS))
    run.summary.write_text("{}")
    run.plan.write_text("{}")
    resume.roll_back(run, resume.find_resume_point(run))
    assert sorted(path.name for path in run.checkpoints.path.iterdir()) == [
        *("damaged-step-00000003", "damaged-step-00000004", "damaged-step-00000004-2"),
        "step-00000002",
    ]
    assert not [*run.path.rglob(".*.partial")]
    assert (earlier / "file").exists()
    assert (run.checkpoints.path / "damaged-step-00000004-2" / MANIFEST).exists()
    assert run.metrics.read_text() == run.evaluation.read_text() == "".join(ROWS[:2])
    assert not run.summary.exists()
    assert run.plan.exists()
    before = tree(run.path)
    resume.roll_back(
        run, resume.find_resume_point(run)
    )  # the run may end before its next checkpoint
    assert tree(run.path) == before


def test_without_a_checkpoint_all_rows_are_removed(run: RunDir) -> None:
    run.path.mkdir()
    run.metrics.write_text("".join(ROWS))
    resume.roll_back(run, resume.find_resume_point(run))
    assert tree(run.path) == {"metrics.jsonl": b""}
