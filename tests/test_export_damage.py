"""``pipeworker export`` of what is damaged or hostile, or to no place: a message and no file."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import cli
from pipeworker.errors import UsageError
from pipeworker.record import weights
from support.jobs import Jobs

Done = subprocess.CompletedProcess[str]
PARTS = 2
UNPRIVILEGED = """
import os
import sys
import cli, torch, safetensors.torch, pipeworker.record.weights  # while they can be read
if os.geteuid() == 0:
    os.seteuid(65534)
cli.main(sys.argv[1:], prog_name="pipeworker")
"""


class Hostile:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("called",))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two stages."""
    checkpoint = tmp_path_factory.mktemp("sound") / "checkpoint"
    for rank in range(PARTS):
        layer = nn.Linear(8, 8)
        part = weights.Part([layer], rank, [layer.state_dict()], None)
        weights.save_part(weights.part_file(checkpoint, rank), [part])
    write_manifest(checkpoint, version=1, step=1, stages=PARTS, parts=PARTS)
    return checkpoint


@pytest.fixture
def checkpoint(sound: Path, jobs: Jobs) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(sound, jobs.folder / "checkpoint"))


def write_manifest(checkpoint: Path, **fields: Any) -> None:
    (checkpoint / "manifest.json").write_text(json.dumps(fields))


def everything(folder: Path) -> dict[Path, bytes | None]:
    """All files below a folder, with what is in them."""
    return {p: p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


@pytest.fixture
def here(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The command without a process of its own: a row of many cases does not need one each."""
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


def test_the_checkpoint_that_is_damaged_here_is_sound(jobs: Jobs, checkpoint: Path) -> None:
    for name in ("out.pt", "out.safetensors"):
        done = jobs.pipeworker("export", "checkpoint", name)
        assert (done.returncode, done.stdout) == (0, f"{name}: 4 tensors\n"), done.stderr


# The first part.


def saved(content: object, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **how)
    return buffer.getvalue()


def script(whole: bytes) -> bytes:
    """What torch takes for a TorchScript archive, and warns of."""
    buffer = io.BytesIO(whole)
    with zipfile.ZipFile(buffer, "a") as file:
        file.writestr(f"{file.namelist()[0].partition('/')[0]}/constants.pkl", "x")
    return buffer.getvalue()


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(name, "x")
    return buffer.getvalue()


def loud(whole: bytes) -> bytes:
    """What torch says of it has an escape sequence that the file chose."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"\x1b[31m" if name.endswith("byteorder") else old.read(name))
    return buffer.getvalue()


def of_weights(named: Any) -> bytes:
    return saved({"weights": named, "optimizer": {}})


ONE = torch.ones(1)
PARTS_OF: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "it is not what a stage writes"),
    "text": (lambda whole: b"hello", "it is not what a stage writes"),
    "zeros": (lambda whole: bytes(1000), "it is not what a stage writes"),
    "a pickle": (lambda whole: pickle.dumps({"weights": {}}), "it is not what a stage writes"),
    "a hostile pickle": (lambda whole: pickle.dumps(Hostile()), "it is not what a stage writes"),
    "the old format": (
        lambda whole: saved({}, _use_new_zipfile_serialization=False),
        "it is not what a stage writes",
    ),
    "a hostile archive": (lambda whole: saved(Hostile()), f"it holds {os.name}.mkdir, which is"),
    "a hostile weight": (lambda whole: of_weights({"0.w": Hostile()}), f"holds {os.name}.mkdir"),
    "a script": (script, "it is damaged (Cannot use ``weights_only=True`` with TorchScript"),
    "truncated at the start": (lambda whole: whole[:4], "it is damaged ("),
    "truncated": (lambda whole: whole[: len(whole) // 2], "it is damaged ("),
    "truncated at the end": (lambda whole: whole[:-1], "it is damaged ("),
    "another archive": (lambda whole: zipped("../x"), "it is damaged ("),
    "control characters": (loud, "it is damaged (Unknown endianness type:  [31m)"),
    "a list": (lambda whole: saved([]), "it has no weights"),
    "nothing": (lambda whole: saved(None), "it has no weights"),
    "a bare state dict": (lambda whole: saved({"0.weight": ONE}), "it has no weights"),
    "weights in a list": (lambda whole: of_weights([ONE]), "it has no weights"),
    "a number": (lambda whole: of_weights({"0.weight": 1.0}), "'0.weight' is not a weight of"),
    "a name that is none": (lambda whole: of_weights({0: ONE}), "0 is not a weight of a layer"),
    "no layer": (lambda whole: of_weights({"weight": ONE}), "'weight' is not a weight"),
    "a path": (lambda whole: of_weights({"../../x": ONE}), "'../../x' is not a weight"),
    "an absolute path": (lambda whole: of_weights({"/x/0.w": ONE}), "'/x/0.w' is not a weight"),
    "a negative layer": (lambda whole: of_weights({"-1.w": ONE}), "'-1.w' is not a weight"),
    "a huge layer": (lambda whole: of_weights({"9" * 5000 + ".w": ONE}), "is not a weight of"),
    "the other part": (lambda whole: of_weights({"1.weight": ONE}), "is in another part as well"),
}


@pytest.mark.parametrize("name", PARTS_OF)
def test_a_part_that_no_stage_wrote(
    jobs: Jobs, here: Callable[..., Done], checkpoint: Path, name: str
) -> None:
    part = checkpoint / "stage-0.pt"
    make, expected = PARTS_OF[name]
    part.write_bytes(make(part.read_bytes()))
    before = everything(jobs.folder)
    path = "stage-1.pt" if name == "the other part" else "stage-0.pt"
    done = here("export", "checkpoint", "out.pt")
    assert_refused(done, f"cannot read checkpoint/{path}: ", expected)
    assert everything(jobs.folder) == before


def test_a_byte_anywhere(checkpoint: Path, tmp_path: Path) -> None:
    """Weights that were changed are weights; all else is a message."""
    part = checkpoint / "stage-0.pt"
    whole = part.read_bytes()
    said = []
    for at in range(0, len(whole), 7):
        part.write_bytes(whole[:at] + bytes([whole[at] ^ 0x81]) + whole[at + 1 :])
        try:
            weights.export(checkpoint, tmp_path / "out.pt")
        except UsageError as error:
            said.append(str(error))
    assert len(said) > 20
    assert [text for text in said if not text.startswith(f"cannot read {part}: ")] == []


# The manifest.


MANIFESTS: dict[str, tuple[bytes, str]] = {
    **{
        f"{key} {shown}": (
            json.dumps({"version": 1, key: value}).encode(),
            f"{key} is {shown}, not a number of files",
        )
        for key in ("parts", "stages")
        for value, shown in ((0, "0"), (-1, "-1"), ("../x", "'../x'"), (2.0, "2.0"), (True, "True"))
    },
    "neither parts nor stages": (b'{"version": 1}', "stages is None, not a number of files"),
    "parts that are NaN": (b'{"version": 1, "parts": NaN}', "parts is nan, not a number"),
    "a later version": (b'{"version": 99, "parts": 2}', "it is of version 99, this pipeworker"),
    "a version in words": (b'{"version": "' + b"x" * 9999 + b'"}', "it is of version 'xxx"),
    **{
        name: (text, "it is not the manifest of a checkpoint")
        for name, text in {
            "empty": b"",
            "text": b"hello",
            "a list": b"[1, 2]",
            "NaN": b"NaN",
            "a number too long": b'{"parts": ' + b"9" * 5000 + b"}",
            "not UTF-8": b'{"parts": 2, "x": "\xff"}',
            "truncated": b'{"version": 1, "parts"',
            "deep": b"[" * 200_000,
            "huge": b'{"parts": 2, "x": "' + b"x" * (17 << 20) + b'"}',
        }.items()
    },
    **{
        f"ties {json.dumps(ties)}": (
            json.dumps({"version": 1, "parts": 2, "ties": ties}).encode(),
            expected,
        )
        for ties, expected in (
            ({}, "ties are not lists of names"),
            ("0.weight", "ties are not lists of names"),
            ([[]], "ties are not lists of names"),
            ([["0.weight", 1]], "ties are not lists of names"),
            ([[["0.weight"], "1.weight"]], "ties are not lists of names"),
            ([["2.weight", "0.weight"]], "no part has '2.weight', a tied weight"),
            ([["0.weight", "../x"]], "no part has '../x', a tied weight"),
        )
    },
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_is_none(
    jobs: Jobs, here: Callable[..., Done], checkpoint: Path, name: str
) -> None:
    text, expected = MANIFESTS[name]
    (checkpoint / "manifest.json").write_bytes(text)
    before = everything(jobs.folder)
    done = here("export", "checkpoint", "out.safetensors")
    assert_refused(done, "cannot read checkpoint", expected)
    assert everything(jobs.folder) == before


@pytest.mark.parametrize("parts", [3, 10**9, 10**30])
def test_more_parts_than_there_are(
    jobs: Jobs, here: Callable[..., Done], checkpoint: Path, parts: int
) -> None:
    write_manifest(checkpoint, version=1, parts=parts)
    done = here("export", "checkpoint", "out.pt")
    assert_refused(done, "checkpoint/stage-2.pt is missing")
    assert not (jobs.folder / "out.pt").exists()


# Files that are something else.


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
@pytest.mark.parametrize("name", ["manifest.json", "stage-0.pt"])
def test_a_file_that_is_something_else(
    jobs: Jobs, checkpoint: Path, name: str, turn: Callable[[Path], None]
) -> None:
    turn(checkpoint / name)
    done = jobs.pipeworker("export", "checkpoint", "out.pt")
    expected = {
        "manifest.json": "checkpoint has no complete checkpoint: give the directory",
        "stage-0.pt": "checkpoint/stage-0.pt",
    }
    assert_refused(done, expected[name])
    assert not (jobs.folder / "out.pt").exists()


def test_a_name_too_long(jobs: Jobs, checkpoint: Path) -> None:
    name = "x" * 300
    assert_refused(jobs.pipeworker("export", name, "out.pt"), "cannot read x", "File name too long")
    done = jobs.pipeworker("export", "checkpoint", f"{name}.pt")
    assert_refused(done, "cannot write x", "File name too long")
    longest = "x" * 252 + ".pt"
    assert jobs.pipeworker("export", "checkpoint", longest).returncode == 0


@pytest.mark.parametrize("name", ["stage-1.pt", "manifest.json", "."])
def test_what_may_not_be_read(jobs: Jobs, checkpoint: Path, name: str) -> None:
    jobs.folder.chmod(0o777)
    path = checkpoint / name
    mode = path.stat().st_mode
    path.chmod(0)
    try:
        done = without_privileges(jobs, "checkpoint", "out.pt")
        assert_refused(done, "cannot read checkpoint", path.name, "Permission denied")
    finally:
        path.chmod(mode)
    assert sorted(p.name for p in jobs.folder.iterdir()) == ["checkpoint"]
    assert without_privileges(jobs, "checkpoint", "out.pt").returncode == 0


def without_privileges(jobs: Jobs, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, run by a user whom file modes concern."""
    process = jobs.python("-c", UNPRIVILEGED, "export", *words)
    stdout, stderr = process.communicate(timeout=90)
    assert process.returncode is not None
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


# Where it cannot be written.


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_exists_is_replaced_when_all_is_well(
    jobs: Jobs, checkpoint: Path, suffix: str
) -> None:
    out = jobs.folder / f"out{suffix}"
    out.write_bytes(b"before")
    (checkpoint / "stage-1.pt").rename(jobs.folder / "away")
    assert_refused(jobs.pipeworker("export", "checkpoint", out.name), "stage-1.pt is missing")
    assert out.read_bytes() == b"before"
    (jobs.folder / "away").rename(checkpoint / "stage-1.pt")
    assert jobs.pipeworker("export", "checkpoint", out.name).returncode == 0
    assert out.stat().st_size > 500
    assert sorted(p.name for p in jobs.folder.iterdir()) == ["checkpoint", out.name]


def test_a_part_is_not_written_over(jobs: Jobs, checkpoint: Path) -> None:
    (jobs.folder / "other.pt").symlink_to(checkpoint / "stage-1.pt")
    before = everything(jobs.folder)
    for out in ("checkpoint/stage-1.pt", "other.pt"):
        done = jobs.pipeworker("export", "checkpoint", out)
        assert_refused(done, f"cannot write {out}: it is a part of the checkpoint")
    assert everything(jobs.folder) == before


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_place_where_nothing_can_be_written(jobs: Jobs, checkpoint: Path, suffix: str) -> None:
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
    """One with room for a page."""
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
def test_a_full_disk(jobs: Jobs, checkpoint: Path, disk: Path, suffix: str) -> None:
    layer = nn.Linear(100, 100)
    part = weights.Part([layer], 0, [layer.state_dict()], None)
    weights.save_part(checkpoint / "stage-0.pt", [part])
    out = disk / f"out{suffix}"
    out.write_bytes(b"before")
    done = jobs.pipeworker("export", "checkpoint", str(out))
    assert_refused(done, f"cannot write {out}: ", "No space left on device")
    assert everything(disk) == {out: b"before"}


def test_a_disk_that_is_read_only(jobs: Jobs, checkpoint: Path, disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=30)
    done = jobs.pipeworker("export", "checkpoint", "disk/out.pt")
    assert_refused(done, "cannot write disk/out.pt: Read-only file system")


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), ONE.to(torch.complex128)], ids=["sparse", "complex"]
)
def test_tensors_that_the_format_does_not_know(
    jobs: Jobs, checkpoint: Path, tensor: torch.Tensor
) -> None:
    (checkpoint / "stage-0.pt").write_bytes(of_weights({"0.x": tensor}))
    done = jobs.pipeworker("export", "checkpoint", "out.safetensors")
    said = "cannot write out.safetensors: the format does not know such a tensor ("
    assert_refused(done, said, "; .pt does")
    assert sorted(p.name for p in jobs.folder.iterdir()) == ["checkpoint"]
    assert jobs.pipeworker("export", "checkpoint", "out.pt").returncode == 0
