"""A stage's part of a checkpoint, and one plain weights file made from all of them.

A checkpoint is a folder with ``manifest.json`` and a file ``stage-0.pt``, ... a stage. Keys of
weights are those of ``nn.Sequential(*layers).state_dict()``; optimizer state is kept by parameter
name, so that it does not depend on how layers were grouped. No file needs pickle to be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from pipeworker.errors import UsageError


def part_file(checkpoint: Path, rank: int) -> Path:
    """What a worker writes; named by its stage, as long as it holds one."""
    return checkpoint / f"stage-{rank}.pt"


@dataclass(frozen=True, slots=True)
class Part:
    """The layers of a stage, from index `first` on, their state dicts, and its optimizer."""

    layers: Sequence[nn.Module]
    first: int
    states: Sequence[Mapping[str, Any]]
    optimizer: torch.optim.Optimizer | None

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{index}.{key}": value.detach().cpu()
            for index, state in enumerate(self.states, self.first)
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def state(self, elsewhere: Collection[int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The optimizer's state and groups, by the names of parameters."""
        if self.optimizer is None:
            return {}, []
        names = {
            id(parameter): f"{index}.{key}"
            for index, layer in reversed(list(enumerate(self.layers, self.first)))
            for key, parameter in layer.named_parameters()
            if id(parameter) not in elsewhere
        }
        state = {names[id(p)]: v for p, v in self.optimizer.state.items() if id(p) in names}
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in self.optimizer.param_groups
        ]
        return state, groups


def save_part(path: Path, parts: Sequence[Part], elsewhere: Collection[int] = ()) -> None:
    """Write the weights and optimizer state of a worker's stages; on disk when this returns.

    Args:
        elsewhere: ids of parameters whose optimizer state another stage writes.
    """
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for part in parts:
        weights |= part.weights
        its_state, its_groups = part.state(elsewhere)
        state |= its_state
        groups += its_groups
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        torch.save({"weights": weights, "optimizer": {"state": state, "groups": groups}}, file)
        file.flush()
        os.fsync(file.fileno())


def find_checkpoint(source: Path) -> Path:
    """The checkpoint itself, or the last complete one of a run directory.

    Raises:
        UsageError: there is none.
    """
    if (source / "manifest.json").is_file():
        return source
    complete = sorted(source.glob("checkpoints/step-*/manifest.json"))
    if not complete:
        raise UsageError(
            f"{source} has no complete checkpoint: give the directory of a finished run, or one of "
            "its checkpoints"
        )
    return complete[-1].parent


def read_manifest(path: Path) -> tuple[int, list[list[str]]]:
    """How many parts a checkpoint has, and the names of tied weights.

    Raises:
        UsageError: it says neither.
    """
    damaged = UsageError(f"{path} is damaged: take another checkpoint")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged from error
    if type(manifest) is not dict:
        raise damaged
    # Where a checkpoint does not say its parts, there is one of each stage.
    parts = manifest.get("parts", manifest.get("stages"))
    ties = manifest.get("ties", [])
    if type(parts) is not int or parts < 1 or type(ties) is not list:
        raise damaged
    for names in ties:
        if type(names) is not list or not names or set(map(type, names)) != {str}:
            raise damaged
    return parts, ties


def export(source: Path, out: Path) -> int:
    """Write the weights of a run or checkpoint as one ``.safetensors`` or ``.pt`` file.

    Returns:
        How many tensors were written.

    Raises:
        UsageError: there is no complete checkpoint, or the file's ending is another one.
    """
    if out.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"cannot write {out}: its name must end in .safetensors or .pt")
    if not out.parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no directory {out.parent}")
    checkpoint = find_checkpoint(source)
    parts, ties = read_manifest(checkpoint / "manifest.json")
    weights: dict[str, torch.Tensor] = {}
    for rank in range(parts):
        path = part_file(checkpoint, rank)
        if not path.is_file():
            raise UsageError(
                f"{path} is missing: the stage wrote it on another host; copy it here and try again"
            )
        weights.update(torch.load(path, weights_only=True)["weights"])
    for first, *others in ties:
        weights.update((name, weights[first]) for name in others)
    # In model order, wherever the stages were.
    weights = dict(sorted(weights.items(), key=lambda item: int(item[0].partition(".")[0])))
    partial = out.with_name(f".{out.name}.partial")
    try:
        if out.suffix == ".pt":
            torch.save(weights, partial)
        else:
            # The format knows neither entries that share memory nor strides.
            layout = torch.contiguous_format
            save_file({k: v.clone(memory_format=layout) for k, v in weights.items()}, partial)
        partial.replace(out)
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot write {out}: {reason}") from None
    finally:
        partial.unlink(missing_ok=True)
    return len(weights)
