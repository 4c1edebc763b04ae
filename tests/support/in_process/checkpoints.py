"""Checkpoints that are made without a job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.checkpoint.checkpoint import Checkpoint, read_plain
from pipeworker.record.checkpoint.json_state import unpack
from pipeworker.record.checkpoint.manifest import Manifest, describe_file, file_names
from pipeworker.record.checkpoint.snapshot_buffer import SnapshotBuffer
from pipeworker.record.checkpoint.snapshot_memory import SnapshotMemory, write_files
from pipeworker.record.checkpoint.stage_state import OptimizerState, StageState
from pipeworker.record.checkpoint.tensor_file import TensorFile
from pipeworker.record.files.atomic_file import write_json
from pipeworker.record.rundir import RunDir


def part(
    layers: Sequence[nn.Module],
    first: int,
    optimizer: torch.optim.Optimizer | None = None,
    schedule: object = None,
) -> StageState:
    """Return the state of a stage that begins with layer `first`; layers are named by index."""
    names = LayerNames.numbered(first + len(layers))
    states = [layer.state_dict() for layer in layers]
    updates = [OptimizerState(optimizer, schedule)] if optimizer else []
    return StageState(names, layers, states, updates, first=first)


def complete(run: RunDir, step: int, **fields: Any) -> Path:
    """Write a checkpoint whose files have any content, and a matching manifest."""
    path = run.checkpoints.at(step)
    path.mkdir(parents=True)
    for name in file_names(0, 1):
        (path / name).write_bytes(f"{name} of step {step}".encode() * 100)
    files = tuple(describe_file(path / name) for name in file_names(0, 1))
    write_json(
        path / "manifest.json", Manifest(step, 1, LayerNames.numbered(1), files, **fields).to_json()
    )
    return path


def save_worker_files(
    folder: Path,
    rank: int,
    ranks: int,
    stages: Sequence[StageState],
    elsewhere: Collection[int] = (),
    position: Mapping[str, Any] | None = None,
) -> tuple[CheckpointFile, ...]:
    """Write the files of a worker, one of `ranks` that write."""
    folder.parent.parent.mkdir(exist_ok=True)  # the run directory
    memory = SnapshotMemory()
    try:
        SnapshotBuffer(memory).fill(0, stages, elsewhere, position)
        return write_files(memory.handles, folder, file_names(rank, ranks))
    finally:
        memory.close()


def optimizer_state(path: Path) -> dict[str, dict[str, Any]]:
    """Return the state of all optimizers of a checkpoint by the parameter's name."""
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    found: dict[str, dict[str, Any]] = {}
    for files in checkpoint.worker_files():
        tensors = TensorFile(files.optimizer)
        for update in read_plain(files.state)["updates"]:
            found |= {name: unpack(v, tensors) for name, v in update["state"].items()}
    return found
