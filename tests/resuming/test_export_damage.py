"""``pipeworker export`` of damaged or hostile checkpoints, or to unwritable places: one message."""

from __future__ import annotations

import json
import os
import pickle
import reprlib
import shutil
import subprocess
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
from pipeworker.record.weights.export import export_weights
from support.in_process.exports import Hostile, save
from support.real_jobs.jobs import Jobs

UNPRIVILEGED = """
# while they can be read:
import os, sys, cli, torch, safetensors.torch, pipeworker.record.weights.export
if os.geteuid() == 0:
    os.seteuid(65534)
cli.main(sys.argv[1:], prog_name="pipeworker")
"""


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of two stages."""
    return save([nn.Linear(8, 8), nn.Linear(8, 8)], (1, 1), tmp_path_factory.mktemp("sound"))


@pytest.fixture
def checkpoint(sound: Path, jobs: Jobs) -> Path:
    """Copy the checkpoint, to be damaged by the test."""
    return Path(shutil.copytree(sound, jobs.folder / "checkpoint"))


def change_manifest(checkpoint: Path, **fields: Any) -> None:
    """Change fields of a manifest, and remove its checksum, so that they are examined."""
    path = checkpoint / "manifest.json"
    found = {**json.loads(path.read_text()), **fields}
    found.pop("crc32", None)
    path.write_text(json.dumps(found))


def replace(path: Path, data: bytes) -> None:
    """Replace a file of a checkpoint, and describe the new one in the manifest."""
    path.write_bytes(data)
    files = json.loads((path.parent / "manifest.json").read_text())["files"]
    files[path.name] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    change_manifest(path.parent, files=files)


def everything(folder: Path) -> dict[Path, bytes | None]:
    """Return all paths below a folder with the contents of files."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def assert_refused(done: subprocess.CompletedProcess[str], *expected: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert all(text in line for text in expected), line
    assert len(line) < 500
    assert line.isprintable()


@pytest.fixture
def refuse(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Check that exports are refused, in this process: many cases need no process each."""
    monkeypatch.chdir(jobs.folder)

    def check(*expected: str) -> None:
        before = everything(jobs.folder)
        for out in ("out.pt", "out.safetensors"):
            found = CliRunner().invoke(cli.main, words := ["export", "checkpoint", out])
            done = subprocess.CompletedProcess(words, found.exit_code, found.stdout, found.stderr)
            assert_refused(done, *expected)
        assert everything(jobs.folder) == before

    return check


def test_the_undamaged_checkpoint_is_exported(jobs: Jobs, checkpoint: Path) -> None:
    for name in ("out.pt", "out.safetensors"):
        done = jobs.pipeworker("export", "checkpoint", name)
        assert (done.returncode, done.stdout) == (0, f"{name}: 4 tensors, after step 1\n"), (
            done.stderr
        )


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
    refuse: Callable[..., None], checkpoint: Path, name: str
) -> None:
    data, expected = PARTS_OF[name]
    replace(checkpoint / FIRST, data)
    path = SECOND if name == "the other part" else FIRST
    refuse(f"checkpoint/{path}: cannot be read: ", expected)


@pytest.mark.parametrize("to", [0, 4, 300, -1])
def test_a_truncated_file_of_weights_is_refused(
    refuse: Callable[..., None], checkpoint: Path, to: int
) -> None:
    path = checkpoint / FIRST
    whole = path.read_bytes()
    path.write_bytes(whole[:to])
    has = f"it has {len(whole[:to])} bytes, not {len(whole)}"
    refuse(f"checkpoint/{FIRST}: cannot be read: ", has)


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


COUNTS: list[Any] = [-1, "../x", 2.0, True, None, 1 << 70]
FILES: list[Any] = [
    *(0, {}, {"x": {"bytes": 1, "crc32": 1}}, {FIRST: {}}, {FIRST: 3}),
    {f"../{FIRST}": {"bytes": 1, "crc32": 1}},
    {FIRST: {"bytes": -1, "crc32": 1}},
    {FIRST: {"bytes": 1, "crc32": "1"}},
]
FIELDS: dict[str, list[Any]] = {
    "step": COUNTS,
    "stages": [0, *COUNTS],
    "files": FILES,
    "scaler": [1],
    "layers": [[], "01", ["0", "0"], ["0", 1], ["0..1"]],
    "ties": [{}, "0.weight", [[]], [["0.weight", 1]], [[["0.weight"], "1.weight"]]],
    "evaluation": [1, [], {"loss": "1"}, {"loss": None}, {"loss": True}, {"loss": 1 << 70}],
}
MANIFESTS: dict[str, tuple[dict[str, Any] | bytes, str]] = {
    **{
        f"{key} {value!r:.40}": ({key: value}, f"{key} is {reprlib.repr(value)} (")
        for key, values in FIELDS.items()
        for value in values
    },
    "no such tie": ({"ties": [["2.weight", "0.weight"]]}, "no part has '2.weight', a tied weight"),
    "a tie of a path": ({"ties": [["0.weight", "../x"]]}, "no part has '../x', a tied weight"),
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
        }.items()
    },
    "huge": (b'{"step": 2, "x": "' + b"x" * (17 << 20) + b'"}', "at most 16777216 are read"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_an_invalid_manifest_is_refused(
    refuse: Callable[..., None], checkpoint: Path, name: str
) -> None:
    changed, expected = MANIFESTS[name]
    if isinstance(changed, bytes):
        (checkpoint / "manifest.json").write_bytes(changed)
    else:
        change_manifest(checkpoint, **changed)
    refuse("checkpoint", ": cannot be read: ", expected)


@pytest.mark.parametrize("name", ["model-99999-of-99999.safetensors", "model-00003-of-00003.json"])
def test_a_manifest_with_missing_files_is_refused(
    refuse: Callable[..., None], checkpoint: Path, name: str
) -> None:
    found = json.loads((checkpoint / "manifest.json").read_text())
    change_manifest(checkpoint, files={**found["files"], name: {"bytes": 1, "crc32": 1}})
    refuse(f"checkpoint/{name}: is missing")


# Paths that are not files.


@pytest.mark.parametrize("turn", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)])
@pytest.mark.parametrize("name", ["manifest.json", FIRST])
def test_a_path_that_is_not_a_file_is_refused(
    jobs: Jobs, checkpoint: Path, name: str, turn: Callable[[Path], None]
) -> None:
    (checkpoint / name).unlink()
    turn(checkpoint / name)
    none = "checkpoint: no complete checkpoint is there; give the directory"
    expected = none if name == "manifest.json" else f"checkpoint/{FIRST}"
    assert_refused(jobs.pipeworker("export", "checkpoint", "out.pt"), expected)
    assert not (jobs.folder / "out.pt").exists()


def test_a_name_that_is_too_long_is_refused(jobs: Jobs, checkpoint: Path) -> None:
    name = "x" * 300
    assert_refused(jobs.pipeworker("export", name, "out.pt"), "cannot be read: File name too long")
    done = jobs.pipeworker("export", "checkpoint", f"{name}.pt")
    assert_refused(done, ".pt: cannot be written", "File name too long")
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
    assert_refused(jobs.pipeworker("export", "checkpoint", out.name), f"{SECOND}: is missing")
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
        assert_refused(done, f"{out}: cannot be written: it is a part of the checkpoint")
    assert everything(jobs.folder) == before


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_folder_without_write_permission_is_refused(
    jobs: Jobs, checkpoint: Path, suffix: str
) -> None:
    folder = jobs.folder / "folder"
    folder.mkdir()
    jobs.folder.chmod(0o755)
    before, out = everything(jobs.folder), f"folder/new{suffix}"
    for mode in (0o555, 0):
        folder.chmod(mode)
        done = without_privileges(jobs, "checkpoint", out)
        folder.chmod(0o755)
        assert_refused(done, f"{out}: cannot be written: Permission denied")
    assert everything(jobs.folder) == before


@pytest.fixture
def disk(jobs: Jobs) -> Iterator[Path]:
    """Mount a disk with room for one page."""
    folder = jobs.folder / "disk"
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=4k", "pipeworker-test", str(folder)]
    if os.geteuid() != 0:
        pytest.skip("only root can make a small disk")
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
    assert_refused(done, f"{out}: cannot be written: ", "No space left on device")
    assert everything(disk) == {out: b"before"}


def test_a_read_only_disk_is_refused(jobs: Jobs, checkpoint: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=30)
    done = jobs.pipeworker("export", "checkpoint", "disk/out.pt")
    assert_refused(done, "disk/out.pt: cannot be written: Read-only file system")


def test_a_dtype_that_the_format_lacks_is_refused(jobs: Jobs, checkpoint: Path) -> None:
    large = jobs.folder / "large"
    header = {"names": '["0.x"]', "complex128": '["0.x"]'}
    save_file({"0.x": torch.ones(3, 2, dtype=torch.float64)}, large, header)
    replace(checkpoint / FIRST, large.read_bytes())
    large.unlink()
    done = jobs.pipeworker("export", "checkpoint", "out.safetensors")
    expected = "out.safetensors: cannot be written: the format does not know such a tensor ("
    assert_refused(done, expected, "; .pt does")
    assert sorted(p.name for p in jobs.folder.iterdir()) == ["checkpoint"]
    assert jobs.pipeworker("export", "checkpoint", "out.pt").returncode == 0


def test_no_run_begins_with_weights_of_which_a_bit_has_flipped(
    jobs: Jobs, checkpoint: Path
) -> None:
    (jobs.folder / "job.py").write_text("from torch import nn\nmodel = lambda: nn.Linear(8, 8)\n")
    whole = (checkpoint / SECOND).read_bytes()
    (checkpoint / SECOND).write_bytes(whole[:-1] + bytes([whole[-1] ^ 4]))
    line = ("launch", "--stages", "1", "job.py", "--init-from", "checkpoint")
    done = jobs.pipeworker(*line)
    assert_refused(
        done, f"--init-from {checkpoint / SECOND}: cannot be read: it is damaged (its checksum"
    )
    assert not (jobs.folder / "runs").exists()
