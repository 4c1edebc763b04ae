"""From where a run goes on, and what is left of what came after."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pipeworker.errors import UsageError
from pipeworker.record import resume
from pipeworker.record.manifest import NAME, Manifest, file_names
from pipeworker.record.resume import Found
from pipeworker.record.rundir import RunDir
from support.checkpoints import complete


def flip(path: Path) -> None:
    """One bit, in the middle."""
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
    **{f"{name} flipped": (name, flip, "its checksum is another one") for name in FILES},
    **{f"{name} truncated": (name, truncate, " bytes, not ") for name in FILES},
    **{f"{name} missing": (name, Path.unlink, " is missing") for name in FILES},
    "a folder": (FILES[0], make_folder, "it is not a file"),
    "manifest missing": (NAME, Path.unlink, "No such file or directory"),
    "manifest truncated": (NAME, truncate, "it is not the manifest of a checkpoint"),
    "version": (NAME, lambda path: rewrite(path, version=99), "it is of version 99"),
    "another step": (NAME, lambda path: rewrite(path, step=2, crc32=None), "its manifest is of"),
    "manifest flipped": (NAME, lambda path: rewrite(path, step=2), "its checksum is another one"),
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


def test_the_newest_checkpoint_is_taken(run: RunDir) -> None:
    assert resume.newest(run) == Found()
    for step in (99_999_999, 100_000_000, 7):
        complete(run, step)
    run.partial_checkpoint(100_000_001).mkdir()
    (run.checkpoints / "step-x").mkdir()
    assert resume.newest(run) == Found(run.checkpoint(100_000_000), 100_000_000)


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_damaged_is_named_and_the_last_good_one_taken(run: RunDir, kind: str) -> None:
    good, late = complete(run, 1), complete(run, 3)
    damage(late, kind)
    before = tree(run.path)
    found = resume.newest(run)
    assert (found.path, found.step) == (good, 1)
    ((path, why),) = found.damaged.items()
    assert path == late
    assert str(late) in why
    assert DAMAGES[kind][2] in why
    assert tree(run.path) == before


def test_no_bit_of_a_manifest_may_be_another_one(run: RunDir) -> None:
    """But those of the checksum's own name."""
    scaler, row = {"scale": 65536.0, "good_steps": 7}, {"step": 1, "loss": 0.25}
    ties = (("0.weight", "2.weight"),)
    path = complete(run, 1, ties=ties, scaler=scaler, evaluation=row) / NAME
    whole, data = Manifest.read(path), path.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with suppress(UsageError):
            assert Manifest.read(path) == whole


def test_each_that_is_damaged_is_named(run: RunDir) -> None:
    for step, kind in enumerate(DAMAGES, 1):
        damage(complete(run, step), kind)
    with pytest.raises(UsageError) as caught:
        resume.newest(run)
    first, *lines = str(caught.value).splitlines()
    assert first == f"no checkpoint in {run.checkpoints} is whole:"
    assert len(lines) == len(DAMAGES)
    for step, line in zip(range(len(lines), 0, -1), lines, strict=True):
        assert line.startswith(f"  step-{step:08}: ")
        assert [*DAMAGES.values()][step - 1][2] in line
    complete(run, 100)
    assert resume.newest(run) == Found(run.checkpoint(100), 100)  # nobody looks further back


ROWS = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("rows", "step", "left"),
    [
        (ROWS, 2, ROWS[:2]),
        (ROWS, 4, ROWS),
        (ROWS, 9, ROWS),
        (ROWS, 0, []),
        ([], 2, []),
        ([*ROWS[:2], ROWS[2][:9]], 2, ROWS[:2]),
        ([*ROWS[:2], ROWS[2][:9]], 3, ROWS[:2]),
        ([*ROWS[:2], ROWS[1][:-1]], 2, ROWS[:2]),  # it may be half of a longer number
        ([ROWS[0], "\0\0\n", "[]\n", '{"step": "1"}\n', "\udcff\n", ROWS[1]], 2, ROWS[:2]),
    ],
)
def test_rows_of_steps_that_are_run_again_go(
    tmp_path: Path, rows: list[str], step: int, left: list[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(rows), errors="surrogateescape")
    before = path.stat().st_ino
    resume.cut(path, step)
    assert path.read_text() == "".join(left)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert (path.stat().st_ino == before) is (rows == left)


def test_a_file_that_cannot_be_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(ROWS))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        resume.cut(path, 2)
    assert path.read_text() == "".join(ROWS)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_directory_is_as_it_was_at_the_checkpoint(run: RunDir) -> None:
    for step in (2, 3, 4):
        complete(run, step)
    damage(run.checkpoint(3))
    damage(run.checkpoint(4))
    earlier = run.checkpoints / "damaged-step-00000004"
    for name in (".step-00000003.partial", ".step-00000001.gone", earlier.name):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "file").touch()
    for path in (run.metrics, run.evaluation):
        path.write_text("".join(ROWS))
    run.summary.write_text("{}")
    run.plan.write_text("{}")
    resume.prepare(run, resume.newest(run))
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        *("damaged-step-00000003", "damaged-step-00000004", "damaged-step-00000004-2"),
        "step-00000002",
    ]
    assert (earlier / "file").exists()
    assert (run.checkpoints / "damaged-step-00000004-2" / NAME).exists()
    assert run.metrics.read_text() == run.evaluation.read_text() == "".join(ROWS[:2])
    assert not run.summary.exists()
    assert run.plan.exists()
    before = tree(run.path)
    resume.prepare(run, resume.newest(run))  # as when it was begun and ended before a checkpoint
    assert tree(run.path) == before


def test_without_a_checkpoint_nothing_is_left(run: RunDir) -> None:
    run.path.mkdir()
    run.metrics.write_text("".join(ROWS))
    resume.prepare(run, resume.newest(run))
    assert tree(run.path) == {"metrics.jsonl": b""}
