"""A worker's part of a checkpoint, and what all of them together hold.

A checkpoint is a folder with ``manifest.json`` and three files a worker: weights and the other
tensors as safetensors, everything else as JSON. Keys of weights are those of the user's own module,
``model().state_dict()``; the state of optimizers is kept by the same names, so that nothing depends
on how layers were grouped. The weights and their index are laid out as Hugging Face does it.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeworker.errors import PipeworkerError, UsageError
from pipeworker.record import image
from pipeworker.record.image import Image, Pairs
from pipeworker.record.manifest import NAME, Manifest, Shard, file_names
from pipeworker.record.memory import Memory, write
from pipeworker.record.plain import Refused, Tensors, pack, unpack
from pipeworker.record.tensors import COMPLEX, NAMES, TensorFile
from pipeworker.wire.messages.checkpoint import File

_HEADER = {"format": "pt"}
_PLAIN = {"extra": dict, "buffers": dict, "updates": list}
_WORTH = 1 << 12  # bytes; less is copied at once


@dataclass(frozen=True, slots=True)
class Part:
    """A stage: its layers, their names and state dicts, its optimizer, its scheduler.

    Attributes:
        schedule: the scheduler's state.
        keeps_weights: what is in the layers is kept with it; else what updates them alone, where
            another worker has the same layers.
    """

    names: Sequence[str]
    layers: Sequence[nn.Module]
    states: Sequence[Mapping[str, Any]]
    optimizer: torch.optim.Optimizer | None = None
    schedule: Any = None
    scheduler: Any = None
    keeps_weights: bool = True

    def entries(self) -> dict[str, Any]:
        """Of the state dicts, by the names they have in the whole module's."""
        if not self.keeps_weights:
            return {}
        return {
            f"{name}.{key}": value
            for name, state in zip(self.names, self.states, strict=True)
            for key, value in state.items()
        }

    def still(self) -> Iterator[torch.Tensor]:
        """What changes in an update alone."""
        for layer in self.layers:
            yield from (p for p in layer.parameters() if p.requires_grad)
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                held = state.values() if isinstance(state, dict) else ()
                yield from (value for value in held if isinstance(value, torch.Tensor))

    def unlisted(self) -> dict[str, torch.Tensor]:
        """Buffers that are in no state dict, likewise: caches, tables, what is not persistent."""
        if not self.keeps_weights:
            return {}
        return {
            f"{name}.{key}": buffer
            for name, layer, state in zip(self.names, self.layers, self.states, strict=True)
            for key, buffer in layer.named_buffers(remove_duplicate=False)
            if key not in state
        }

    def parameters(self) -> dict[str, nn.Parameter]:
        """Each parameter once, in model order, by the first of its names."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, layer in zip(self.names, self.layers, strict=True):
            for key, parameter in layer.named_parameters():
                found.setdefault(id(parameter), (f"{name}.{key}", parameter))
        return dict(found.values())

    def update(self, elsewhere: Collection[int], tensors: Tensors) -> dict[str, Any] | None:
        """The optimizer's state and groups, by the names of parameters, and the scheduler's."""
        if self.optimizer is None:
            return None
        names = {id(p): name for name, p in self.parameters().items() if id(p) not in elsewhere}
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
        if self.schedule is not None:
            packed["scheduler"] = pack(self.schedule, tensors, "scheduler")
        return packed


@dataclass(slots=True)
class _Content:
    """What the files of a worker hold."""

    weights: Tensors = field(default_factory=dict)
    others: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    complex: list[str] = field(default_factory=list)  # weights, kept as pairs of real numbers

    def metadata(self) -> tuple[dict[str, str], dict[str, str]]:
        """Of the two files with tensors."""
        weights, others = (
            {**_HEADER, NAMES: json.dumps(list(t))} for t in (self.weights, self.others)
        )
        return {**weights, COMPLEX: json.dumps(self.complex)}, others


def _content(
    parts: Sequence[Part],
    elsewhere: Collection[int],
    position: Mapping[str, Any] | None = None,
) -> _Content:
    content = _Content()
    extra: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
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
        for name, buffer in part.unlisted().items():
            with suppress(UsageError):  # a sparse one, which the layer builds again
                buffers[name] = pack(buffer, content.others, f"buffers/{name}")
    updates = [part.update(elsewhere, content.others) for part in parts]
    updates = [update for update in updates if update is not None]
    content.plain = {"extra": extra, "buffers": buffers, "updates": updates}
    if position is not None:
        content.plain["data"] = pack(dict(position), content.others, "data")
    image.check(content.weights | content.others)
    return content


def check(
    parts: Sequence[Part],
    elsewhere: Collection[int] = (),
    position: Mapping[str, Any] | None = None,
) -> None:
    """Refuse at once what could not be saved later.

    Raises:
        UsageError: a state holds something else than tensors and plain values; it is named.
    """
    _content(parts, elsewhere, position)


class Album:
    """The images of one memory, and what is no tensor: that is there once they are whole."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._images = Image(memory, 0), Image(memory, 1)
        self._plain: dict[str, Any] = {}

    def take(
        self,
        parts: Sequence[Part],
        elsewhere: Collection[int] = (),
        position: Mapping[str, Any] | None = None,
        room: int | None = None,
    ) -> Pairs | None:
        """Begin a copy of what a worker's stages hold; returns the copies that are left to do.

        These are of weights and optimizer state, which stand still until the next update; all else
        is copied at once.

        Args:
            elsewhere: ids of parameters whose optimizer state another stage writes.
            position: in the data, where stage 0 is.
            room: bytes that the memory may grow by; None as many as it takes. Where that is too
                little nothing is copied, and None is returned.

        Raises:
            OSError: there is not enough memory.
            UsageError: a state holds something else than tensors and plain values.
        """
        content = _content(parts, elsewhere, position)
        size = sum(t.nbytes for held in (content.weights, content.others) for t in held.values())
        if room is not None and size - self.memory.size > room:
            return None
        self.memory.put(2, b"")
        self._plain = content.plain
        still = {p.data_ptr() for part in parts for p in part.still()}
        later: Pairs = []
        for one, tensors, metadata in zip(
            self._images, (content.weights, content.others), content.metadata(), strict=True
        ):
            for view, tensor in one.lay(tensors, metadata):
                if tensor.nbytes >= _WORTH and tensor.data_ptr() in still:
                    later.append((view, tensor))
                else:
                    view.copy_(tensor)
        return later

    def seal(self, step: int) -> None:
        """The copy is whole: it is the state after `step`."""
        self.memory.put(2, json.dumps({**self._plain, "step": step}).encode())

    def fill(
        self,
        step: int,
        parts: Sequence[Part],
        elsewhere: Collection[int] = (),
        position: Mapping[str, Any] | None = None,
    ) -> None:
        """The whole of a copy, at once.

        Raises:
            as :meth:`take`.
        """
        for view, tensor in self.take(parts, elsewhere, position) or ():
            view.copy_(tensor)
        self.seal(step)


def remembered(memories: Iterable[Memory], step: int) -> list[Shard]:
    """The state after `step`, as its workers left it in memory.

    Raises:
        PipeworkerError: it is not that, or not whole.
    """
    shards = [Shard(*memory.paths) for memory in memories]
    for shard in shards:
        plain = shard.state.read_bytes()
        if not plain or json.loads(plain)["step"] != step:
            text = f"the copy of step {step} in memory is gone: go on from disk, by --resume"
            raise PipeworkerError(text)
    return shards


def save_part(
    folder: Path,
    rank: int,
    ranks: int,
    parts: Sequence[Part],
    elsewhere: Collection[int] = (),
    position: Mapping[str, Any] | None = None,
) -> tuple[File, ...]:
    """Write what a worker's stages hold; on disk when this returns.

    Raises:
        RecordError: a file cannot be written.
        UsageError: a state holds something else than tensors and plain values.
    """
    memory = Memory()
    try:
        Album(memory).fill(0, parts, elsewhere, position)
        return write(memory.handles, folder, file_names(rank, ranks))
    finally:
        memory.close()


class Checkpoint:
    """A complete checkpoint, which anybody may have made: what is damaged is named.

    Raises:
        UsageError: it cannot be read.
        OSError: the system does not let it be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = Manifest.read(path / NAME)

    def shards(self) -> list[Shard]:
        """What each worker wrote: all there, of the right sizes; see :meth:`verify`."""
        paths = {f.name: self.manifest.there(self.path, f) for f in self.manifest.files}
        ranks = sum(name.startswith("model-") for name in paths)
        named = [file_names(rank, ranks) for rank in range(ranks)]
        if paths.keys() != {name for names in named for name in names}:
            raise UsageError(f"cannot read {self.path}: its files are not those of {ranks} workers")
        return [Shard(*(paths[name] for name in names)) for names in named]

    def verify(self) -> None:
        """Read all files: none is missing or damaged."""
        self.manifest.check_files(self.path)

    def weights(self) -> Tensors:
        """All weights, in model order, tied ones under each of their names."""
        found: Tensors = {}
        order = {name: number for number, name in enumerate(self.manifest.layers)}
        self.manifest.check_files(self.path, "model-")
        for path in [shard.model for shard in self.shards()]:
            file = TensorFile(path)
            tensors = {name: file.mapped(name) for name in file}
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
        self.verify()
        for shard in self.shards():
            tensors, plain = TensorFile(shard.optimizer), read_plain(shard.state)
            for update in plain["updates"]:
                try:
                    found |= {name: unpack(v, tensors) for name, v in update["state"].items()}
                except (Refused, KeyError, TypeError, AttributeError) as error:
                    raise UsageError(f"cannot read {shard.state}: {error}") from None
        return found


def read_plain(path: Path) -> dict[str, Any]:
    """What a worker's JSON file holds.

    Raises:
        UsageError: it is something else.
        OSError: it cannot be read.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        plain = None
    if not (isinstance(plain, dict) and all(type(plain.get(k)) is t for k, t in _PLAIN.items())):
        raise UsageError(f"cannot read {path}: it is not what a stage writes")
    return plain
