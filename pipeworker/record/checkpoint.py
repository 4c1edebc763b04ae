"""A worker's part of a checkpoint, and what all of them together hold.

A checkpoint is a folder with ``manifest.json`` and three files a worker: weights and the other
tensors as safetensors, everything else as JSON. Keys of weights are those of the user's own module,
``model().state_dict()``; the state of optimizers is kept by the same names, so that nothing depends
on how layers were grouped. The weights and their index are laid out as Hugging Face does it.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from pipeworker.errors import RecordError, UsageError
from pipeworker.record.manifest import NAME, Manifest, described, file_names
from pipeworker.record.plain import Refused, Tensors, as_complex, pack, unpack
from pipeworker.wire.messages import File

_HEADER = {"format": "pt"}
_NAMES, _COMPLEX = "names", "complex128"
"""In the header: the order of names, which the format loses, and which weights are complex."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stage: its layers, their names and state dicts, its optimizer, its scheduler's state."""

    names: Sequence[str]
    layers: Sequence[nn.Module]
    states: Sequence[Mapping[str, Any]]
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None

    def entries(self) -> dict[str, Any]:
        """Of the state dicts, by the names they have in the whole module's."""
        return {
            f"{name}.{key}": value
            for name, state in zip(self.names, self.states, strict=True)
            for key, value in state.items()
        }

    def update(self, elsewhere: Collection[int], tensors: Tensors) -> dict[str, Any] | None:
        """The optimizer's state and groups, by the names of parameters, and the scheduler's."""
        if self.optimizer is None:
            return None
        names = {
            id(parameter): f"{name}.{key}"
            for name, layer in reversed(list(zip(self.names, self.layers, strict=True)))
            for key, parameter in layer.named_parameters()
            if id(parameter) not in elsewhere
        }
        for key in self.optimizer.state:
            if not isinstance(key, torch.Tensor):
                raise UsageError(
                    f"the optimizer's state has the key {key!r:.80}, which is no parameter: a "
                    "checkpoint keeps state by parameter"
                )
        state = {names[id(p)]: v for p, v in self.optimizer.state.items() if id(p) in names}
        groups = [
            {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in self.optimizer.param_groups
        ]
        packed = {
            "state": {name: pack(value, tensors, name) for name, value in state.items()},
            "groups": pack(groups, tensors, "optimizer/groups"),
        }
        if self.scheduler is not None:
            packed["scheduler"] = pack(self.scheduler, tensors, "scheduler")
        return packed


@dataclass(slots=True)
class _Content:
    """What the files of a worker hold."""

    weights: Tensors = field(default_factory=dict)
    others: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    complex: list[str] = field(default_factory=list)  # weights, kept as pairs of real numbers


def _content(parts: Sequence[Part], elsewhere: Collection[int]) -> _Content:
    content = _Content()
    extra: dict[str, Any] = {}
    for part in parts:
        for name, value in part.entries().items():
            held: Tensors = {}
            packed = pack(value, held, name)
            if packed == {"$tensor": name}:
                content.weights[name] = held[name]
            elif packed == {"$complex": name}:
                content.weights[name] = held[name]
                content.complex.append(name)
            else:
                extra[name] = pack(value, content.others, name)
    updates = [part.update(elsewhere, content.others) for part in parts]
    content.plain = {"extra": extra, "updates": [u for u in updates if u is not None]}
    return content


def check(parts: Sequence[Part], elsewhere: Collection[int] = ()) -> None:
    """Refuse at once what could not be saved later.

    Raises:
        UsageError: a state holds something else than tensors and plain values; it is named.
    """
    _content(parts, elsewhere)


def save_part(
    folder: Path,
    rank: int,
    ranks: int,
    parts: Sequence[Part],
    elsewhere: Collection[int] = (),
) -> tuple[File, ...]:
    """Write what a worker's stages hold; on disk when this returns.

    Args:
        elsewhere: ids of parameters whose optimizer state another stage writes.

    Raises:
        RecordError: a file cannot be written.
        UsageError: a state holds something else than tensors and plain values.
    """
    content = _content(parts, elsewhere)
    model, optimizer, state = (folder / name for name in file_names(rank, ranks))
    path = model
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, tensors in ((model, content.weights), (optimizer, content.others)):
            more = {_NAMES: json.dumps(list(tensors))}
            if path is model:
                more[_COMPLEX] = json.dumps(content.complex)
            path.touch()
            mode = path.stat().st_mode  # what others may read, the umask says, not the library
            save_file(_apart(tensors), path, {**_HEADER, **more})
            path.chmod(mode)
        path = state
        state.write_text(json.dumps(content.plain), encoding="utf-8")
        for path in (model, optimizer, state):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return tuple(map(described, (model, optimizer, state)))
    except OSError as error:
        raise RecordError(path, error) from None
    except SafetensorError as error:
        raise RecordError(path, _of_the_system(error)) from None


def _apart(tensors: Tensors) -> Tensors:
    """On the CPU, dense, each with memory of its own: the format knows nothing else."""
    found: Tensors = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu()
        storage = value.untyped_storage()
        whole = storage.nbytes() == value.nbytes and value.is_contiguous()
        if not whole or storage.data_ptr() in seen:
            value = value.clone(memory_format=torch.contiguous_format)
        seen.add(value.untyped_storage().data_ptr())
        found[name] = value
    return found


def _of_the_system(error: SafetensorError) -> Exception:
    """The library hides the system's error in a text."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else error


def find(source: Path) -> Path:
    """The checkpoint itself, or the last complete one of a run directory.

    Raises:
        UsageError: there is none.
        OSError: a directory cannot be read.
    """
    if (source / NAME).is_file():
        return source
    folder = source / "checkpoints"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    complete = [path for path in found if path.match("step-*") and (path / NAME).is_file()]
    if not complete:
        raise UsageError(
            f"{source} has no complete checkpoint: give the directory of a finished run, or one of "
            "its checkpoints"
        )
    return complete[-1]


class Checkpoint:
    """A complete checkpoint, which anybody may have made: what is damaged is named.

    Raises:
        UsageError: it cannot be read.
        OSError: the system does not let it be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / NAME)

    def files(self, kind: str) -> list[Path]:
        """Those of a kind, as ``model``: all there, none damaged."""
        found = [file for file in self.manifest.files if file.name.startswith(f"{kind}-")]
        paths = [self.path / file.name for file in found]
        for path in paths:
            if not path.exists():
                raise UsageError(
                    f"{path} is missing: the stage wrote it on another host; copy it here and try "
                    "again"
                )
            if not path.is_file():
                raise UsageError(f"cannot read {path}: it is not a file")
        for path, file in zip(paths, found, strict=True):
            size = path.stat().st_size
            if size != file.bytes:
                raise UsageError(f"cannot read {path}: it has {size} bytes, not {file.bytes}")
            if described(path) != file:
                raise UsageError(f"cannot read {path}: it is damaged (its checksum is another one)")
        return paths

    def weights(self) -> Tensors:
        """All weights, in model order, tied ones under each of their names."""
        found: Tensors = {}
        order = {name: number for number, name in enumerate(self.manifest.layers)}
        for path in self.files("model"):
            tensors = _tensors(path)
            for name in tensors:
                if name.partition(".")[0] not in order:
                    shown = f"{reprlib.repr(name)} is not a weight of a layer"
                    raise UsageError(f"cannot read {path}: {shown}")
                if name in found:
                    shown = f"{reprlib.repr(name)} is in another part as well"
                    raise UsageError(f"cannot read {path}: {shown}")
            found |= tensors
        for first, *others in self.manifest.ties:
            for name in (first, *others):
                if first not in found or name.partition(".")[0] not in order:
                    shown = reprlib.repr(name)
                    text = f"cannot read {self.path}: no part has {shown}, a tied weight"
                    raise UsageError(text)
                found[name] = found[first]
        return dict(sorted(found.items(), key=lambda item: order[item[0].partition(".")[0]]))

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Of all optimizers, by the name of the parameter."""
        found: dict[str, dict[str, Any]] = {}
        for path, plain, tensors in self._states:
            for update in plain["updates"]:
                try:
                    found |= {name: unpack(v, tensors) for name, v in update["state"].items()}
                except (Refused, KeyError, TypeError, AttributeError) as error:
                    raise UsageError(f"cannot read {path}: {error}") from None
        return found

    @cached_property
    def _states(self) -> list[tuple[Path, dict[str, Any], Tensors]]:
        found = []
        paths, others = self.files("state"), self.files("optimizer")
        if len(paths) != len(others):
            raise UsageError(f"cannot read {self.path}: files of state and optimizers do not match")
        for path, other in zip(paths, others, strict=True):
            try:
                plain = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError):
                plain = None
            known = isinstance(plain, dict) and isinstance(plain.get("extra"), dict)
            if not known or not isinstance(plain.get("updates"), list):
                raise UsageError(f"cannot read {path}: it is not what a stage writes")
            found.append((path, plain, _tensors(other)))
        return found


def _tensors(path: Path) -> Tensors:
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            names, complex_ = (json.loads(header.get(key, "[]")) for key in (_NAMES, _COMPLEX))
            if sorted(names) != sorted(file.keys()):
                raise ValueError("its header does not match what it holds")
            found = {name: file.get_tensor(name) for name in names}
            return found | {name: as_complex(found[name]) for name in complex_}
    except (SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise UsageError(f"cannot read {path}: it is damaged ({error!s:.200})") from None
