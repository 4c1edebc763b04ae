"""The one plain file that is made of what stages save."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.partition import ranges
from pipeworker.plan.placement import Placement
from pipeworker.record import checkpoint, rundir, weights
from pipeworker.record.manifest import Manifest
from pipeworker.wire.messages import File
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
    if path.suffix == ".pt":
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
    assert weights.export(tmp_path / "run", out) == len(nn.Sequential(*layers).state_dict())
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


@pytest.mark.parametrize("name", ["out", "out.bin", "out.pth"])
def test_another_ending(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"must end in \.safetensors or \.pt"):
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
