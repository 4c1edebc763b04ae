"""``pipeworker export``: one plain weights file made from a checkpoint."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint import Checkpoint
from pipeworker.record.rundir import find


def export(source: Path, out: Path) -> int:
    """Write the weights of a run or checkpoint as one ``.safetensors`` or ``.pt`` file.

    It is there, whole, when this returns; else what was there before is as it was.

    Returns:
        How many tensors were written.

    Raises:
        UsageError: there is no complete checkpoint, or it cannot be read; the file's ending is
            another one, or it cannot be written.
    """
    if out.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"cannot write {out}: its name must end in .safetensors or .pt")
    try:
        if not out.parent.is_dir():
            raise UsageError(f"cannot write {out}: there is no directory {out.parent}")
        if out.is_dir():
            raise UsageError(f"cannot write {out}: it is a directory")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {_reason(error)}") from None
    try:
        weights = _read(source, out)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or source}: {_reason(error)}") from None
    partial = out.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            try:
                _write(weights, file, partial, out.suffix)
                partial.replace(out)
            except BaseException:
                partial.unlink()
                raise
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot write {out}: {_reason(error)}") from None
    return len(weights)


def _read(source: Path, out: Path) -> dict[str, torch.Tensor]:
    """All weights, in model order, wherever the stages were."""
    checkpoint = Checkpoint(find(source))
    for file in checkpoint.manifest.files:
        path = checkpoint.path / file.name
        if out.exists() and path.exists() and out.samefile(path):
            raise UsageError(f"cannot write {out}: it is a part of the checkpoint")
    return checkpoint.weights()


def _write(weights: Mapping[str, torch.Tensor], file: IO[bytes], path: Path, suffix: str) -> None:
    """Fill a new file; on disk when this returns."""
    if suffix == ".pt":
        torch.save(weights, file)
        file.flush()
    else:
        mode = path.stat().st_mode
        # The format knows neither entries that share memory nor strides.
        layout = torch.contiguous_format
        try:
            copies = {k: v.clone(memory_format=layout) for k, v in weights.items()}
            save_file(copies, path, {"format": "pt"})
        except (KeyError, RuntimeError) as error:  # sparse, quantized, complex128, ...
            said = f"the format does not know such a tensor ({_reason(error)}); .pt does"
            raise ValueError(said) from None
        path.chmod(mode)  # of the umask: the library makes a file of its own, for its owner alone
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _reason(error: Exception) -> str:
    """In a line that a terminal can show: a file may have a say in it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    shown = "".join(c if c.isprintable() else " " for c in str(error)[:200].partition("\n")[0])
    return shown or type(error).__name__
