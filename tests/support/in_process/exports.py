"""A model, checkpoints of it, what an export of them has written, and a hostile object."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.layer_names import LayerNames
from pipeworker.plan.partition import ranges
from pipeworker.plan.placement import Placement
from pipeworker.record.checkpoint.manifest import Manifest
from support.in_process.checkpoints import part, save_worker_files


class Hostile:
    """An object whose pickle is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("called",))


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
    """Save a complete checkpoint of a run."""
    path = run / "checkpoints" / f"step-{step:08d}"
    bounds, placement = ranges(balance), placement or Placement.identity(len(balance))
    files: list[CheckpointFile] = []
    for rank, held in enumerate(placement.held):
        parts = [part(layers[slice(*bounds[stage])], bounds[stage][0]) for stage in held]
        files += save_worker_files(path, rank, placement.workers, parts)
    names = LayerNames.numbered(len(layers))
    made = Manifest(step, placement.stages, names, tuple(files))
    (path / "manifest.json").write_text(json.dumps(made.to_json()))
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix != ".safetensors":
        loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return loaded
    return load_file(path)


def opened(folder: Path) -> dict[str, torch.Tensor]:
    """Load the weights in a folder as Hugging Face's tools do, by its index if it has one."""
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
