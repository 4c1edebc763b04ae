"""Files of weights: one file, several with an index, or a checkpoint. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipeworker.errors import UsageError
from pipeworker.record.manifest import MANIFEST, WEIGHTS_INDEX, Manifest
from pipeworker.record.rundir import RunDir, find_checkpoint

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
"""The endings of the files' names, by format."""
_SINGLE = "model.safetensors"
_MOST_INDEX_BYTES = 256 << 20


class _Index(msgspec.Struct):
    """An index as Hugging Face writes it: the file of each weight, in the index's own folder."""

    weight_map: dict[str, str]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold a model's weights, and their index, the file of each weight, if any."""

    files: tuple[Path, ...]
    index: Mapping[str, Path] | None = None


def find_weight_files(path: Path) -> WeightFiles:
    """Find the files of a path: a file, an index, or a folder with one of them or a checkpoint.

    Raises:
        UsageError: the path does not exist, or is something else.
    """
    try:
        return _find(path)
    except OSError as error:
        raise UsageError(f"--init-from {error.filename or path}: {error.strerror}") from None


def _find(path: Path) -> WeightFiles:
    if not path.is_dir():
        return _indexed(path) if path.suffix == ".json" else WeightFiles((_file(path),))
    if (path / MANIFEST).is_file() or RunDir(path).checkpoints.is_dir():
        checkpoint = find_checkpoint(path)
        manifest = Manifest.read(checkpoint / MANIFEST)
        files = [file for file in manifest.files if file.name.startswith("model-")]
        return WeightFiles(tuple(manifest.locate(checkpoint, file) for file in files))
    if (path / WEIGHTS_INDEX).is_file():
        return _indexed(path / WEIGHTS_INDEX)
    if not (path / _SINGLE).exists():
        raise UsageError(
            f"--init-from {path}: it has no {WEIGHTS_INDEX}, no {_SINGLE} and no checkpoint of a "
            "run; name a file of weights, or a folder with one of these"
        )
    return WeightFiles((_file(path / _SINGLE),))


def _file(path: Path) -> Path:
    path.stat()
    ends = (*SAFETENSORS, *PICKLED)
    if path.suffix not in ends or not path.is_file():
        raise UsageError(
            f"--init-from {path}: not a file of weights; name a folder, or a file that ends in "
            f"{', '.join(ends)}"
        )
    return path


def _indexed(path: Path) -> WeightFiles:
    with path.open("rb") as file:
        text = file.read(_MOST_INDEX_BYTES + 1)
    try:
        content: Any = json.loads(text.decode()) if len(text) <= _MOST_INDEX_BYTES else None
        names = msgspec.convert(content, _Index).weight_map
        index = {name: path.with_name(file) for name, file in names.items()}  # no other folder
    except (ValueError, RecursionError):
        raise UsageError(
            f"--init-from {path}: not the index of a model's files; save the model again"
        ) from None
    files = tuple(_file(file) for file in dict.fromkeys(index.values()))
    return WeightFiles(files, index)
