"""The weights of a run as plain files for other tools, written some megabytes at a time."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeworker.errors import UsageError, reading
from pipeworker.job.option_parsing import UNITS
from pipeworker.record.checkpoint.checkpoint import Adapters, Checkpoint, damaged
from pipeworker.record.checkpoint.folder import held
from pipeworker.record.checkpoint.json_state import Tensors
from pipeworker.record.checkpoint.manifest import WEIGHTS_INDEX, weights_index
from pipeworker.record.checkpoint.tensor_file import TensorFile, file_layout, raw_bytes, supports
from pipeworker.record.files.atomic_file import sync_file, temporary_path, write_json
from pipeworker.record.run_record import find_best_checkpoint
from pipeworker.record.rundir import find_checkpoint
from pipeworker.record.weights.conversions import CONFIG, WEIGHTS
from pipeworker.record.weights.model_folder import copy_files, like

DEFAULT_SHARD_SIZE = "5GB"
"""The size that Hugging Face uses."""
_SIZE = re.compile(r"(\d{1,15})\s*([KMGT]?I?B)", re.ASCII | re.IGNORECASE)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PICKLED = (".pt", ".pth")
_FILES = (".safetensors", *_PICKLED)
CAST_ELEMENTS = 1 << 22  # elements that are cast at once


@dataclass(frozen=True, slots=True)
class Exported:
    """The numbers of tensors and files of an export, and whether a folder has them.

    `step` is the optimizer step after which the exported checkpoint was saved.
    `infinite` names the tensors with finite values beyond the range of the requested dtype;
    `leaves_adapters` says that the run has adapters, and that these were not asked for alone.
    """

    tensors: int
    files: int
    folder: bool
    infinite: tuple[str, ...]
    leaves_adapters: bool
    step: int


def export_weights(
    source: Path,
    out: str | Path,
    dtype: str | None = None,
    shard_size: str | None = None,
    *,
    best: bool = False,
    pattern: Path | None = None,
    adapters: bool = False,
) -> Exported:
    """Write the weights of a run or checkpoint as a file or a folder.

    The result is complete when this returns; on an error the output is as it was before.

    Args:
        source: a run directory, whose newest checkpoint is exported, or a checkpoint.
        out: a ``.safetensors``, ``.pt`` or ``.pth`` file, or a folder in Hugging Face's layout:
            an existing folder, or a name that ends with ``/`` or has no ending.
        dtype: the dtype of all floating tensors, one of :data:`DTYPES`; None to cast nothing.
        shard_size: the most bytes of a file in a folder, as ``500MB``; None for Hugging Face's
            default.
        best: export the checkpoint of the run with the best evaluation, by its option ``--best``.
        pattern: the folder of a model whose names of weights and other files the export has.
        adapters: export the adapters alone, as a folder of peft.

    Raises:
        UsageError: there is no complete checkpoint, or it cannot be read; the arguments contradict
            each other, or the output cannot be written.
    """
    path = Path(out)
    try:
        folder = _check_output(path, str(out))
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {_reason(error)}") from None
    wants_folder = {"--shard-size": shard_size, "--like": pattern, "--adapters": adapters or None}
    for option, value in wants_folder.items():
        if value is not None and not folder:
            raise UsageError(f"{option}: {out} is one file; give a folder")
    if adapters and (pattern is not None or shard_size is not None):
        other = "--like" if pattern is not None else "--shard-size"
        raise UsageError(
            f"--adapters and {other}: a folder of peft has one file of its own weights"
        )
    most = shard_bytes(DEFAULT_SHARD_SIZE if shard_size is None else shard_size)
    with ExitStack() as stack:
        with reading(source):
            checkpoint = _open(source, path, best=best)
            stack.enter_context(held(checkpoint.path))
            weights, peft = checkpoint.weights(), checkpoint.adapters()
            extra = _extra(checkpoint, weights) if not folder and path.suffix in _PICKLED else {}
        others: Callable[[Path], list[Path]] = lambda _: []  # noqa: E731
        if pattern is not None:
            weights, others = like(weights, pattern), partial(copy_files, pattern)
        if adapters:
            peft = _checked(peft, weights, source)
            weights = {theirs: weights[own] for own, theirs in peft.names.items()}
            others = partial(_write_config, peft.config)
        cast = _Cast(DTYPES[dtype] if dtype else None)
        files = 1
        try:
            if folder:
                sizes = {name: t.numel() * cast.dtype_of(t).itemsize for name, t in weights.items()}
                parts = [sizes] if adapters else split_files(sizes, most)
                files = len(parts)
                file_list = [WEIGHTS] if adapters else file_names(files)
                _write_folder(weights, path, cast, dict(zip(file_list, parts, strict=True)), others)
            else:
                _write_file(weights, extra, path, cast)
        except (OSError, RuntimeError, ValueError) as error:
            raise UsageError(f"{out}: cannot be written: {_reason(error)}") from None
        infinite = tuple(dict.fromkeys(cast.infinite))
        leaves_adapters = peft is not None and folder and not adapters
        step = checkpoint.manifest.step
        return Exported(len(weights), files, folder, infinite, leaves_adapters, step)


def _check_output(path: Path, out: str) -> bool:
    """Check that weights can be written to `out`; return whether that is a folder."""

    def refused(reason: str) -> UsageError:
        return UsageError(f"{path if slash else out}: cannot be written: {reason}")

    exists, slash = path.is_dir(), out.endswith(os.sep)
    folder = slash or path.suffix not in _FILES
    if exists and not folder:
        raise refused("it is a directory")
    if folder and not (exists or slash) and path.suffix[1:2].isalpha():
        raise refused(
            "its name must end in .safetensors, .pt or .pth; with a / at the end it is a folder"
        )
    if not path.parent.is_dir():
        raise refused(f"there is no directory {path.parent}")
    if folder and not exists and path.exists():
        raise refused("it is a file")
    present = sorted(
        [*path.glob("model*.safetensors"), *path.glob(WEIGHTS_INDEX), *path.glob(WEIGHTS)]
    )
    if present:  # in a folder
        raise refused(
            f"it has weights already ({present[0].name}); remove them, or choose another folder"
        )
    return folder


def _open(source: Path, out: Path, *, best: bool) -> Checkpoint:
    """Return the checkpoint, of which `out` is no file."""
    checkpoint = Checkpoint(find_best_checkpoint(source) if best else find_checkpoint(source))
    for file in checkpoint.manifest.files:
        path = checkpoint.path / file.name
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(
                f"{out}: cannot be written: it is a part of the checkpoint; choose another file"
            )
    return checkpoint


def _extra(checkpoint: Checkpoint, weights: Tensors) -> dict[str, Any]:
    """Return what state dicts have besides weights, as the extra state of modules."""
    packed = checkpoint.extra()
    for name in packed:
        if name not in checkpoint.manifest.layers or name in weights:
            raise damaged(checkpoint.path, f"{reprlib.repr(name)} is no extra state of a layer")
    return {name: value.read() for name, value in packed.items()}


def _checked(found: Adapters | None, weights: Tensors, source: Path) -> Adapters:
    """Return the adapters of a run, which has their weights."""
    if found is None:
        raise UsageError(
            f"--adapters: {source} has none; model() must return a model of peft's get_peft_model()"
        )
    if lacking := [name for name in found.names if name not in weights]:
        raise UsageError(f"--adapters: {source} lacks the weight {lacking[0]} of its adapters")
    return found


def _write_config(content: dict[str, Any], folder: Path) -> list[Path]:
    path = folder / CONFIG
    write_json(path, content)
    return [path]


@dataclass(slots=True)
class _Cast:
    """A cast of floating tensors to a dtype, or none; `infinite` names those that overflowed."""

    dtype: torch.dtype | None
    infinite: list[str] = field(default_factory=list)

    def dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype that a tensor will have."""
        return self.dtype if self.dtype and tensor.is_floating_point() else tensor.dtype

    def chunks(self, name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a tensor's bytes, chunk by chunk."""
        dtype = self.dtype_of(tensor)
        narrower = (
            dtype is not tensor.dtype and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
        )
        for chunk in torch.split(tensor.reshape(-1), CAST_ELEMENTS):
            made = chunk.to(dtype)
            if narrower and bool((made.isinf() & chunk.isfinite()).any()):
                self.infinite.append(name)
            yield raw_bytes(made)


def _write_file(weights: Tensors, extra: dict[str, Any], path: Path, cast: _Cast) -> None:
    """Write one file of weights; only a pickled one has what else is in state dicts."""
    with temporary_path(path) as partial:
        if path.suffix in _PICKLED:
            with _cast_on_disk(weights, path, cast) as tensors, partial.open("xb") as file:
                torch.save(_separate(tensors) | extra, file)
                sync_file(file)
        else:
            _write_safetensors(weights, partial, cast)
        partial.replace(path)


def _write_folder(
    weights: Tensors,
    path: Path,
    cast: _Cast,
    files: Mapping[str, Mapping[str, int]],
    write_others: Callable[[Path], list[Path]],
) -> None:
    """Write files of weights by name and size, the index of several, and other files."""
    exists = path.is_dir()
    target = path / WEIGHTS_INDEX if exists else path
    with temporary_path(target) as made:
        made.mkdir()
        for file, names in files.items():
            _write_safetensors({name: weights[name] for name in names}, made / file, cast)
        if len(files) > 1:
            write_json(made / WEIGHTS_INDEX, weights_index(files))
        others = write_others(made)
        for other in others:
            if exists and (path / other.name).exists():
                raise ValueError(f"it has {other.name} already")
        if exists:  # the index last: a reader that finds it finds all files
            _move([*others, *(made / file for file in files), made / WEIGHTS_INDEX], path)
        else:
            made.rename(path)


def _move(files: list[Path], folder: Path) -> None:
    moved: list[Path] = []
    try:
        for file in filter(Path.exists, files):
            moved.append(file.rename(folder / file.name))
    except BaseException:
        for file in moved:
            file.unlink()
        raise


def _write_safetensors(weights: Tensors, path: Path, cast: _Cast) -> None:
    """Write a new file; it is on disk when this returns."""
    for name, tensor in weights.items():
        if not supports(cast.dtype_of(tensor)):
            what = f"{reprlib.repr(name)} is {tensor.dtype}"
            raise ValueError(f"the format does not know such a tensor ({what}); .pt does")
    infos = {name: (cast.dtype_of(tensor), tuple(tensor.shape)) for name, tensor in weights.items()}
    header, ranges = file_layout(infos)
    with path.open("xb") as file:
        file.write(header)
        for name in ranges:
            for chunk in cast.chunks(name, weights[name]):
                file.write(chunk.numpy().data)
        sync_file(file)


@contextmanager
def _cast_on_disk(weights: Tensors, path: Path, cast: _Cast) -> Iterator[Tensors]:
    """Yield the cast tensors, mapped from a file beside `path`: they may not fit into memory."""
    first: dict[int, str] = {}  # tied ones are one
    for name, tensor in weights.items():
        if cast.dtype_of(tensor) is not tensor.dtype:
            first.setdefault(id(tensor), name)
    with temporary_path(path) as partial:
        made: Mapping[int, torch.Tensor] = {}
        if first:
            _write_safetensors({name: weights[name] for name in first.values()}, partial, cast)
            file = TensorFile(partial, from_worker=False)
            made = {key: file.mapped(name) for key, name in first.items()}
        yield {name: made.get(id(tensor), tensor) for name, tensor in weights.items()}


def _separate(weights: Tensors) -> Tensors:
    """Return tensors of the same memory, each with a storage of its own; tied ones stay one."""
    made = {id(tensor): _with_own_storage(tensor) for tensor in weights.values()}
    return {name: made[id(tensor)] for name, tensor in weights.items()}


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty_like(tensor)
    data = raw_bytes(tensor.contiguous()).numpy()
    return torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape)


def _reason(error: Exception) -> str:
    """Return an error as one line that a terminal can show: a file may have a part in its text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    shown = "".join(c if c.isprintable() else " " for c in str(error)[:200].partition("\n")[0])
    return shown or type(error).__name__


def shard_bytes(text: str) -> int:
    """Return the bytes of a size such as ``500MB`` or ``5GiB``.

    Raises:
        UsageError: the text is not a size.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(found[1]) * UNITS.get(found[2].lower(), 0) if found else 0
    if not size:
        raise UsageError(f"--shard-size {text}: must be a size, as 500MB or 5GB")
    return size


def split_files(sizes: Mapping[str, int], most: int) -> list[dict[str, int]]:
    """Distribute tensors, by name and with their bytes, to files in order, as Hugging Face does it.

    A file has at most `most` bytes, or a single tensor.
    """
    files: list[dict[str, int]] = [{}]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > most:
            files.append({})
            filled = 0
        files[-1][name] = size
        filled += size
    return files


def file_names(count: int) -> list[str]:
    """Return the names of `count` files."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
