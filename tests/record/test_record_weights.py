"""What stages save, and the one plain file made of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.plan.partition import ranges
from pipeworker.plan.placement import Placement
from pipeworker.record import weights
from pipeworker.record.weights import Part


def model() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 4)),
        nn.ReLU(),
        nn.Linear(4, 2).to(torch.bfloat16),
    ]


def part(layers: Sequence[nn.Module], first: int, optimizer: torch.optim.Optimizer | None) -> Part:
    return Part(layers, first, [layer.state_dict() for layer in layers], optimizer)


def save(
    layers: Sequence[nn.Module],
    balance: tuple[int, ...],
    run: Path,
    step: int = 1,
    placement: Placement | None = None,
) -> Path:
    """A complete checkpoint of a run."""
    checkpoint = run / "checkpoints" / f"step-{step:08d}"
    bounds, placement = ranges(balance), placement or Placement.identity(len(balance))
    for rank, held in enumerate(placement.held):
        parts = [part(layers[slice(*bounds[stage])], bounds[stage][0], None) for stage in held]
        weights.save_part(weights.part_file(checkpoint, rank), parts)
    (checkpoint / "manifest.json").write_text(json.dumps({"parts": placement.workers}))
    return checkpoint


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


def test_a_checkpoint_that_counts_stages_is_read_too(tmp_path: Path) -> None:
    """Where a checkpoint does not say its parts, there is one of each stage."""
    layers = model()
    checkpoint = save(layers, (2, 3), tmp_path / "run")
    (checkpoint / "manifest.json").write_text(json.dumps({"stages": 2}))
    weights.export(tmp_path / "run", tmp_path / "out.pt")
    assert_exported(layers, tmp_path / "out.pt")


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
    assert weights.find_checkpoint(tmp_path).name == "step-00000010"
    early = tmp_path / "checkpoints" / "step-00000002"
    assert weights.find_checkpoint(early) == early


@pytest.mark.parametrize("make", [True, False])
def test_no_checkpoint(tmp_path: Path, make: bool) -> None:
    run = tmp_path / "run"
    if make:
        run.mkdir()
    with pytest.raises(UsageError, match="has no complete checkpoint"):
        weights.export(run, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()


def test_a_missing_stage_file(tmp_path: Path) -> None:
    checkpoint = save(model(), (2, 3), tmp_path)
    weights.part_file(checkpoint, 1).unlink()
    with pytest.raises(UsageError, match=r"stage-1\.pt is missing: .* on another host"):
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


def test_optimizer_state_is_kept_by_parameter_name(tmp_path: Path) -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 1)]
    layers[1].bias = nn.Parameter(torch.zeros(1), requires_grad=False)
    params = [p for layer in layers for p in layer.parameters()]
    groups: list[dict[str, Any]] = [{"params": params[:2], "lr": 0.5}, {"params": params[2:]}]
    optimizer = torch.optim.AdamW(groups)
    nn.Sequential(*layers)(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    path = tmp_path / "stage-0.pt"
    weights.save_part(path, [part(layers, 3, optimizer)])
    saved = torch.load(path, weights_only=True)["optimizer"]
    assert list(saved["state"]) == ["3.weight", "3.bias", "4.weight"]
    assert torch.equal(saved["state"]["3.bias"]["exp_avg"], optimizer.state[params[1]]["exp_avg"])
    assert [group["params"] for group in saved["groups"]] == [
        ["3.weight", "3.bias"],
        ["4.weight", "4.bias"],
    ]
    assert saved["groups"][0]["lr"] == 0.5


def test_a_tied_parameter_has_the_name_of_its_first_place(tmp_path: Path) -> None:
    a, b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    b.weight = a.weight
    optimizer = torch.optim.Adam([a.weight])
    b(a(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    path = tmp_path / "stage-0.pt"
    weights.save_part(path, [part([a, b], 0, optimizer)])
    saved = torch.load(path, weights_only=True)
    assert list(saved["optimizer"]["state"]) == ["0.weight"]
    assert list(saved["weights"]) == ["0.weight", "1.weight"]


def test_optimizers_of_several_stages_are_joined_and_what_is_elsewhere_is_left_out(
    tmp_path: Path,
) -> None:
    layers = [nn.Linear(2, 2, bias=False) for _ in range(3)]
    first, third = (torch.optim.Adam(layers[index].parameters()) for index in (0, 2))
    nn.Sequential(*layers)(torch.ones(1, 2)).sum().backward()
    first.step(), third.step()
    parts = [part([layers[0]], 0, first), part([layers[1]], 1, None), part([layers[2]], 2, third)]
    other = id(layers[2].weight)
    for elsewhere, names in (((), ["0.weight", "2.weight"]), ({other}, ["0.weight"])):
        path = tmp_path / f"{len(names)}.pt"
        weights.save_part(path, parts, elsewhere)
        saved = torch.load(path, weights_only=True)
        assert list(saved["weights"]) == ["0.weight", "1.weight", "2.weight"]
        assert list(saved["optimizer"]["state"]) == names
        assert [name for g in saved["optimizer"]["groups"] for name in g["params"]] == names
