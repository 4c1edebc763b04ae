"""Tensors laid out in memory as a safetensors file has them, so that a copy of it is that file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import torch

from pipeworker.errors import UsageError
from pipeworker.record.memory import Memory
from pipeworker.record.plain import Tensors

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Where to copy, and what."""
Look = tuple[torch.dtype, tuple[int, ...]]
"""What is known of a tensor that is not read: its dtype and shape."""
_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}


def knows(dtype: torch.dtype) -> bool:
    """Whether the format does."""
    return dtype in _DTYPES


def check(tensors: Tensors) -> None:
    """Refuse what the format does not know.

    Raises:
        UsageError: a tensor's dtype; it is named.
    """
    for name, tensor in tensors.items():
        if not knows(tensor.dtype):
            raise UsageError(f"{name} is a tensor of {tensor.dtype}, which no checkpoint holds")


def layout(
    looks: Mapping[str, Look], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """What such a file begins with, and behind it from where to where each tensor is, in order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    # Wide ones first, so that each is aligned behind the one before it.
    for name, (dtype, shape) in sorted(looks.items(), key=lambda item: -item[1][0].itemsize):
        first, end = end, end + math.prod(shape) * dtype.itemsize
        spans[name] = first, end
        header[name] = {
            "dtype": _DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [first, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, spans


class Image:
    """One file of a memory.

    Args:
        number: of the file.
    """

    def __init__(self, memory: Memory, number: int) -> None:
        self._memory = memory
        self._number = number
        self._looks: object = None
        self._views: Tensors = {}

    def lay(self, tensors: Tensors, metadata: Mapping[str, str]) -> Pairs:
        """Make room for these tensors under a header; returns the copies that fill it.

        Room that is there for the same names, shapes and dtypes is used again.

        Raises:
            OSError: there is not that much memory.
        """
        looks = [(n, t.dtype, t.shape) for n, t in tensors.items()], dict(metadata)
        if looks != self._looks:
            self._looks = None
            self._make(tensors, metadata)
            self._looks = looks
        return [(self._views[name], t.detach()) for name, t in tensors.items() if t.numel()]

    def _make(self, tensors: Tensors, metadata: Mapping[str, str]) -> None:
        looks = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        head, spans = layout(looks, metadata)
        start, end = len(head), max((last for _, last in spans.values()), default=0)
        self._views = {}
        room = self._memory.room(self._number, start + end)
        room[:start] = head
        if not end:
            return
        data = torch.frombuffer(room, dtype=torch.uint8, offset=start)
        for name, (first, last) in spans.items():
            if last > first:
                like = tensors[name]
                self._views[name] = data[first:last].view(like.dtype).view(like.shape)
