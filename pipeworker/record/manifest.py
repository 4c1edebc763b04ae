"""What a checkpoint consists of: its files' names, and ``manifest.json``. Imports no torch.

A manifest is read as a file that anybody may have made: no name in it becomes a path unless it is
one of ours.
"""

from __future__ import annotations

import json
import re
import reprlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeworker.errors import UsageError
from pipeworker.wire.messages.checkpoint import File

VERSION = 2
NAME = "manifest.json"
INDEX = "model.safetensors.index.json"
_MOST_BYTES = 16 << 20
_MOST_HEADER = 100 << 20
_CHUNK = 1 << 20
_SUM = "crc32"
_NAME = re.compile(r"(model|optimizer|state)-\d{5,9}-of-\d{5,9}\.(safetensors|json)")


def file_names(rank: int, ranks: int) -> tuple[str, str, str]:
    """Of what a worker writes: weights, the tensors of all other state, the rest of it.

    The weights are named as Hugging Face names the shards of a model.
    """
    which = f"{rank + 1:05}-of-{ranks:05}"
    return f"model-{which}.safetensors", f"optimizer-{which}.safetensors", f"state-{which}.json"


@dataclass(frozen=True, slots=True)
class Shard:
    """What one worker wrote: three files."""

    model: Path
    optimizer: Path
    state: Path


def described(path: Path) -> File:
    """A file that is written, by its size and checksum.

    Raises:
        OSError: it cannot be read.
    """
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return File(path.name, size, checksum)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is needed to put a checkpoint together.

    Attributes:
        stages: that there were.
        layers: their names, in order.
        files: of all workers.
        ties: by tied parameter, its names; the first one is in a file.
        scaler: the state of the loss scale, with fp16.
        evaluation: the row of the pass after exactly this step, if there was one.
    """

    step: int
    stages: int
    layers: tuple[str, ...]
    files: tuple[File, ...]
    ties: tuple[tuple[str, ...], ...] = ()
    scaler: dict[str, Any] | None = None
    evaluation: dict[str, float] | None = None

    def to_json(self) -> dict[str, Any]:
        content = {
            "version": VERSION,
            "step": self.step,
            "stages": self.stages,
            "layers": list(self.layers),
            "files": {f.name: {"bytes": f.bytes, "crc32": f.crc32} for f in self.files},
            **({"ties": [list(names) for names in self.ties]} if self.ties else {}),
            **({"scaler": self.scaler} if self.scaler else {}),
            **({"evaluation": self.evaluation} if self.evaluation else {}),
        }
        return {**content, _SUM: _sum(content)}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Every field checked.

        Raises:
            UsageError: it is no manifest, one of another version, or damaged.
            OSError: it cannot be read.
        """
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        try:
            found: Any = json.loads(text.decode()) if len(text) <= _MOST_BYTES else None
            whole = isinstance(found, dict) and found.get(_SUM) in (None, _sum(found))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UsageError(f"cannot read {path}: it is not the manifest of a checkpoint")
        version = found.get("version")
        if type(version) is not int or version != VERSION:
            shown = f"version {reprlib.repr(version)}, this pipeworker reads version {VERSION}"
            raise UsageError(f"cannot read {path}: it is of {shown}")
        for key, fits in _FIELDS.items():
            value = found.setdefault(key, [] if key == "ties" else None)
            if not fits(value):
                raise UsageError(f"cannot read {path}: {key} is {reprlib.repr(value)}")
        if not whole:
            raise UsageError(f"cannot read {path}: it is damaged (its checksum is another one)")
        return cls(
            found["step"],
            found["stages"],
            tuple(found["layers"]),
            tuple(File(n, f["bytes"], f["crc32"]) for n, f in found["files"].items()),
            tuple(map(tuple, found["ties"])),
            found["scaler"],
            found["evaluation"],
        )

    def check_files(self, folder: Path, kind: str = "") -> None:
        """That those of a kind, as ``model``, or all, are there and none is damaged.

        Raises:
            UsageError: one is missing or damaged; it is named.
            OSError: one cannot be read.
        """
        found = [file for file in self.files if file.name.startswith(kind)]
        for path, file in [(self.there(folder, file), file) for file in found]:
            if described(path) != file:
                raise UsageError(f"cannot read {path}: it is damaged (its checksum is another one)")

    def there(self, folder: Path, file: File) -> Path:
        """Where a file is, if it is, with the right size.

        Raises:
            as :meth:`check_files`.
        """
        path = folder / file.name
        if not path.exists():
            raise UsageError(
                f"{path} is missing: the stage wrote it on another host; copy it here and try again"
            )
        if not path.is_file():
            raise UsageError(f"cannot read {path}: it is not a file")
        size = path.stat().st_size
        if size != file.bytes:
            raise UsageError(f"cannot read {path}: it has {size} bytes, not {file.bytes}")
        return path


def _sum(content: dict[str, Any]) -> int:
    """The checksum of all else that a manifest says, however it is laid out."""
    said = {key: value for key, value in content.items() if key != _SUM}
    return zlib.crc32(json.dumps(said).encode())


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_sum(value: Any) -> bool:
    return _is_count(value) and value < 1 << 32


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(name) is str for name in value)


def _are_layers(value: Any) -> bool:
    return _are_names(value) and len({*value}) == len(value) and not any("." in n for n in value)


def _are_files(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(map(_NAME.fullmatch, value))
        and all(
            isinstance(file, dict) and _is_count(file.get("bytes")) and _is_sum(file.get("crc32"))
            for file in value.values()
        )
    )


def _are_ties(value: Any) -> bool:
    return isinstance(value, list) and all(map(_are_names, value))


def _is_scaler(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _is_evaluation(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and all(type(figure) is float or _is_count(figure) for figure in value.values())
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "stages": _is_count,
    "layers": _are_layers,
    "files": _are_files,
    "ties": _are_ties,
    "scaler": _is_scaler,
    "evaluation": _is_evaluation,
}


def index_of(folder: Path, files: Sequence[File]) -> dict[str, Any] | None:
    """Which weight is in which file, as tools that read Hugging Face's layout want to know.

    None where a file is not there: its stage wrote it on another host.

    Raises:
        OSError: a file cannot be read.
        ValueError: it is not what a stage writes.
    """
    where: dict[str, str] = {}
    size = 0
    for file in files:
        if file.name.startswith("model-"):
            path = folder / file.name
            if not path.exists():
                return None
            try:
                sizes = _sizes(path)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"{path} is not what a stage writes") from None
            where |= dict.fromkeys(sizes, file.name)
            size += sum(sizes.values())
    return {"metadata": {"total_size": size}, "weight_map": where}


def _sizes(path: Path) -> dict[str, int]:
    """The bytes of each tensor, by name, as the header of a safetensors file has it."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MOST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        found[name] = last - first
    return found
