"""Files of weights: one file, several with an index, or a checkpoint. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from pipeworker.errors import UnreadableFile, UsageError
from pipeworker.record.checkpoint.manifest import MANIFEST, WEIGHTS_INDEX, Manifest
from pipeworker.record.files.bounded_file import read_json
from pipeworker.record.rundir import RunDir, find_checkpoint, listed

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")
"""The endings of the files' names, by format."""
_SINGLE, _MODEL = "model.safetensors", "model-"
"""The file of a model's weights in a folder, and how those of a checkpoint begin."""
_MOST_INDEX_BYTES = 256 << 20


class _Index(msgspec.Struct):
    """An index as Hugging Face writes it: the file of each weight, in the index's own folder."""

    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[^/\0]*[^/.\0]\Z")]]


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files that hold a model's weights, and the checkpoint that they are of, if any."""

    files: tuple[Path, ...]
    index: Mapping[str, Path] | None = None
    checkpoint: Path | None = None

    def check(self) -> None:
        """Check the checksums of a checkpoint's files; other files have none.

        Raises:
            UsageError: a file is missing or damaged.
        """
        if self.checkpoint is not None:
            with naming_option():
                Manifest.read(self.checkpoint / MANIFEST).check_files(self.checkpoint, _MODEL)


def find_weight_files(path: Path) -> WeightFiles:
    """Find the files of a path: a file, an index, or a folder with one of them or a checkpoint.

    Raises:
        UsageError: the path does not exist, or is something else.
    """
    with naming_option():
        try:
            return find_files(path)
        except FileNotFoundError as error:
            raise UnreadableFile(path, error, listed(path)) from None
        except (OSError, ValueError) as error:  # a name that the file system cannot have
            raise UnreadableFile(path, error) from None


@contextmanager
def naming_option() -> Iterator[None]:
    """Put the option before the errors of its files."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"--init-from {error}") from None


def find_files(path: Path) -> WeightFiles:
    """Find the files of a path, as :func:`find_weight_files`; errors do not name an option.

    Raises:
        UsageError: the path is something else.
        OSError: it does not exist, or cannot be read.
    """
    if not path.is_dir():
        return _indexed(path) if path.suffix == ".json" else WeightFiles((_file(path),))
    if (path / MANIFEST).is_file() or RunDir(path).checkpoints.path.is_dir():
        checkpoint = find_checkpoint(path)
        manifest = Manifest.read(checkpoint / MANIFEST)
        files = [file for file in manifest.files if file.name.startswith(_MODEL)]
        paths = tuple(manifest.locate(checkpoint, file) for file in files)
        return WeightFiles(paths, checkpoint=checkpoint)
    if (path / WEIGHTS_INDEX).is_file():
        return _indexed(path / WEIGHTS_INDEX)
    if not (path / _SINGLE).exists():
        raise UsageError(
            f"{path}: it has no {WEIGHTS_INDEX}, no {_SINGLE} and no checkpoint of a "
            "run; name a file of weights, or a folder with one of these"
        )
    return WeightFiles((_file(path / _SINGLE),))


def _file(path: Path) -> Path:
    path.stat()
    ends = (*SAFETENSORS, *PICKLED)
    if path.suffix not in ends or not path.is_file():
        raise UsageError(
            f"{path}: not a file of weights; name a folder, or a file that ends in "
            f"{', '.join(ends)}"
        )
    return path


def _indexed(path: Path) -> WeightFiles:
    what, remedy = "it is not the index of a model's files", "save the model again"
    content = read_json(path, _Index, what, remedy, most=_MOST_INDEX_BYTES)
    index = {name: path.with_name(file) for name, file in content["weight_map"].items()}
    files = tuple(_file(file) for file in dict.fromkeys(index.values()))
    return WeightFiles(files, index)
