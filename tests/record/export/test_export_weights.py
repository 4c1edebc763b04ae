"""The one plain file that is made of what stages save."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.partition import ranges
from pipeworker.plan.placement import Placement
from pipeworker.record import checkpoint, rundir
from pipeworker.record.export import weights
from pipeworker.record.manifest import Manifest
from pipeworker.wire.messages.checkpoint import File
from support.checkpoints import part


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 4)),
        nn.ReLU(),
        nn.Linear(4, 2).to(torch.bfloat16),
    ]


def save(
    layers: Sequence[nn.Module],
    balance: tuple[int, ...],
    run: Path,
    step: int = 1,
    placement: Placement | None = None,
) -> Path:
    """A complete checkpoint of a run."""
    path = run / "checkpoints" / f"step-{step:08d}"
    bounds, placement = ranges(balance), placement or Placement.identity(len(balance))
    files: list[File] = []
    for rank, held in enumerate(placement.held):
        parts = [part(layers[slice(*bounds[stage])], bounds[stage][0]) for stage in held]
        files += checkpoint.save_part(path, rank, placement.workers, parts)
    names = tuple(str(index) for index in range(len(layers)))
    made = Manifest(step, placement.stages, names, tuple(files))
    (path / "manifest.json").write_text(json.dumps(made.to_json()))
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return loaded
    return load_file(path)


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
def test_keys_and_values_are_those_of_a_sequential(
    tmp_path: Path, suffix: str, balance: tuple[int, ...]
) -> None:
    layers = model()
    save(layers, balance, tmp_path / "run")
    out = tmp_path / f"weights{suffix}"
    assert weights.export(tmp_path / "run", out).tensors == len(nn.Sequential(*layers).state_dict())
    assert_exported(layers, out)
    nn.Sequential(*model()).load_state_dict(read(out))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", out.name]


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("held", [((0, 2), (1, 3)), ((0, 3), (1, 2)), ((0, 1, 2, 3),)])
def test_several_stages_of_a_worker_are_one_part(
    tmp_path: Path, suffix: str, held: tuple[tuple[int, ...], ...]
) -> None:
    layers = model()
    save(layers, (2, 1, 1, 1), tmp_path / "run", placement=Placement(held))
    out = tmp_path / f"weights{suffix}"
    weights.export(tmp_path / "run", out)
    assert_exported(layers, out, in_order=False)  # a worker's stages come together


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_tied_expanded_and_strided_weights(tmp_path: Path, suffix: str) -> None:
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    b.weight = a.weight
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    conv.register_buffer("wide", torch.ones(1, 3).expand(4, 3))
    layers = [nn.ReLU(), nn.ModuleList([a, b]), conv]
    save(layers, (1, 2), tmp_path / "run")
    weights.export(tmp_path / "run", tmp_path / f"out{suffix}")
    assert_exported(layers, tmp_path / f"out{suffix}")


def test_the_last_complete_checkpoint_is_taken(tmp_path: Path) -> None:
    for step in (2, 10):
        save(model(), (5,), tmp_path, step)
    late = save(model(), (5,), tmp_path, 30)
    (late / "manifest.json").unlink()
    assert rundir.find(tmp_path).name == "step-00000010"
    early = tmp_path / "checkpoints" / "step-00000002"
    assert rundir.find(early) == early


@pytest.mark.parametrize("make", [True, False])
def test_no_checkpoint(tmp_path: Path, make: bool) -> None:
    run = tmp_path / "run"
    if make:
        run.mkdir()
    with pytest.raises(UsageError, match="has no complete checkpoint"):
        weights.export(run, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_missing_file(tmp_path: Path) -> None:
    path = save(model(), (2, 3), tmp_path) / "model-00002-of-00002.safetensors"
    path.unlink()
    with pytest.raises(UsageError, match=rf"{path} is missing: .* on another host"):
        weights.export(tmp_path, tmp_path / "out.pt")


@pytest.mark.parametrize("name", ["out.bin", "out.d"])
def test_another_ending(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        UsageError, match=r"must end in \.safetensors, \.pt or \.pth; with a / at the end"
    ):
        weights.export(tmp_path, tmp_path / name)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("obstacle", ["no folder", "a folder", "a file for a folder"])
def test_where_nothing_can_be_written(tmp_path: Path, suffix: str, obstacle: str) -> None:
    save(model(), (5,), tmp_path / "run")
    out = tmp_path / f"out{suffix}"
    if obstacle == "no folder":
        out = tmp_path / "none" / out.name
    elif obstacle == "a folder":
        out.mkdir()
    else:
        (tmp_path / "file").touch()
        out = tmp_path / "file" / out.name
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError, match="cannot write"):
        weights.export(tmp_path / "run", out)
    assert sorted(tmp_path.rglob("*")) == before


# A folder in Hugging Face's layout.


def opened(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a folder, by its index if it has one, as Hugging Face's tools open it."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return load_file(folder / "model.safetensors")
    index = json.loads(path.read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            found[name] = shard.get_tensor(name)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    return found


@pytest.mark.parametrize("balance", [(5,), (2, 3)])
@pytest.mark.parametrize(
    ("size", "files"), [(None, 1), ("5GB", 1), ("250B", 3), ("1B", 11), ("300B", 2)]
)
def test_a_folder_has_files_of_at_most_a_size(
    tmp_path: Path, balance: tuple[int, ...], size: str | None, files: int
) -> None:
    layers = model()
    save(layers, balance, tmp_path / "run")
    out = tmp_path / "out"
    done = weights.export(tmp_path / "run", out, shard_size=size)
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
    "said", ["out", "out/", "model-2.5", "model.d/", "there", "there.pt/", "."]
)
def test_what_is_a_folder(tmp_path: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(model(), (5,), tmp_path / "run")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    weights.export(tmp_path / "run", said)
    assert opened(Path(said)).keys() == nn.Sequential(*model()).state_dict().keys()
    assert (tmp_path / "there" / "config.json").exists()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("held", "cannot write held: it has weights already (model-00001-of-00002.safetensors): "),
        ("file/", "cannot write file: it is a file"),
        ("none/out", "cannot write none/out: there is no directory none"),
        ("file/out", "cannot write file/out: there is no directory file"),
        ("x" * 300, "cannot write xxx"),
    ],
)
def test_a_folder_that_will_not_do(
    tmp_path: Path, said: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(model(), (5,), tmp_path / "run")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "model-00001-of-00002.safetensors").touch()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError) as caught:
        weights.export(tmp_path / "run", said)
    assert str(caught.value).startswith(expected)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("fails", ["the second file", "the index", "the end"])
def test_nothing_is_left_of_a_folder_that_fails(
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
        name = Path(f"/proc/self/fd/{file}").readlink().name
        if "00002-of" in name and fails == "the second file":
            full()
        if name.endswith(".json") and fails == "the index":
            full()

    def rename(path: Path, to: Path) -> Path:
        if to.name in ("out", "model-00002-of-00003.safetensors"):
            full()
        return Path(shutil.move(path, to))

    monkeypatch.setattr("os.fsync", sync)
    if fails == "the end":
        monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(UsageError, match=rf"cannot write {out}: No space left on device"):
        weights.export(tmp_path / "run", out, shard_size="250B")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_size_is_of_a_folder(tmp_path: Path) -> None:
    save(model(), (5,), tmp_path / "run")
    with pytest.raises(UsageError, match=r"--shard-size is of a folder: .*out\.pt is one file"):
        weights.export(tmp_path / "run", tmp_path / "out.pt", shard_size="1MB")
    with pytest.raises(UsageError, match="--shard-size 5: must be a size"):
        weights.export(tmp_path / "run", tmp_path / "out", shard_size="5")


# Other dtypes.


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out/"])
@pytest.mark.parametrize("dtype", weights.DTYPES)
def test_floating_tensors_alone_are_cast(tmp_path: Path, out: str, dtype: str) -> None:
    layers = model()
    layers[3] = tied = nn.Linear(4, 4)
    layers.insert(4, nn.Linear(4, 4))
    layers[4].weight = tied.weight
    layers[0].register_buffer("wide", torch.arange(3, dtype=torch.float64))
    layers[0].register_buffer("waves", torch.ones(2, dtype=torch.complex64))
    layers[0].register_buffer("none", torch.ones(0, 3))
    layers[0].register_buffer("one", torch.tensor(True))
    save(layers, (6,), tmp_path / "run")
    done = weights.export(tmp_path / "run", f"{tmp_path}/{out}", dtype)
    found = opened(tmp_path / "out") if out == "out/" else read(tmp_path / out)
    expected = nn.Sequential(*layers).state_dict()
    assert found.keys() == expected.keys()
    assert done.infinite == ()
    for name, value in expected.items():
        cast = value.to(weights.DTYPES[dtype]) if value.is_floating_point() else value
        assert found[name].dtype is cast.dtype
        assert torch.equal(found[name], cast)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", out.strip("/")])


@pytest.mark.parametrize(
    ("dtype", "name"), [("fp16", "out.pt"), ("bf16", "out.pt"), (None, "out.pth")]
)
def test_a_pt_file_has_each_tensor_apart_and_tied_ones_once(
    tmp_path: Path, dtype: str | None, name: str
) -> None:
    """As ``torch.save(model.state_dict())`` has them, and nothing but them."""
    folder = save([nn.Linear(100, 100), nn.Linear(100, 100)], (1, 1), tmp_path / "run")
    found = json.loads((folder / "manifest.json").read_text())
    found["ties"] = [["0.weight", "1.weight"]]
    del found["crc32"]
    (folder / "manifest.json").write_text(json.dumps(found))
    out = tmp_path / name
    weights.export(tmp_path / "run", out, dtype)
    loaded = read(out)
    assert torch.equal(loaded["0.weight"], loaded["1.weight"])
    storages = {name: t.untyped_storage() for name, t in loaded.items()}
    assert storages["0.weight"].data_ptr() == storages["1.weight"].data_ptr()
    assert len({storage.data_ptr() for storage in storages.values()}) == 3
    for name, tensor in loaded.items():
        assert storages[name].nbytes() == tensor.nbytes


def test_values_that_a_dtype_does_not_reach_are_named(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    layer.register_buffer("mask", torch.tensor([0.0, -1e9, -torch.inf]))
    layer.register_buffer("inf", torch.tensor([-torch.inf, torch.nan]))
    save([layer], (1,), tmp_path / "run")
    for dtype, expected in (("fp16", ("0.mask",)), ("bf16", ()), ("fp32", ())):
        done = weights.export(tmp_path / "run", tmp_path / "out.safetensors", dtype)
        assert done.infinite == expected
    assert weights.export(tmp_path / "run", tmp_path / "out.pt", "fp16").infinite == ("0.mask",)


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out/"])
def test_memory_is_that_of_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """Not that of the model: 32 MB, in tensors of 8 MB."""
    save([nn.Linear(1024, 2048, bias=False) for _ in range(4)], (4,), tmp_path / "run")
    monkeypatch.setattr(weights, "_CHUNK", 1 << 18)
    most = 0
    write = Path.open

    def watched(path: Path, *words: Any, **options: Any) -> Any:
        file = write(path, *words, **options)
        return Watched(file) if words == ("xb",) else file

    class Watched:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Watched:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: Any) -> int:
            nonlocal most
            most = max(most, anonymous())
            return int(self.file.write(data))

    monkeypatch.setattr(Path, "open", watched)
    ctypes.CDLL(None).malloc_trim(0)  # what is free is no room for what must not be held
    before = anonymous()
    weights.export(tmp_path / "run", f"{tmp_path}/{out}", "bf16")
    assert most
    assert most - before < 12 << 20  # what torch.save copies of a tensor, and some


def anonymous() -> int:
    """Bytes of this process that no file has."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])
