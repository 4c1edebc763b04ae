"""A stage's part of a checkpoint, and one plain weights file made from all of them.

A checkpoint is a folder with ``manifest.json`` and a file ``stage-0.pt``, ... a stage. Keys of
weights are those of ``nn.Sequential(*layers).state_dict()``; optimizer state is kept by parameter
name, so that it does not depend on how layers were grouped. No file needs pickle to be read, and no
name in a file becomes a path: whoever wrote it, reading it gives weights or a message.
"""

from __future__ import annotations

import os
import pickle
import re
import reprlib
import secrets
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from pipeworker.errors import RecordError, UsageError
from pipeworker.record.manifest import Manifest

_ZIP = b"PK\x03\x04"
_WEIGHT = re.compile(r"[0-9]{1,9}\..+", re.DOTALL)
"""The name of a weight: the index of a layer, and its name there."""


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

    Raises:
        RecordError: the file cannot be written.
    """
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for part in parts:
        weights |= part.weights
        its_state, its_groups = part.state(elsewhere)
        state |= its_state
        groups += its_groups
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            torch.save({"weights": weights, "optimizer": {"state": state, "groups": groups}}, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(path, error) from None
    except RuntimeError as error:  # torch's writer hides the system's
        if isinstance(error.__context__, OSError):
            raise RecordError(path, error.__context__) from None
        raise


def find_checkpoint(source: Path) -> Path:
    """The checkpoint itself, or the last complete one of a run directory.

    Raises:
        UsageError: there is none.
        OSError: a directory cannot be read.
    """
    if (source / "manifest.json").is_file():
        return source
    folder = source / "checkpoints"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    complete = [
        path for path in found if path.match("step-*") and (path / "manifest.json").is_file()
    ]
    if not complete:
        raise UsageError(
            f"{source} has no complete checkpoint: give the directory of a finished run, or one of "
            "its checkpoints"
        )
    return complete[-1]


def export(source: Path, out: Path) -> int:
    """Write the weights of a run or checkpoint as one ``.safetensors`` or ``.pt`` file.

    It is there, whole, when this returns; else what was there before is as it was.

    Returns:
        How many tensors were written.

    Raises:
        UsageError: there is no complete checkpoint, or it cannot be read; the file's ending is
            another one, or it cannot be written.
    """
    if out.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"cannot write {out}: its name must end in .safetensors or .pt")
    try:
        if not out.parent.is_dir():
            raise UsageError(f"cannot write {out}: there is no directory {out.parent}")
        if out.is_dir():
            raise UsageError(f"cannot write {out}: it is a directory")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {_reason(error)}") from None
    try:
        weights = _read(find_checkpoint(source), out)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or source}: {_reason(error)}") from None
    partial = out.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            try:
                _write(weights, file, partial, out.suffix)
                partial.replace(out)
            except BaseException:
                partial.unlink()
                raise
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot write {out}: {_reason(error)}") from None
    return len(weights)


def _read(checkpoint: Path, out: Path) -> dict[str, torch.Tensor]:
    """All weights, in model order, wherever the stages were."""
    manifest = Manifest.read(checkpoint / "manifest.json")
    weights: dict[str, torch.Tensor] = {}
    for path in _part_files(checkpoint, manifest.parts):
        if out.exists() and out.samefile(path):
            raise UsageError(f"cannot write {out}: it is a part of the checkpoint")
        part = _read_part(path)
        if twice := weights.keys() & part.keys():
            shown = reprlib.repr(min(twice))
            raise UsageError(f"cannot read {path}: {shown} is in another part as well")
        weights |= part
    for first, *others in manifest.ties:
        for name in (first, *others):
            if first not in weights or not _WEIGHT.fullmatch(name):
                shown = reprlib.repr(name)
                raise UsageError(f"cannot read {checkpoint}: no part has {shown}, a tied weight")
            weights[name] = weights[first]
    return dict(sorted(weights.items(), key=lambda item: int(item[0].partition(".")[0])))


def _part_files(checkpoint: Path, parts: int) -> list[Path]:
    """All of them, before the first is read."""
    found: list[Path] = []
    for rank in range(parts):
        path = part_file(checkpoint, rank)
        if not path.exists():
            raise UsageError(
                f"{path} is missing: the stage wrote it on another host; copy it here and try again"
            )
        if not path.is_file():
            raise UsageError(f"cannot read {path}: it is not a file")
        found.append(path)
    return found


def _read_part(path: Path) -> dict[str, torch.Tensor]:
    """The weights of a part. Only tensors and plain values are made of what the file says."""
    with path.open("rb") as file:
        if file.read(len(_ZIP)) != _ZIP:  # torch would try older formats: bare pickles
            raise UsageError(f"cannot read {path}: it is not what a stage writes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other kinds of files, which are refused
            part = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its text advises to trust the file
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{refused[1]}, which" if refused else "what"
        shown = f"it holds {what} is neither a tensor nor a plain value"
        raise UsageError(f"cannot read {path}: {shown}") from None
    except Exception as error:  # of any kind: torch trusts the form of what it reads
        raise UsageError(f"cannot read {path}: it is damaged ({_reason(error)})") from None
    weights = part.get("weights") if isinstance(part, dict) else None
    if not isinstance(weights, dict):
        raise UsageError(f"cannot read {path}: it has no weights")
    for name, value in weights.items():
        named = isinstance(name, str) and _WEIGHT.fullmatch(name)
        if not named or not isinstance(value, torch.Tensor):
            shown = f"{reprlib.repr(name)} is not a weight of a layer"
            raise UsageError(f"cannot read {path}: {shown}")
    return dict(weights)


def _write(weights: Mapping[str, torch.Tensor], file: IO[bytes], path: Path, suffix: str) -> None:
    """Fill a new file; on disk when this returns."""
    if suffix == ".pt":
        torch.save(weights, file)
        file.flush()
    else:
        # The format knows neither entries that share memory nor strides.
        layout = torch.contiguous_format
        try:
            save_file({k: v.clone(memory_format=layout) for k, v in weights.items()}, path)
        except (KeyError, RuntimeError) as error:  # sparse, quantized, complex128, ...
            said = f"the format does not know such a tensor ({_reason(error)}); .pt does"
            raise ValueError(said) from None
    os.fsync(file.fileno())


def _reason(error: Exception) -> str:
    """In a line that a terminal can show: a file may have a say in it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    shown = "".join(c if c.isprintable() else " " for c in str(error)[:200].partition("\n")[0])
    return shown or type(error).__name__
