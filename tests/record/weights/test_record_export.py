"""Exports of checkpoints that are made without a job."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.placement import Placement
from pipeworker.record import rundir
from pipeworker.record.checkpoint.folder import remove_unless_held
from pipeworker.record.weights.export import export_weights
from support.in_process.exports import model, opened, read, save


def assert_exported(layers: Sequence[nn.Module], path: Path, *, in_order: bool = True) -> None:
    expected = nn.Sequential(*layers).state_dict()
    found = read(path)
    assert set(found) == set(expected)
    if path.suffix == ".pt" and in_order:
        assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype is value.dtype
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("balance", [(5,), (2, 3), (1, 1, 1, 1, 1)])
def test_keys_and_values_equal_those_of_a_sequential(
    tmp_path: Path, suffix: str, balance: tuple[int, ...]
) -> None:
    layers = model()
    save(layers, balance, tmp_path / "run")
    out = tmp_path / f"weights{suffix}"
    assert export_weights(tmp_path / "run", out).tensors == len(nn.Sequential(*layers).state_dict())
    assert_exported(layers, out)
    nn.Sequential(*model()).load_state_dict(read(out))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", out.name]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("held", [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1, 2, 3),)])
def test_several_stages_of_a_worker_are_exported(
    tmp_path: Path, suffix: str, held: tuple[tuple[int, ...], ...]
) -> None:
    layers = model()
    save(layers, (2, 1, 1, 1), tmp_path / "run", placement=Placement(held))
    out = tmp_path / f"weights{suffix}"
    export_weights(tmp_path / "run", out)
    assert_exported(layers, out, in_order=False)  # a worker's stages come together


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_tied_expanded_and_strided_weights_are_exported(tmp_path: Path, suffix: str) -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    conv.register_buffer("wide", torch.ones(1, 3).expand(4, 3))
    layers = [nn.ReLU(), nn.ModuleList([a, b]), conv]
    save(layers, (1, 2), tmp_path / "run")
    export_weights(tmp_path / "run", tmp_path / f"out{suffix}")
    assert_exported(layers, tmp_path / f"out{suffix}")


@pytest.mark.parametrize("kept", ["1.0.weight", "1.1.weight"])
def test_a_weight_with_two_names_in_a_layer_is_one_tensor(tmp_path: Path, kept: str) -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
    b.weight = a.weight
    layers = [nn.Linear(3, 3), nn.ModuleList([a, b])]
    save(layers, (1, 1), tmp_path / "run")
    export_weights(tmp_path / "run", tmp_path / "out.pt")
    found = read(tmp_path / "out.pt")
    assert found["1.0.weight"].data_ptr() == found["1.1.weight"].data_ptr()
    names = {"0.weight", "0.bias", "1.0.bias", kept}
    pattern = tmp_path / "pattern"
    pattern.mkdir()
    save_file({name: found[name] for name in names}, pattern / "model.safetensors")
    (pattern / "config.json").write_text("{}")
    export_weights(tmp_path / "run", f"{tmp_path}/like/", pattern=pattern)
    assert opened(tmp_path / "like").keys() == names


@pytest.mark.parametrize("aliases", [{"0.bias": "0.other"}, {"0.other": "0.bias"}, ["0.bias"]])
def test_another_name_of_no_weight_is_an_error(tmp_path: Path, aliases: Any) -> None:
    path = save([nn.Linear(3, 3)], (1,), tmp_path / "run")
    state, manifest = path / "state-00001-of-00001.json", path / "manifest.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"aliases": aliases}))
    found = json.loads(manifest.read_text())
    del found["crc32"]
    sealed = {"bytes": state.stat().st_size, "crc32": zlib.crc32(state.read_bytes())}
    found["files"][state.name] = sealed
    manifest.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=r"0\.(other|bias)|Expected `object`"):
        export_weights(tmp_path / "run", tmp_path / "out.pt")


def test_a_pickled_file_has_the_extra_state_of_modules(tmp_path: Path) -> None:
    class Counter(nn.Linear):
        calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls, "at": torch.tensor([self.calls])}

        def set_extra_state(self, state: Any) -> None:
            assert state["at"].tolist() == [state["calls"]]
            self.calls = state["calls"]

    first, last = Counter(2, 2), Counter(2, 2)
    first.calls, last.calls = 3, 5
    save([first, nn.Linear(2, 2), last], (1, 2), tmp_path / "run")
    export_weights(tmp_path / "run", tmp_path / "out.pt", "bf16")
    export_weights(tmp_path / "run", tmp_path / "out.safetensors")
    first, last = Counter(2, 2), Counter(2, 2)
    nn.Sequential(first, nn.Linear(2, 2), last).load_state_dict(read(tmp_path / "out.pt"))
    assert (first.calls, last.calls) == (3, 5)
    assert len(read(tmp_path / "out.safetensors")) == 6


def test_the_last_complete_checkpoint_is_found(tmp_path: Path) -> None:
    for step in (2, 10):
        save(model(), (5,), tmp_path, step)
    late = save(model(), (5,), tmp_path, 30)
    (late / "manifest.json").unlink()
    assert rundir.find_checkpoint(tmp_path).name == "step-00000010"
    early = tmp_path / "checkpoints" / "step-00000002"
    assert rundir.find_checkpoint(early) == early


def test_a_run_keeps_the_checkpoint_that_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save(model(), (5,), tmp_path / "run")
    removed = []

    def write(*_: object) -> None:
        removed.append(remove_unless_held(checkpoint))

    monkeypatch.setattr(torch, "save", write)
    export_weights(tmp_path / "run", tmp_path / "out.pt")
    assert removed == [False]
    assert remove_unless_held(checkpoint)


@pytest.mark.parametrize("make", [True, False])
def test_export_without_a_checkpoint_is_refused(tmp_path: Path, make: bool) -> None:
    run = tmp_path / "run"
    if make:
        run.mkdir()
    with pytest.raises(UsageError, match="no complete checkpoint is there"):
        export_weights(run, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = save(model(), (2, 3), tmp_path) / "model-00002-of-00002.safetensors"
    path.unlink()
    with pytest.raises(UsageError, match=rf"{path}: is missing; .* on another host"):
        export_weights(tmp_path, tmp_path / "out.pt")


@pytest.mark.parametrize("name", ["out.bin", "out.d"])
def test_an_unknown_ending_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        UsageError, match=r"must end in \.safetensors, \.pt or \.pth; with a / at the end"
    ):
        export_weights(tmp_path, tmp_path / name)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder/out", "it is a directory"),
        ("none/out", "there is no directory none"),
        ("file/out", "there is no directory file"),
    ],
)
def test_an_unwritable_output_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    save(model(), (5,), tmp_path / "run")
    (tmp_path / f"folder/out{suffix}").mkdir(parents=True)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match=f"^{name}{suffix}: cannot be written: {reason}$"):
        export_weights(tmp_path / "run", f"{name}{suffix}")
    assert sorted(tmp_path.rglob("*")) == before


# A folder in Hugging Face's layout.


@pytest.mark.parametrize("balance", [(5,), (2, 3)])
@pytest.mark.parametrize(
    ("size", "files"), [(None, 1), ("5GB", 1), ("250B", 3), ("1B", 11), ("300B", 2)]
)
def test_files_of_a_folder_have_at_most_the_shard_size(
    tmp_path: Path, balance: tuple[int, ...], size: str | None, files: int
) -> None:
    layers = model()
    save(layers, balance, tmp_path / "run")
    out = tmp_path / "out"
    done = export_weights(tmp_path / "run", out, shard_size=size)
    assert (done.tensors, done.files) == (11, files)
    expected = nn.Sequential(*layers).state_dict()
    found = opened(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert {path.name for path in out.iterdir()} == (
        {"model.safetensors"}
        if files == 1
        else {
            "model.safetensors.index.json",
            *(f"model-{n:05}-of-{files:05}.safetensors" for n in range(1, files + 1)),
        }
    )
    assert not list(tmp_path.glob(".*"))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert modes == {0o666 & ~umask()}
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~umask()


def umask() -> int:
    os.umask(found := os.umask(0))
    return found


@pytest.mark.parametrize(
    "output", ["out", "out/", "model-2.5", "model.d/", "there", "there.pt/", "."]
)
def test_outputs_that_are_folders(
    tmp_path: Path, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model(), (5,), tmp_path / "run")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    export_weights(tmp_path / "run", output)
    assert opened(Path(output)).keys() == nn.Sequential(*model()).state_dict().keys()
    assert (tmp_path / "there" / "config.json").exists()


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            "held",
            "held: cannot be written: it has weights already (model-00001-of-00002.safetensors); ",
        ),
        ("file/", "file: cannot be written: it is a file"),
        ("none/out", "none/out: cannot be written: there is no directory none"),
        ("file/out", "file/out: cannot be written: there is no directory file"),
        ("x" * 300, "x" * 300 + ": cannot be written: "),
    ],
)
def test_an_unusable_folder_is_refused(
    tmp_path: Path, output: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model(), (5,), tmp_path / "run")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError) as caught:
        export_weights(tmp_path / "run", output)
    assert str(caught.value).startswith(expected)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fails", ["the second file", "the index", "the end"])
def test_a_failed_export_to_a_folder_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool, fails: str
) -> None:
    save(model(), (5,), tmp_path / "run")
    out = tmp_path / "out"
    if there:
        out.mkdir()
    before = sorted(tmp_path.rglob("*"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def sync(file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if "00002-of" in path.name and fails == "the second file":
            full()
        if path.suffix == ".partial" and path.is_file() and fails == "the index":
            full()

    def rename(path: Path, to: Path) -> Path:
        if to.name in ("out", "model-00002-of-00003.safetensors"):
            full()
        return Path(shutil.move(path, to))

    monkeypatch.setattr("os.fsync", sync)
    if fails == "the end":
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UsageError, match=rf"{out}: cannot be written: No space left on device"):
        export_weights(tmp_path / "run", out, shard_size="250B")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_shard_size_requires_a_folder(tmp_path: Path) -> None:
    save(model(), (5,), tmp_path / "run")
    with pytest.raises(UsageError, match=r"--shard-size: .*out\.pt is one file; give a folder"):
        export_weights(tmp_path / "run", tmp_path / "out.pt", shard_size="1MB")
    with pytest.raises(UsageError, match="--shard-size 5: must be a size"):
        export_weights(tmp_path / "run", tmp_path / "out", shard_size="5")
