"""Parts of checkpoints, made without a job, and what looks like whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeworker.record.checkpoint import Part
from pipeworker.record.manifest import Manifest, described, file_names
from pipeworker.record.rundir import RunDir, write_json


def part(
    layers: Sequence[nn.Module],
    first: int,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: object = None,
) -> Part:
    """A stage from layer `first` on, in a module without names."""
    names = [str(index) for index in range(first, first + len(layers))]
    states = [layer.state_dict() for layer in layers]
    return Part(names, layers, states, optimizer, scheduler)


def complete(run: RunDir, step: int, **fields: Any) -> Path:
    """A checkpoint with files of any content, and a manifest that knows them."""
    path = run.checkpoint(step)
    path.mkdir(parents=True)
    for name in file_names(0, 1):
        (path / name).write_bytes(f"{name} of step {step}".encode() * 100)
    files = tuple(described(path / name) for name in file_names(0, 1))
    write_json(path / "manifest.json", Manifest(step, 1, ("0",), files, **fields).to_json())
    return path
