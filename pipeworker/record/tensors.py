"""A file of tensors, of which each is read when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipeworker.errors import UsageError
from pipeworker.record.image import Look
from pipeworker.record.plain import as_complex

NAMES, COMPLEX = "names", "complex128"
"""In the header: the order of names, which the format loses, and which tensors are complex."""


class TensorFile(Mapping[str, torch.Tensor]):
    """A safetensors file, mapped: what is taken out of it has memory of its own.

    Args:
        of_a_stage: it must have the header that a stage writes.

    Raises:
        UsageError: it cannot be read, or is damaged; every method may say so.
    """

    def __init__(self, path: Path, *, of_a_stage: bool = True) -> None:
        self.path = path
        try:
            file: Any = safe_open(path, "pt")
            header, keys = file.metadata() or {}, file.keys()
            default = "[]" if of_a_stage else json.dumps(keys)
            names, complex_ = (json.loads(header.get(k, d)) for k, d in _headers(default))
            if sorted(names) != sorted(keys) or not {*complex_} <= {*names}:
                raise ValueError("its header does not match what it holds")
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
        except (SafetensorError, ValueError, RuntimeError, TypeError) as error:
            raise _damaged(path, error) from None
        self._file = file
        self._names = dict.fromkeys(names)
        self._complex = frozenset(complex_)

    def look(self, name: str) -> Look:
        """A tensor's dtype and shape; nothing is read."""
        tensor = self._mapped(name)
        if name not in self._complex:
            return tensor.dtype, tuple(tensor.shape)
        return torch.complex128, tuple(tensor.shape[:-1])

    def mapped(self, name: str) -> torch.Tensor:
        """A tensor in the file's own memory, to be read while the file stays as it is."""
        tensor = self._mapped(name)
        try:
            return as_complex(tensor) if name in self._complex else tensor
        except RuntimeError as error:
            raise _damaged(self.path, error) from None

    def _mapped(self, name: str) -> torch.Tensor:
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


def _headers(names: str) -> list[tuple[str, str]]:
    return [(NAMES, names), (COMPLEX, "[]")]


def _damaged(path: Path, error: Exception) -> UsageError:
    return UsageError(f"cannot read {path}: it is damaged ({error!s:.200})")
