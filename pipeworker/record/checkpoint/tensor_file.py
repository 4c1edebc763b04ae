"""Safetensors files: their layout, and a reader that reads each tensor when it is needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipeworker.errors import UnreadableFile
from pipeworker.record.checkpoint.frozen_weights import COMPLEX, NAMES, header_of
from pipeworker.record.checkpoint.json_state import as_complex

TensorInfo = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor."""
_DTYPES = {
    **{getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def supports(dtype: torch.dtype) -> bool:
    """Return whether the format has this dtype."""
    return dtype in _DTYPES


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8, of shape (nbytes,).

    ``Tensor.view`` does not do, since a dim of size 1 may have any stride.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def file_layout(
    infos: Mapping[str, TensorInfo], metadata: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return a file's header with `metadata`, and the range of bytes behind it of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    # Wide ones first, so that each is aligned behind the one before it.
    for name, (dtype, shape) in sorted(infos.items(), key=lambda item: -item[1][0].itemsize):
        first, end = end, end + math.prod(shape) * dtype.itemsize
        ranges[name] = first, end
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": (first, end)}
    return header_of(header), ranges


def _names(text: str | None) -> list[str] | None:
    """Return the list of names that metadata has as a text; None if it is none."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text or "")
        if isinstance(found, list) and all(isinstance(name, str) for name in found):
            return found
    return None


class TensorFile(Mapping[str, torch.Tensor]):
    """A mapped safetensors file; a tensor read from it has memory of its own.

    Unless it is `from_worker`, it need not have the metadata that a worker writes.

    Raises:
        UsageError: the file cannot be read, or is damaged; so may every method.
    """

    def __init__(self, path: Path, *, from_worker: bool = True) -> None:
        self.path = path
        try:
            file: Any = _open(path)
            metadata, keys = file.metadata() or {}, file.keys()
            names, complex_ = _names(metadata.get(NAMES)), _names(metadata.get(COMPLEX, "[]"))
            if from_worker and (
                names is None
                or complex_ is None
                or sorted(names) != sorted(keys)
                or not {*complex_} <= {*names}
            ):
                raise ValueError("its header does not match what it holds")
            # Another program's file may have anything under these names.
            if names is None or sorted(names) != sorted(keys):
                names = list(keys)
            complex_ = [*{*(complex_ or ())} & {*keys}]
        except OSError as error:
            raise UnreadableFile(path, error) from None
        except (SafetensorError, ValueError, RuntimeError, TypeError) as error:
            raise _damaged(path, error) from None
        self._file = file
        self._names = dict.fromkeys(names)
        self._complex = frozenset(complex_)

    def info(self, name: str) -> TensorInfo:
        """Return a tensor's dtype and shape without reading its data."""
        tensor = self._stored(name)
        if name not in self._complex:
            return tensor.dtype, tuple(tensor.shape)
        return torch.complex128, tuple(tensor.shape[:-1])

    def mapped(self, name: str) -> torch.Tensor:
        """Return a tensor in the file's own memory, valid while the file is not changed."""
        tensor = self._stored(name)
        try:
            return as_complex(tensor) if name in self._complex else tensor
        except RuntimeError as error:
            raise _damaged(self.path, error) from None

    def _stored(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        try:
            tensor: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, ValueError, RuntimeError, TypeError) as error:
            raise _damaged(self.path, error) from None
        return tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self.mapped(name)
        return tensor if name in self._complex else tensor.clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _open(path: Path) -> Any:
    """Open a safetensors file by any path; the library takes only those that are UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with path.open("rb") as file:
            return safe_open(f"/proc/self/fd/{file.fileno()}", "pt")
    return safe_open(path, "pt")


def _damaged(path: Path, error: Exception) -> UnreadableFile:
    return UnreadableFile(path, f"it is damaged ({error!s:.200})", "use another file")
