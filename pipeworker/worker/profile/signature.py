"""Signatures: the structure, shapes and dtypes of a nested value as plain data, and made-up values.

A layer's input is described where the network's input is known, and made up where the layer is
measured: floats are small random numbers of a private generator; integers and booleans that are the
network's own input, passed through, are drawn from its range, or are its very values where it is
known; all others are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import msgspec
import torch

from pipeworker.errors import PipeworkerError, ProtocolError
from pipeworker.worker.internals import storage_key
from pipeworker.worker.transport import frame as frames
from pipeworker.worker.transport import structure as structures
from pipeworker.worker.transport.layout import DTYPES, span_of
from pipeworker.worker.transport.structure import TypeRegistry

_DRAWN = 1 << 16
"""Random elements that are drawn; a larger tensor repeats them."""
_SEED = 20
_MOST_ELEMENTS = 1 << 40


class TensorSignature(msgspec.Struct, frozen=True, array_like=True):
    """The signature of one tensor.

    Attributes:
        dtype: its name, as ``float32``.
        wants_grad: whether it requires a gradient.
        source: its number among the tensors of the network's input that it is; else -1.
        low, high: the least and the largest element of that, if it has integers or booleans.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    wants_grad: bool = False
    source: int = -1
    low: int = 0
    high: int = 0

    @staticmethod
    def of(tensor: torch.Tensor, inputs: Mapping[Any, tuple[int, int, int]]) -> TensorSignature:
        """Return the signature of a tensor; `inputs` has what :func:`input_ranges` returned."""
        source, low, high = inputs.get(_identity(tensor), (-1, 0, 0))
        name, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        stride = tensor.stride()
        return TensorSignature(shape, stride, name, tensor.requires_grad, source, low, high)

    def make(self, device: torch.device, known: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Return a tensor of this signature, which requires no gradient.

        `known` are the tensors of the network's input.
        """
        dtype = DTYPES.get(self.dtype)
        extent = span_of(self.shape, self.stride)
        if dtype is None or min((*self.shape, *self.stride), default=0) < 0:
            raise ProtocolError(f"a tensor of {self.dtype} and shape {self.shape}")
        if extent > _MOST_ELEMENTS:
            raise ProtocolError(f"a tensor of {extent} elements")
        if 0 <= self.source < len(known) and tuple(known[self.source].shape) == self.shape:
            return known[self.source].detach().to(device)
        flat = torch.zeros(extent, dtype=dtype, device=device)
        if extent and (dtype.is_floating_point or dtype.is_complex or self.high > self.low):
            repeat(self._drawn(min(extent, _DRAWN), dtype, device), flat)
        elif self.source >= 0:
            flat.fill_(self.low)
        return flat.as_strided(self.shape, self.stride)

    def _drawn(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_SEED)
        if dtype.is_floating_point or dtype.is_complex:
            kind = torch.complex64 if dtype.is_complex else torch.float32
            return torch.randn(count, dtype=kind, device="cpu", generator=generator).to(
                device, dtype
            )
        span = torch.randint(self.low, self.high + 1, (count,), device="cpu", generator=generator)
        return span.to(device, dtype)


def repeat(part: torch.Tensor, flat: torch.Tensor) -> None:
    """Fill a tensor of shape [n] with a part, of shape [m], again and again; m is at most n."""
    whole = len(flat) // len(part) * len(part)
    flat[:whole].view(-1, len(part)).copy_(part)
    flat[whole:].copy_(part[: len(flat) - whole])


def input_ranges(
    values: Sequence[torch.Tensor], stand_ins: Sequence[torch.Tensor]
) -> dict[Any, tuple[int, int, int]]:
    """Return number, least and largest element of the network's input tensors, by their identity.

    `stand_ins` are the tensors that stand for them in the pass that is described.
    """
    found = {}
    for number, (tensor, stand_in) in enumerate(zip(values, stand_ins, strict=True)):
        low = high = 0
        if tensor.numel() and not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            low, high = int(tensor.min()), int(tensor.max())
        found[_identity(stand_in)] = number, low, high
    return found


def _identity(tensor: torch.Tensor) -> Any:
    """Return what tells a tensor, or a copy of the reference to it, from others in one pass."""
    return (
        storage_key(tensor),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
    )


class ValueSignature(msgspec.Struct, frozen=True, array_like=True):
    """The signature of a nested value: its structure, leaves as a frame has them, and tensors."""

    structure: Any
    leaves: tuple[Any, ...]
    tensors: tuple[TensorSignature, ...]

    @staticmethod
    def of(
        value: Any, types: TypeRegistry, inputs: Mapping[Any, tuple[int, int, int]]
    ) -> ValueSignature:
        """Return the signature of a value."""
        leaves, tensors, structure = frames.flatten(value, types)
        signatures = tuple(TensorSignature.of(tensor, inputs) for tensor in tensors)
        return ValueSignature(structure, leaves, signatures)

    def make(
        self, types: TypeRegistry, device: torch.device, known: Sequence[torch.Tensor] = ()
    ) -> Any:
        """Return a value of this signature, on a device."""
        if structures.count_leaves(self.structure, types) != len(self.leaves):
            raise ProtocolError("a structure with another number of leaves")
        tensors = [signature.make(device, known) for signature in self.tensors]
        for leaf in self.leaves:
            if type(leaf) is int and not 0 <= leaf < len(tensors):
                raise ProtocolError(f"tensor {leaf} of {len(tensors)}")
        return frames.assemble(frames.Frame(self.structure, self.leaves, ()), tensors, types)

    @property
    def wants_grad(self) -> tuple[bool, ...]:
        """Whether each distinct tensor requires a gradient."""
        return tuple(tensor.wants_grad for tensor in self.tensors)

    def pack(self) -> bytes:
        """Return the signature as bytes."""
        try:
            return msgspec.msgpack.encode(self)
        except ValueError as error:  # half of a surrogate
            raise PipeworkerError(f"a value cannot be described: {error}") from error

    @staticmethod
    def unpack(packed: bytes) -> ValueSignature:
        """Return what :meth:`pack` packed."""
        try:
            return msgspec.convert(msgpack.unpackb(packed, use_list=False), ValueSignature)
        except Exception as error:  # msgpack raises ValueError, UnicodeDecodeError and its own
            raise ProtocolError(f"not a signature: {type(error).__name__}") from error
