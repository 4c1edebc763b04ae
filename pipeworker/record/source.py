"""Where weights are that others wrote: one file, or several with an index. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.record.manifest import INDEX, NAME, Manifest
from pipeworker.record.rundir import RunDir, find

SAFE, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
"""How the names of files end."""
_ONE = "model.safetensors"
_MOST_INDEX = 256 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """Weights by name.

    Attributes:
        path: what was named.
        files: that have them.
        where: by name the file, as an index says; None where the files themselves must be asked.
    """

    path: Path
    files: tuple[Path, ...]
    where: Mapping[str, Path] | None = None


def look(path: Path) -> Source:
    """What a path stands for: a file, an index, or a folder with one of them or a checkpoint.

    Raises:
        UsageError: it is not there, or it is something else.
    """
    try:
        return _look(path)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or path}: {error.strerror}") from None


def _look(path: Path) -> Source:
    if not path.is_dir():
        return _index(path) if path.suffix == ".json" else Source(path, (_file(path),))
    if (path / NAME).is_file() or RunDir(path).checkpoints.is_dir():
        checkpoint = find(path)
        manifest = Manifest.read(checkpoint / NAME)
        files = [file for file in manifest.files if file.name.startswith("model-")]
        return Source(path, tuple(manifest.there(checkpoint, file) for file in files))
    if (path / INDEX).is_file():
        return _index(path / INDEX)
    if not (path / _ONE).exists():
        raise UsageError(
            f"cannot read {path}: it has no {INDEX}, no {_ONE} and no checkpoint of a run"
        )
    return Source(path, (_file(path / _ONE),))


def _file(path: Path) -> Path:
    if path.suffix not in (*SAFE, *PICKLED):
        ends = ", ".join((*SAFE, *PICKLED))
        raise UsageError(f"cannot read {path}: its name must end in {ends}, or it is a folder")
    path.stat()
    if not path.is_file():
        raise UsageError(f"cannot read {path}: it is not a file")
    return path


def _index(path: Path) -> Source:
    """As Hugging Face writes it: in `weight_map`, by name the file beside it."""
    with path.open("rb") as file:
        text = file.read(_MOST_INDEX + 1)
    try:
        found: Any = json.loads(text.decode()) if len(text) <= _MOST_INDEX else None
        names: dict[str, str] = found["weight_map"]
        where = {name: path.with_name(file) for name, file in names.items()}  # no other folder
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise UsageError(f"cannot read {path}: it is not the index of a model's files") from None
    files = tuple(_file(file) for file in dict.fromkeys(where.values()))
    return Source(path, files, where)
