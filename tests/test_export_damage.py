"""``pipeworker export`` of damaged or hostile checkpoints, or to unwritable places.

The result is one message, and no file.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import cli
from pipeworker.errors import UsageError
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.export import export_weights
from pipeworker.record.manifest import Manifest
from support.checkpoints import part, save_worker_files
from support.jobs import Jobs

Done = subprocess.CompletedProcess[str]
PARTS = 2
UNPRIVILEGED = """
import os
import sys
import cli, torch, safetensors.torch, pipeworker.record.export  # while they can be read
if os.geteuid() == 0:
    os.seteuid(65534)
cli.main(sys.argv[1:], prog_name="pipeworker")
"""


class Hostile:
    """An object whose pickle is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("called",))


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of two stages."""
    folder = tmp_path_factory.mktemp("sound") / "checkpoint"
    files: list[CheckpointFile] = []
    for rank in range(PARTS):
        files += save_worker_files(folder, rank, PARTS, [part([nn.Linear(8, 8)], rank)])
    write_manifest(folder, **Manifest(1, PARTS, LayerNames.numbered(2), tuple(files)).to_json())
    return folder


@pytest.fixture
def checkpoint(sound: Path, jobs: Jobs) -> Path:
    """Copy the checkpoint, to be damaged by the test."""
    return Path(shutil.copytree(sound, jobs.folder / "checkpoint"))


def write_manifest(checkpoint: Path, **fields: Any) -> None:
    """Write a manifest without a checksum, so that its fields are examined."""
    fields.pop("crc32", None)
    (checkpoint / "manifest.json").write_text(json.dumps(fields))


def change_manifest(checkpoint: Path, **fields: Any) -> None:
    found = json.loads((checkpoint / "manifest.json").read_text())
    write_manifest(checkpoint, **{**found, **fields})


def replace(path: Path, data: bytes) -> None:
    """Replace a file of a checkpoint, and describe the new one in the manifest."""
    path.write_bytes(data)
    found = json.loads((path.parent / "manifest.json").read_text())
    found["files"][path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    write_manifest(path.parent, **found)


def everything(folder: Path) -> dict[Path, bytes | None]:
    """Return all paths below a folder with the contents of files."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def here(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Return a function that runs a command in this process: many cases need no process each."""
    monkeypatch.chdir(jobs.folder)

    def run(*words: str) -> Done:
        done = CliRunner().invoke(cli.main, words)
        return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)

    return run


def assert_refused(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(text in line for text in expected), line
    assert len(line) < 500
    assert line.isprintable()


def test_the_undamaged_checkpoint_is_exported(jobs: Jobs, checkpoint: Path) -> None:
    for name in ("out.pt", "out.safetensors"):
        done = jobs.pipeworker("export", "checkpoint", name)
        assert (done.returncode, done.stdout) == (0, f"{name}: 4 tensors\n"), done.stderr


# The first file of weights.


def of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with a header that may be invalid."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def named(*names: str, **more: Any) -> bytes:
    """Return a file of weights with one element each."""
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate(names)
    }
    metadata = {"names": json.dumps(names), "complex128": "[]", **more}
    return of({"__metadata__": metadata, **entries}, bytes(4 * len(names)))


def weight(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}
    return of({"__metadata__": {"names": '["0.w"]'}, "0.w": entry}, bytes(4))


DAMAGED = "it is damaged ("
PARTS_OF: dict[str, tuple[bytes, str]] = {
    "empty": (b"", DAMAGED),
    "text": (b"hello", DAMAGED),
    "zeros": (bytes(1000), DAMAGED),
    "a hostile pickle": (pickle.dumps(Hostile()), DAMAGED),
    "a header of no length": (of({}, length=1 << 62), DAMAGED),
    "a header that is none": (of(b"[1, 2]"), DAMAGED),
    "a header too deep": (of(b"[" * 100_000), DAMAGED),
    "control characters": (of(b"\x1b[31m"), DAMAGED),
    "no end": (weight(data_offsets=[0, 400]), DAMAGED),
    "a negative place": (weight(data_offsets=[-4, 0]), DAMAGED),
    "a shape too large": (weight(shape=[1 << 62, 1 << 62]), DAMAGED),
    "another shape": (weight(shape=[2]), DAMAGED),
    "no dtype": (weight(dtype="os.system"), DAMAGED),
    "no names": (of({"0.w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x"), DAMAGED),
    "other names": (named("0.w", names='["0.v"]'), DAMAGED),
    "names that are none": (named("0.w", names="[[]]"), DAMAGED),
    "names in words": (named("0.w", names="os"), DAMAGED),
    "names too deep": (named("0.w", names="[" * 100_000), DAMAGED),
    "numbers that are not complex": (named("0.w", complex128='["0.w"]'), DAMAGED),
    "complex, and not there": (named("0.w", complex128='["0.v"]'), DAMAGED),
    "no layer": (named("weight"), "'weight' is not a weight of a layer"),
    "a path": (named("../../x"), "'../../x' is not a weight"),
    "an absolute path": (named("/x/0.w"), "'/x/0.w' is not a weight"),
    "a negative layer": (named("-1.w"), "'-1.w' is not a weight"),
    "the other part": (named("1.weight"), "is in another part as well"),
}


@pytest.mark.parametrize("name", PARTS_OF)
def test_an_invalid_file_of_weights_is_refused(
    jobs: Jobs, here: Callable[..., Done], checkpoint: Path, name: str
) -> None:
    data, expected = PARTS_OF[name]
    replace(checkpoint / FIRST, data)
    before = everything(jobs.folder)
    path = SECOND if name == "the other part" else FIRST
    done = here("export", "checkpoint", "out.pt")
    assert_refused(done, f"checkpoint/{path}: cannot be read: ", expected)
    assert everything(jobs.folder) == before


@pytest.mark.parametrize("to", [0, 4, 300, -1])
def test_a_truncated_file_of_weights_is_refused(
    jobs: Jobs, here: Callable[..., Done], checkpoint: Path, to: int
) -> None:
    path = checkpoint / FIRST
    whole = path.read_bytes()
    path.write_bytes(whole[:to])
    has = f"it has {len(whole[:to])} bytes, not {len(whole)}"
    assert_refused(
        here("export", "checkpoint", "out.pt"), f"checkpoint/{FIRST}: cannot be read: ", has
    )


def test_any_flipped_byte_is_refused_or_changes_a_weight(checkpoint: Path, tmp_path: Path) -> None:
    """The manifest matches the flipped file: changed weights are exported, the rest is refused."""
    path = checkpoint / FIRST
    whole = path.read_bytes()
    errors = []
    for at in range(0, len(whole), 7):
        replace(path, whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        try:
            export_weights(checkpoint, tmp_path / "out.pt")
        except UsageError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert [text for text in errors if not text.startswith(f"{path}: cannot be read: ")] == []


# The manifest.


FILES: list[Any] = [
    *(0, {}, {"x": {"bytes": 1, "crc32": 1}}, {FIRST: {}}, {FIRST: 3}),
    {f"../{FIRST}": {"bytes": 1, "crc32": 1}},
    {FIRST: {"bytes": -1, "crc32": 1}},
    {FIRST: {"bytes": 1, "crc32": "1"}},
]
EVALUATIONS: list[Any] = [
    *(1, [], {"loss": "1"}, {"loss": None}, {"loss": True}, {"loss": 1 << 70})
]
MANIFESTS: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    **{
        f"{key} {shown}": ({key: value}, f"{key} is {shown}")
        for key in ("step", "stages")
        for value, shown in (
            *((-1, "-1"), ("../x", "'../x'"), (2.0, "2.0"), (True, "True"), (None, "None")),
            (1 << 70, str(1 << 70)),
        )
    },
    "a later version": ({"version": 99}, "it has version 99, and this pipeworker"),
    "no version": ({"version": None}, "it has version None, and this pipeworker"),
    "a version in words": ({"version": "x" * 9999}, "it has version 'xxx"),
    **{
        name: (text, "it is not the manifest of a checkpoint")
        for name, text in {
            "empty": b"",
            "text": b"hello",
            "a list": b"[1, 2]",
            "NaN": b"NaN",
            "a number too long": b'{"step": ' + b"9" * 5000 + b"}",
            "not UTF-8": b'{"step": 2, "x": "\xff"}',
            "truncated": b'{"version": 1, "step"',
            "deep": b"[" * 200_000,
            "huge": b'{"step": 2, "x": "' + b"x" * (17 << 20) + b'"}',
        }.items()
    },
    **{f"files {json.dumps(files)[:40]}": ({"files": files}, "files is ") for files in FILES},
    **{
        f"layers {json.dumps(layers)}": ({"layers": layers}, "layers is ")
        for layers in ([], "01", ["0", "0"], ["0", 1], ["0..1"])
    },
    **{
        f"ties {json.dumps(ties)}": ({"ties": ties}, expected)
        for ties, expected in (
            *(({}, "ties is {}"), ("0.weight", "ties is '0.weight'"), ([[]], "ties is [[]]")),
            ([["0.weight", 1]], "ties is [['0.weight', 1]]"),
            ([[["0.weight"], "1.weight"]], "ties is "),
            ([["2.weight", "0.weight"]], "no part has '2.weight', a tied weight"),
            ([["0.weight", "../x"]], "no part has '../x', a tied weight"),
        )
    },
    "a scaler": ({"scaler": 1}, "scaler is 1"),
    **{
        f"evaluation {json.dumps(row)}": ({"evaluation": row}, "evaluation is ")
        for row in EVALUATIONS
    },
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_invalid_manifest_is_refused(
    jobs: Jobs, here: Callable[..., Done], checkpoint: Path, name: str
) -> None:
    changed, expected = MANIFESTS[name]
    if isinstance(changed, bytes):
        (checkpoint / "manifest.json").write_bytes(changed)
    else:
        change_manifest(checkpoint, **changed)
    before = everything(jobs.folder)
    done = here("export", "checkpoint", "out.safetensors")
    assert_refused(done, "checkpoint", ": cannot be read: ", expected)
    assert everything(jobs.folder) == before


@pytest.mark.parametrize("name", ["model-99999-of-99999.safetensors", "model-00003-of-00003.json"])
def test_a_manifest_with_missing_files_is_refused(
    jobs: Jobs, here: Callable[..., Done], checkpoint: Path, name: str
) -> None:
    found = json.loads((checkpoint / "manifest.json").read_text())
    change_manifest(checkpoint, files={**found["files"], name: {"bytes": 1, "crc32": 1}})
    assert_refused(here("export", "checkpoint", "out.pt"), f"checkpoint/{name} is missing")
    assert not (jobs.folder / "out.pt").exists()


# Paths that are not files.


def turned_into_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def turned_into_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def turned_into_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "turn", [turned_into_a_folder, turned_into_a_pipe, turned_into_a_loop], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["manifest.json", FIRST])
def test_a_path_that_is_not_a_file_is_refused(
    jobs: Jobs, checkpoint: Path, name: str, turn: Callable[[Path], None]
) -> None:
    turn(checkpoint / name)
    done = jobs.pipeworker("export", "checkpoint", "out.pt")
    expected = {
        "manifest.json": "checkpoint: no complete checkpoint is there; give the directory",
        FIRST: f"checkpoint/{FIRST}",
    }
    assert_refused(done, expected[name])
    assert not (jobs.folder / "out.pt").exists()


def test_a_name_that_is_too_long_is_refused(jobs: Jobs, checkpoint: Path) -> None:
    name = "x" * 300
    assert_refused(jobs.pipeworker("export", name, "out.pt"), "cannot be read: File name too long")
    done = jobs.pipeworker("export", "checkpoint", f"{name}.pt")
    assert_refused(done, "cannot write x", "File name too long")
    longest = "x" * 252 + ".pt"
    assert jobs.pipeworker("export", "checkpoint", longest).returncode == 0


@pytest.mark.parametrize("name", [SECOND, "manifest.json", "."])
def test_a_file_without_read_permission_is_refused(jobs: Jobs, checkpoint: Path, name: str) -> None:
    jobs.folder.chmod(0o777)
    path = checkpoint / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        done = without_privileges(jobs, "checkpoint", "out.pt")
        assert_refused(done, path.name, ": cannot be read: Permission denied")
    finally:
        path.chmod(mode)
    assert sorted(p.name for p in jobs.folder.iterdir()) == ["checkpoint"]
    assert without_privileges(jobs, "checkpoint", "out.pt").returncode == 0


def without_privileges(jobs: Jobs, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a user whose access the file modes restrict."""
    process = jobs.python("-c", UNPRIVILEGED, "export", *words)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


# Outputs that cannot be written.


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_existing_file_is_replaced_on_success_only(
    jobs: Jobs, checkpoint: Path, suffix: str
) -> None:
    out = jobs.folder / f"out{suffix}"
    out.write_bytes(b"before")
    (checkpoint / SECOND).rename(jobs.folder / "away")
    assert_refused(jobs.pipeworker("export", "checkpoint", out.name), f"{SECOND} is missing")
    assert out.read_bytes() == b"before"
    (jobs.folder / "away").rename(checkpoint / SECOND)
    assert jobs.pipeworker("export", "checkpoint", out.name).returncode == 0
    assert out.stat().st_size > 500
    assert sorted(p.name for p in jobs.folder.iterdir()) == ["checkpoint", out.name]


def test_a_file_of_the_checkpoint_is_not_overwritten(jobs: Jobs, checkpoint: Path) -> None:
    (jobs.folder / "other.pt").symlink_to(checkpoint / SECOND)
    before = everything(jobs.folder)
    for out in (f"checkpoint/{SECOND}", "other.pt"):
        done = jobs.pipeworker("export", "checkpoint", out)
        assert_refused(done, f"cannot write {out}: it is a part of the checkpoint")
    assert everything(jobs.folder) == before


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_an_unwritable_place_is_refused(jobs: Jobs, checkpoint: Path, suffix: str) -> None:
    folder = jobs.folder / "folder"
    (folder / f"out{suffix}").mkdir(parents=True)
    (jobs.folder / "file").touch()
    before = everything(jobs.folder)
    for out, expected in (
        (f"folder/out{suffix}", "it is a directory"),
        (f"none/out{suffix}", "there is no directory none"),
        (f"file/out{suffix}", "there is no directory file"),
    ):
        done = jobs.pipeworker("export", "checkpoint", out)
        assert_refused(done, f"cannot write {out}: {expected}")
    jobs.folder.chmod(0o755)
    for mode in (0o555, 0):
        folder.chmod(mode)
        out = f"folder/new{suffix}"
        done = without_privileges(jobs, "checkpoint", out)
        folder.chmod(0o755)
        assert_refused(done, f"cannot write {out}: Permission denied")
    assert everything(jobs.folder) == before


@pytest.fixture
def disk(jobs: Jobs) -> Iterator[Path]:
    """Mount a disk with room for one page."""
    folder = jobs.folder / "disk"
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=4k", "pipeworker-test", str(folder)]
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root of a Linux host can make a small disk")
    mounted = subprocess.run(line, capture_output=True, text=True, timeout=30)
    if mounted.returncode:
        pytest.skip(f"no disk can be made here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=30)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_full_disk_leaves_no_file(jobs: Jobs, checkpoint: Path, disk: Path, suffix: str) -> None:
    large = jobs.folder / "large"
    save_file({"0.w": torch.ones(100, 100)}, large, {"names": '["0.w"]'})
    replace(checkpoint / FIRST, large.read_bytes())
    out = disk / f"out{suffix}"
    out.write_bytes(b"before")
    done = jobs.pipeworker("export", "checkpoint", str(out))
    assert_refused(done, f"cannot write {out}: ", "No space left on device")
    assert everything(disk) == {out: b"before"}


def test_a_read_only_disk_is_refused(jobs: Jobs, checkpoint: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=30)
    done = jobs.pipeworker("export", "checkpoint", "disk/out.pt")
    assert_refused(done, "cannot write disk/out.pt: Read-only file system")


def test_a_dtype_that_the_format_lacks_is_refused(jobs: Jobs, checkpoint: Path) -> None:
    large = jobs.folder / "large"
    header = {"names": '["0.x"]', "complex128": '["0.x"]'}
    save_file({"0.x": torch.ones(3, 2, dtype=torch.float64)}, large, header)
    replace(checkpoint / FIRST, large.read_bytes())
    large.unlink()
    done = jobs.pipeworker("export", "checkpoint", "out.safetensors")
    expected = "cannot write out.safetensors: the format does not know such a tensor ("
    assert_refused(done, expected, "; .pt does")
    assert sorted(p.name for p in jobs.folder.iterdir()) == ["checkpoint"]
    assert jobs.pipeworker("export", "checkpoint", "out.pt").returncode == 0
