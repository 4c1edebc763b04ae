"""A complete checkpoint: ``manifest.json``, and three or four files of each worker.

Two of a worker's files hold tensors as safetensors, the weights and all others; the third holds
everything else as JSON. Frozen weights are in a file of their own. The names are those of
``model().state_dict()``; the weights and their index are laid out as Hugging Face does it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from pipeworker.errors import UnreadableFile, reading
from pipeworker.record.checkpoint.frozen_weights import frozen_name
from pipeworker.record.checkpoint.json_state import JSON_DEPTH, InvalidState, Tensors, unpack
from pipeworker.record.checkpoint.manifest import (
    ANOTHER,
    MANIFEST,
    Manifest,
    WorkerFiles,
    file_names,
    invalid,
)
from pipeworker.record.checkpoint.tensor_file import TensorFile
from pipeworker.record.files.bounded_file import read_json


class Checkpoint:
    """The complete checkpoint in the folder `path`, which anybody may have written.

    Raises:
        UsageError: the checkpoint cannot be read, or is damaged; so may every method.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / MANIFEST)
        self._read: dict[Path, dict[str, Any]] = {}

    def worker_files(self) -> list[WorkerFiles]:
        """Return the files of each worker, which exist and have the right sizes."""
        paths = {f.name: self.manifest.locate(self.path, f) for f in self.manifest.files}
        ranks = sum(name.startswith("state-") for name in paths)
        named = [file_names(rank, ranks) for rank in range(ranks)]
        frozen = {frozen_name(names[0]) for names in named}
        if paths.keys() - frozen != {name for names in named for name in names}:
            raise invalid(self.path, f"its files are not those of {ranks} workers")
        found = []
        for model, optimizer, state in named:
            own = (paths[model], paths[optimizer], paths[state])
            found.append(WorkerFiles(*own, paths.get(frozen_name(model))))
        return found

    def verify(self) -> None:
        """Read all files, and check that none is missing or damaged."""
        self.manifest.check_files(self.path)

    def weights(self) -> Tensors:
        """Return all weights in model order; one tensor under each of its names."""
        found: Tensors = {}
        layers = self.manifest.layers
        self.manifest.check_files(self.path, "model-")
        for path in (path for files in self.worker_files() for path in files.weights):
            file = TensorFile(path)
            for name in file:
                if name not in layers:
                    raise invalid(file.path, f"{reprlib.repr(name)} is not a weight of a layer")
                if name in found:
                    raise invalid(file.path, f"{reprlib.repr(name)} is in another part as well")
                found[name] = file.mapped(name)
        for first, *others in self.manifest.ties:
            for name in (first, *others):
                if first not in found or name not in layers:
                    raise invalid(self.path, f"no part has {reprlib.repr(name)}, a tied weight")
                found[name] = found[first]
        for name, first in self._aliases():
            if first not in found or name not in found:
                raise invalid(self.path, f"no part has {reprlib.repr(name)}, a name of a weight")
            found[name] = found[first]
        return dict(sorted(found.items(), key=lambda item: layers.split(item[0])[0]))

    def _aliases(self) -> Iterator[tuple[str, str]]:
        """Yield the further names of weights that have several in a layer, with the first."""
        for files in self.worker_files():
            found = self._plain(files.state).get("aliases", {})  # none in older files
            try:
                yield from msgspec.convert(found, dict[str, str]).items()
            except msgspec.ValidationError as error:
                raise invalid(files.state, error) from None

    def extra(self) -> dict[str, PackedValue]:
        """Return what state dicts have besides weights, by name; it is read when it is needed."""
        found: dict[str, PackedValue] = {}
        for files in self.worker_files():
            if extra := self._plain(files.state)["extra"]:
                self.manifest.check_files(self.path, files.optimizer.name)
                packed = partial(PackedValue, files.state, TensorFile(files.optimizer))
                found |= {name: packed(value) for name, value in extra.items()}
        return found

    def adapters(self) -> Adapters | None:
        """Return what makes peft's own folder of the weights, if the model has adapters."""
        path = self.worker_files()[0].state  # of the worker with stage 0
        found = self._plain(path).get("adapters")
        try:
            return msgspec.convert(found, Adapters | None)
        except msgspec.ValidationError as error:
            raise invalid(path, error) from None

    def _plain(self, path: Path) -> dict[str, Any]:
        """Return the content of a worker's JSON file, which is read once."""
        if path not in self._read:
            self.manifest.check_files(self.path, path.name)
            self._read[path] = read_plain(path)
        return self._read[path]


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A packed value in the file of a worker."""

    path: Path
    tensors: TensorFile
    packed: Any

    def read(self, kind: type = object) -> Any:
        """Unpack the value, which must be of this type."""
        try:
            value = unpack(self.packed, self.tensors)
        except InvalidState as error:
            raise damaged(self.path, error) from None
        if not isinstance(value, kind):
            raise damaged(self.path, f"{value!r:.40} is no {kind.__name__}")
        return value


def damaged(path: Path, reason: object) -> UnreadableFile:
    """Return the error of a file of a checkpoint that no worker has written so."""
    return invalid(path, f"it is not what a worker writes ({reason})")


class Adapters(msgspec.Struct):
    """The configuration in a folder of peft, and its names of weights by those of the module."""

    config: dict[str, Any]
    names: dict[str, str]


_MAX_PLAIN = 4 << 30  # a layer's extra state may be large
_DIGITS = 4300  # as many as Python reads


class _Plain(msgspec.Struct):
    """The fields of a worker's JSON file."""

    extra: dict[str, Any]
    buffers: dict[str, Any]
    updates: list[Any]


def read_plain(path: Path) -> dict[str, Any]:
    """Return the content of a worker's JSON file.

    Raises:
        UsageError: the file cannot be read, or a worker does not write such a file.
    """
    with reading(path):
        return read_json(
            *(path, _Plain, "it is not what a worker writes", ANOTHER),
            most=_MAX_PLAIN,
            depth=JSON_DEPTH,
            digits=_DIGITS,
        )
