"""``pipeworker export``: plain weights made from a checkpoint, some megabytes at a time."""

from __future__ import annotations

import json
import os
import reprlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint import Checkpoint
from pipeworker.record.export import shards
from pipeworker.record.image import knows, layout
from pipeworker.record.manifest import INDEX
from pipeworker.record.plain import Tensors
from pipeworker.record.rundir import find
from pipeworker.record.tensors import TensorFile

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PICKLED = (".pt", ".pth")
_FILES = (".safetensors", *_PICKLED)
_CHUNK = 1 << 22  # numbers that are cast at once
_HEADER = {"format": "pt"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        tensors, files: how many.
        folder: whether it is one.
        infinite: names of tensors with finite values that the dtype asked for does not reach.
    """

    tensors: int
    files: int = 1
    folder: bool = False
    infinite: tuple[str, ...] = ()


def export(
    source: Path, out: str | Path, dtype: str | None = None, shard_size: str | None = None
) -> Exported:
    """Write the weights of a run or checkpoint as a file or a folder.

    It is there, whole, when this returns; else what was there before is as it was.

    Args:
        out: a ``.safetensors``, ``.pt`` or ``.pth`` file, or a folder in Hugging Face's layout:
            one that is there, or a name that ends with ``/`` or has no ending.
        dtype: of all tensors of floating type, one of :data:`DTYPES`; None as they are.
        shard_size: of each file in a folder, at most, as ``500MB``; None is Hugging Face's default.

    Raises:
        UsageError: there is no complete checkpoint, or it cannot be read; what is asked for makes
            no sense, or it cannot be written.
    """
    path = Path(out)
    try:
        folder = _is_folder(path, str(out))
        if folder:
            _check_folder(path)
        elif not path.parent.is_dir():
            raise UsageError(f"cannot write {out}: there is no directory {path.parent}")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {_reason(error)}") from None
    if shard_size is not None and not folder:
        raise UsageError(f"--shard-size is of a folder: {out} is one file")
    most = shards.size_of(shards.DEFAULT if shard_size is None else shard_size)
    try:
        weights = _read(source, path)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or source}: {_reason(error)}") from None
    cast = _Cast(DTYPES[dtype] if dtype else None)
    files = 1
    try:
        if folder:
            files = _write_folder(weights, path, cast, most)
        else:
            _write_file(weights, path, cast)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot write {out}: {_reason(error)}") from None
    return Exported(len(weights), files, folder, tuple(dict.fromkeys(cast.infinite)))


def _is_folder(path: Path, said: str) -> bool:
    """Whether that is what is asked for.

    Raises:
        UsageError: it is neither that nor a file of a known ending.
        OSError: it cannot be looked at.
    """
    if path.suffix in _FILES and not said.endswith(os.sep):
        if path.is_dir():
            raise UsageError(f"cannot write {said}: it is a directory")
        return False
    if not (path.is_dir() or said.endswith(os.sep)) and path.suffix[1:2].isalpha():
        raise UsageError(
            f"cannot write {said}: its name must end in .safetensors, .pt or .pth; with a / at "
            "the end it is a folder"
        )
    return True


def _check_folder(path: Path) -> None:
    """That weights can be put there, and none are mixed with others.

    Raises:
        UsageError: they cannot.
        OSError: it cannot be looked at.
    """
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no directory {path.parent}")
    if not path.is_dir():
        if path.exists():
            raise UsageError(f"cannot write {path}: it is a file")
        return
    held = sorted([*path.glob("model*.safetensors"), *path.glob(INDEX)])
    if held:
        text = f"it has weights already ({held[0].name}): remove them, or choose another folder"
        raise UsageError(f"cannot write {path}: {text}")


def _read(source: Path, out: Path) -> Tensors:
    """All weights, in model order, wherever the stages were; none is read yet."""
    checkpoint = Checkpoint(find(source))
    for file in checkpoint.manifest.files:
        path = checkpoint.path / file.name
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(f"cannot write {out}: it is a part of the checkpoint")
    return checkpoint.weights()


@dataclass(slots=True)
class _Cast:
    """To another dtype, or to none.

    Attributes:
        infinite: names of tensors in which finite values have become infinite.
    """

    dtype: torch.dtype | None
    infinite: list[str] = field(default_factory=list)

    def of(self, tensor: torch.Tensor) -> torch.dtype:
        """What a tensor's dtype will be."""
        return self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype

    def chunks(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Its bytes, a part after the other."""
        dtype = self.of(tensor)
        may = dtype is not tensor.dtype and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
        for part in torch.split(tensor.reshape(-1), _CHUNK):
            made = part.to(dtype)
            if may and bool((made.isinf() & part.isfinite()).any()):
                self.infinite.append(name)
            yield made.view(torch.uint8)


def _write_file(weights: Tensors, path: Path, cast: _Cast) -> None:
    with _partial(path) as partial:
        if path.suffix in _PICKLED:
            with _cast_on_disk(weights, path, cast) as tensors, partial.open("xb") as file:
                torch.save(_apart(tensors), file)
                _sync(file)
        else:
            _write_safetensors(weights, partial, cast)
        partial.replace(path)


def _write_folder(weights: Tensors, path: Path, cast: _Cast, most: int) -> int:
    """Files of at most so many bytes, and the index of several; returns how many there are."""
    sizes = {name: t.numel() * cast.of(t).itemsize for name, t in weights.items()}
    parts = shards.split(sizes, most)
    files = dict(zip(shards.names(len(parts)), parts, strict=True))
    there = path.is_dir()
    with _partial(path / INDEX if there else path) as partial:
        partial.mkdir()
        for file, names in files.items():
            _write_safetensors({name: weights[name] for name in names}, partial / file, cast)
        if len(files) > 1:
            with (partial / INDEX).open("x", encoding="utf-8") as text:
                json.dump(shards.index(files, sizes), text, indent=2)
                _sync(text)
        if there:  # the index last: who finds it finds all
            _move([*(partial / file for file in files), partial / INDEX], path)
        else:
            partial.rename(path)
    return len(files)


def _move(files: list[Path], folder: Path) -> None:
    moved: list[Path] = []
    try:
        for file in filter(Path.exists, files):
            moved.append(file.rename(folder / file.name))
    except BaseException:
        for file in moved:
            file.unlink()
        raise


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """A name beside it, for what is not whole yet; what still has it at the end is removed."""
    partial = path.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        yield partial
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def _write_safetensors(weights: Tensors, path: Path, cast: _Cast) -> None:
    """A new file; on disk when this returns."""
    for name, tensor in weights.items():
        if not knows(cast.of(tensor)):
            what = f"{reprlib.repr(name)} is {tensor.dtype}"
            raise ValueError(f"the format does not know such a tensor ({what}); .pt does")
    looks = {name: (cast.of(tensor), tuple(tensor.shape)) for name, tensor in weights.items()}
    head, spans = layout(looks, _HEADER)
    with path.open("xb") as file:
        file.write(head)
        for name in spans:
            for chunk in cast.chunks(name, weights[name]):
                file.write(chunk.numpy().data)
        _sync(file)


@contextmanager
def _cast_on_disk(weights: Tensors, path: Path, cast: _Cast) -> Iterator[Tensors]:
    """The tensors as they are to be, in a file beside `path`: they may be more than fits memory."""
    first: dict[int, str] = {}  # tied ones are one
    for name, tensor in weights.items():
        if cast.of(tensor) is not tensor.dtype:
            first.setdefault(id(tensor), name)
    with _partial(path) as partial:
        made: Mapping[int, torch.Tensor] = {}
        if first:
            _write_safetensors({name: weights[name] for name in first.values()}, partial, cast)
            file = TensorFile(partial, of_a_stage=False)
            made = {key: file.mapped(name) for key, name in first.items()}
        yield {name: made.get(id(tensor), tensor) for name, tensor in weights.items()}


def _apart(weights: Tensors) -> Tensors:
    """The same memory, each tensor with its own part of it alone; tied ones stay one."""
    made: dict[int, torch.Tensor] = {}
    for tensor in weights.values():
        if id(tensor) not in made:
            made[id(tensor)] = _alone(tensor)
    return {name: made[id(tensor)] for name, tensor in weights.items()}


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty_like(tensor)
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)


def _sync(file: IO[str] | IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _reason(error: Exception) -> str:
    """In a line that a terminal can show: a file may have a say in it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    shown = "".join(c if c.isprintable() else " " for c in str(error)[:200].partition("\n")[0])
    return shown or type(error).__name__
