"""Exports that cast to another dtype, and their memory."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeworker.record.weights import export
from pipeworker.record.weights.export import DTYPES, export_weights
from support.in_process.exports import model, opened, read, save


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out/"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_floating_tensors_are_cast(tmp_path: Path, out: str, dtype: str) -> None:
    layers = model()
    layers[3] = tied = nn.Linear(4, 4)
    layers.insert(4, nn.Linear(4, 4))
    layers[4].weight = tied.weight
    layers[0].register_buffer("wide", torch.arange(3, dtype=torch.float64))
    layers[0].register_buffer("waves", torch.ones(2, dtype=torch.complex64))
    layers[0].register_buffer("none", torch.ones(0, 3))
    layers[0].register_buffer("one", torch.tensor(True))
    save(layers, (6,), tmp_path / "run")
    done = export_weights(tmp_path / "run", f"{tmp_path}/{out}", dtype)
    found = opened(tmp_path / "out") if out == "out/" else read(tmp_path / out)
    expected = nn.Sequential(*layers).state_dict()
    assert found.keys() == expected.keys()
    assert done.infinite == ()
    for name, value in expected.items():
        cast = value.to(DTYPES[dtype]) if value.is_floating_point() else value
        assert found[name].dtype is cast.dtype
        assert torch.equal(found[name], cast)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["run", out.strip("/")])


@pytest.mark.parametrize(
    ("dtype", "name"), [("fp16", "out.pt"), ("bf16", "out.pt"), (None, "out.pth")]
)
def test_a_pt_file_has_a_storage_for_each_tensor_and_tied_ones_once(
    tmp_path: Path, dtype: str | None, name: str
) -> None:
    """The file has the storages that ``torch.save(model.state_dict())`` writes, and no others."""
    folder = save([nn.Linear(100, 100), nn.Linear(100, 100)], (1, 1), tmp_path / "run")
    found = json.loads((folder / "manifest.json").read_text())
    found["ties"] = [["0.weight", "1.weight"]]
    del found["crc32"]
    (folder / "manifest.json").write_text(json.dumps(found))
    out = tmp_path / name
    export_weights(tmp_path / "run", out, dtype)
    loaded = read(out)
    assert torch.equal(loaded["0.weight"], loaded["1.weight"])
    storages = {name: t.untyped_storage() for name, t in loaded.items()}
    assert storages["0.weight"].data_ptr() == storages["1.weight"].data_ptr()
    assert len({storage.data_ptr() for storage in storages.values()}) == 3
    for name, tensor in loaded.items():
        assert storages[name].nbytes() == tensor.nbytes


def test_tensors_beyond_the_range_of_a_dtype_are_named(tmp_path: Path) -> None:
    layer = nn.Linear(3, 3)
    layer.register_buffer("mask", torch.tensor([0.0, -1e9, -torch.inf]))
    layer.register_buffer("inf", torch.tensor([-torch.inf, torch.nan]))
    save([layer], (1,), tmp_path / "run")
    for dtype, expected in (("fp16", ("0.mask",)), ("bf16", ()), ("fp32", ())):
        done = export_weights(tmp_path / "run", tmp_path / "out.safetensors", dtype)
        assert done.infinite == expected
    assert export_weights(tmp_path / "run", tmp_path / "out.pt", "fp16").infinite == ("0.mask",)


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out/"])
def test_export_needs_the_memory_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    """The model has 32 MB in tensors of 8 MB."""
    save([nn.Linear(1024, 2048, bias=False) for _ in range(4)], (4,), tmp_path / "run")
    monkeypatch.setattr(export, "CAST_ELEMENTS", 1 << 18)
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
    export_weights(tmp_path / "run", f"{tmp_path}/{out}", "bf16")
    assert most
    assert most - before < 12 << 20  # what torch.save copies of a tensor, and some


def anonymous() -> int:
    """Return the bytes of this process's anonymous memory."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])
