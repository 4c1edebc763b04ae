"""The files of a checkpoint: their names, and ``manifest.json``. Imports no torch.

A manifest is read as a file that anybody may have written: no name in it becomes a path unless it
has the form of :func:`file_names`.
"""

from __future__ import annotations

import json
import reprlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
from msgspec import Meta

from pipeworker.errors import ProtocolError, UnreadableFile, UsageError
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.facts.layer_names import LayerNames
from pipeworker.record.files.bounded_file import read_json

VERSION = 3
_READABLE = (2, VERSION)
MANIFEST = "manifest.json"
ANOTHER = "use another checkpoint"
"""The remedy in errors about a checkpoint that cannot be read."""
WEIGHTS_INDEX = "model.safetensors.index.json"
_MOST_HEADER = 100 << 20
_CHUNK = 1 << 20
_CHECKSUM = "crc32"
_NAME = r"^(model|optimizer|state)-[0-9]{5,9}-of-[0-9]{5,9}(-frozen)?\.(safetensors|json)\Z"


def file_names(rank: int, ranks: int) -> tuple[str, str, str]:
    """Return the names of a worker's files: weights, the tensors of all other state, the rest.

    The weights are named as Hugging Face names the shards of a model.
    """
    which = f"{rank + 1:05}-of-{ranks:05}"
    return f"model-{which}.safetensors", f"optimizer-{which}.safetensors", f"state-{which}.json"


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """The files that one worker wrote; frozen weights are in one of their own, if there are any."""

    model: Path
    optimizer: Path
    state: Path
    frozen: Path | None = None

    @property
    def weights(self) -> list[Path]:
        """The files with weights."""
        return [self.model, *([self.frozen] if self.frozen is not None else [])]


def describe_file(path: Path) -> CheckpointFile:
    """Return the name, size and checksum of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return CheckpointFile(path.name, size, checksum)


_Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
_Name = Annotated[str, Meta(pattern=_NAME)]
_Names = Annotated[tuple[str, ...], Meta(min_length=1)]


class _FileEntry(msgspec.Struct):
    bytes: _Count
    crc32: Annotated[int, Meta(ge=0, lt=1 << 32)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description of a complete checkpoint: the state after the optimizer step `step`.

    Attributes:
        stages: the number of stages that saved it.
        ties: for each tied parameter all its names; a file has it under the first one.
        scaler: the state of the loss scale, with fp16.
        evaluation: the row of the evaluation pass after exactly this step, if there was one.
        epoch: the epochs that a user's own loop had ended.
        evaluation_due: whether an evaluation pass after this step was interrupted, or not begun.
    """

    step: _Count
    stages: _Positive
    layers: LayerNames
    files: tuple[CheckpointFile, ...]
    ties: tuple[_Names, ...] = ()
    scaler: dict[str, Any] | None = None
    evaluation: dict[str, _Count | float] | None = None
    epoch: _Count = 0
    evaluation_due: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``manifest.json``."""
        optional = {
            "ties": self.ties,
            "scaler": self.scaler,
            "evaluation": self.evaluation,
            "epoch": self.epoch,
            "evaluation_due": self.evaluation_due,
        }
        content = {
            "version": VERSION,
            "step": self.step,
            "stages": self.stages,
            "layers": self.layers.prefixes,
            "files": {f.name: {"bytes": f.bytes, "crc32": f.crc32} for f in self.files},
            **{name: value for name, value in optional.items() if value},
        }
        return {**content, _CHECKSUM: _checksum(content)}

    @property
    def checksum(self) -> int:
        """The checksum of all that it holds, the checksums of the files included."""
        found: int = self.to_json()[_CHECKSUM]
        return found

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read and check ``manifest.json``.

        Raises:
            UsageError: the file is not a manifest, has another version, or is damaged.
        """
        what = "it is not the manifest of a checkpoint"
        content = read_json(path, dict, what, ANOTHER, versions=_READABLE)
        try:
            found = {name: _field(name, kind, content) for name, kind in _FIELDS.items()}
            found["layers"] = LayerNames(found["layers"])
            whole = content.get(_CHECKSUM) in (None, _checksum(content))
        except (msgspec.ValidationError, RecursionError) as error:
            raise invalid(path, error) from None
        except ProtocolError as error:
            layers = reprlib.repr(content["layers"])
            raise invalid(path, f"layers is {layers} ({error})") from None
        if not whole:
            raise _damaged(path, "its checksum does not match what it holds")
        files = found.pop("files").items()
        return cls(files=tuple(CheckpointFile(n, f.bytes, f.crc32) for n, f in files), **found)

    def check_files(self, folder: Path, kind: str = "") -> None:
        """Check the checksums of the files in `folder` whose names begin with `kind`.

        Raises:
            UsageError: a file is missing or damaged.
        """
        for file in self.files:
            if file.name.startswith(kind):
                path = self.locate(folder, file)
                if describe_file(path) != file:
                    raise _damaged(path, "its checksum does not match the manifest")

    def locate(self, folder: Path, file: CheckpointFile) -> Path:
        """Return the path of a file, which is there and has the right size.

        Raises:
            UsageError: the file is missing, or has another size.
        """
        path = folder / file.name
        if not path.exists():
            raise UsageError(
                f"{path}: is missing; if a worker on another host wrote it, copy it here; else "
                f"{ANOTHER}"
            )
        if not path.is_file():
            raise invalid(path, "it is not a file")
        size = path.stat().st_size
        if size != file.bytes:
            raise _damaged(path, f"it has {size} bytes, not {file.bytes}")
        return path


_FIELDS = {
    **get_type_hints(Manifest, include_extras=True),
    "layers": _Names,
    "files": Annotated[dict[_Name, _FileEntry], Meta(min_length=1)],
}
"""The type of each field as ``manifest.json`` has it, beside its version and checksum."""


def invalid(path: Path, reason: object) -> UnreadableFile:
    """Return the error of a file of a checkpoint that cannot be read."""
    return UnreadableFile(path, reason, ANOTHER)


def _damaged(path: Path, reason: str) -> UnreadableFile:
    return invalid(path, f"it is damaged ({reason})")


def _checksum(content: dict[str, Any]) -> int:
    """Return the checksum of all other fields, independent of the file's layout."""
    rest = {key: value for key, value in content.items() if key != _CHECKSUM}
    return zlib.crc32(json.dumps(rest).encode())


def _field(name: str, kind: Any, content: dict[str, Any]) -> Any:
    """Return a field of ``manifest.json``; raise msgspec.ValidationError if it is invalid."""
    value = content.get(name, {"ties": [], "epoch": 0, "evaluation_due": False}.get(name))
    try:
        return msgspec.convert(value, kind)
    except ValueError as error:  # a text may have no encoding
        raise msgspec.ValidationError(f"{name} is {reprlib.repr(value)} ({error})") from None


def weights_index(files: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return the index of weights by file, as tools for Hugging Face's layout read it.

    By the name of each file, `files` has the bytes of its tensors by name.
    """
    where = {name: file for file, sizes in files.items() for name in sizes}
    total = sum(size for sizes in files.values() for size in sizes.values())
    return {"metadata": {"total_size": total}, "weight_map": where}


def tensor_sizes(path: Path) -> dict[str, int]:
    """Return the bytes of each tensor by name, from the header of a safetensors file.

    Raises:
        ValueError: the file is not one that a worker writes.
    """
    try:
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), _MOST_HEADER)
            header: Any = json.loads(file.read(length))
        header.pop("__metadata__", None)
        ranges = {name: entry["data_offsets"] for name, entry in header.items()}
        return {name: last - first for name, (first, last) in ranges.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not what a worker writes") from None
