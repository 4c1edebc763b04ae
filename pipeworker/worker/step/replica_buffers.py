"""Buffers that a forward changes: each replica takes the values of replica 0.

DDP's ``broadcast_buffers`` does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker.internals import buffers_of, version_of
from pipeworker.worker.stage.slots import Slot
from pipeworker.worker.stage.values import (
    bits_of,
    checksums,
    is_checked,
    is_dense,
    set_strides,
    strides_of,
)

_SMALL = 1 << 16
"""Bytes of a buffer that is sent after every mini-batch. Running statistics are small, and a change
of theirs leaves no trace. A larger buffer is sent after it changed on any replica. One that is not
dense cannot be sent, so it may not change."""


class ReplicaBuffers:
    """The buffers of a stage, which get the values of replica 0; large ones only after a change."""

    def __init__(self, stage: int, layers: nn.Module) -> None:
        self._stage = stage
        self._layers = layers
        slots = [slot for slot, buffer in self._found() if buffer is not None]
        small = {slot for slot in slots if is_dense(_get(slot)) and _get(slot).nbytes <= _SMALL}
        self._small = [slot for slot in slots if slot in small]
        self._large = [slot for slot in slots if slot not in small]
        self._chosen: list[Slot] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._mini_batches = 0
        self._checksums: list[tuple[int, ...]] = []
        """Checksums of the large buffers before a mini-batch that compares them; else empty."""
        self._untraced: set[Slot] = set()
        """Large buffers that a forward changes without a trace in their version."""
        self._is_needed = False

    def __bool__(self) -> bool:
        return self._is_needed

    def _found(self) -> Iterator[tuple[Slot, torch.Tensor | None]]:
        for module in self._layers.modules():  # a forward may make some
            for name, buffer in buffers_of(module).items():
                yield (module, name), buffer

    def begin(self) -> None:
        """Begin a mini-batch: detect changes from now on."""
        self._mini_batches += 1
        # A forward may fill a buffer that is None, and the first one may register others.
        self._is_needed = self._mini_batches == 1 or any(True for _ in self._found())
        self._versions = [(_get(slot), version_of(_get(slot))) for slot in self._large]
        is_due = is_checked(self._mini_batches)
        self._checksums = [checksums(_get(slot)) for slot in self._large] if is_due else []

    def changes(self) -> list[bool]:
        """Return which of the large buffers have changed here.

        Raises:
            UsageError: a forward after the first mini-batch is the first one to change a large
                buffer without a trace, so the replicas may have had different ones for a while.
                They have not if the buffer was sent after the mini-batch before.
        """
        traced = [
            _get(slot) is not buffer or version_of(buffer) != version
            for slot, (buffer, version) in zip(self._large, self._versions, strict=True)
        ]
        for slot, before, is_traced in zip(self._large, self._checksums, traced, strict=False):
            if slot in self._untraced or is_traced or checksums(_get(slot)) == before:
                continue
            if self._mini_batches > 1 and slot not in self._chosen:  # else they were equal
                layer, key = self._name_of(slot)
                raise UsageError(
                    f"stage {self._stage}, layer {layer}: a forward has begun to change the buffer "
                    f"`{key}` without a trace (.data), so it may differ between the replicas; "
                    "change it in place under torch.no_grad() instead, or from the first step on"
                )
            self._untraced.add(slot)
        return [slot in self._untraced or t for slot, t in zip(self._large, traced, strict=True)]

    def choose(self, changes: Sequence[Sequence[bool]]) -> None:
        """Choose the buffers to send: of the large ones those that any replica has changed."""
        known = {*self._small, *self._large}
        found = (slot for slot, buffer in self._found() if buffer is not None)
        created = [slot for slot in found if slot not in known]  # by a forward
        chosen = compress(self._large, map(any, zip(*changes, strict=True)))
        self._chosen = [*self._small, *created, *chosen]

    def pack(self, device: torch.device) -> torch.Tensor:
        """Return the bytes of the chosen buffers on a device, of shape ``[total size]``.

        Raises:
            UsageError: one of them is sparse or nested.
        """
        for slot in self._chosen:
            if not is_dense(_get(slot)):
                layer, key = self._name_of(slot)
                raise UsageError(
                    f"stage {self._stage}, layer {layer}: a forward has made or changed the buffer "
                    f"`{key}`, which is sparse or nested, so replicas cannot exchange it; make it "
                    "dense, or use --replicas 1"
                )
        found = [bits_of(_get(slot)).to(device) for slot in self._chosen]
        return torch.cat(found) if found else torch.zeros(1, dtype=torch.uint8, device=device)

    def _name_of(self, slot: Slot) -> tuple[str, str]:
        """Return the index of the layer that has a buffer, and the buffer's name there."""
        module, name = slot
        place = next(path for path, one in self._layers.named_modules() if one is module)
        layer, _, key = f"{place}.{name}".partition(".")
        return layer, key

    def strides(self) -> dict[int, list[int]]:
        """Return the strides of the chosen buffers that are not contiguous, by their indices."""
        return strides_of([*map(_get, self._chosen)])

    def unpack(self, packed: torch.Tensor, strides: Mapping[int, Sequence[int]]) -> None:
        """Copy the bytes that :meth:`pack` returned on replica 0, where they differ.

        The buffers get the `strides` that they have there, which a checkpoint records.

        Raises:
            UsageError: a buffer has another size or shape there.
        """
        own_bytes = self.pack(packed.device)
        buffers = [_get(slot) for slot in self._chosen]
        try:
            if own_bytes.shape != packed.shape:
                raise ValueError
            set_strides(buffers, strides)
        except ValueError:
            raise UsageError(
                f"stage {self._stage}: its buffers have other sizes on another replica; build the "
                "same model on each"
            ) from None
        if torch.equal(own_bytes, packed):
            return
        sizes = [buffer.nbytes for buffer in buffers]
        own, sent = (torch.split(both, sizes) for both in (own_bytes, packed))
        # Together: an accelerator is waited for once.
        differ = torch.stack([(a != b).any() for a, b in zip(own, sent, strict=True)]).tolist()
        for buffer, bits, differs in zip(buffers, sent, differ, strict=True):
            if differs:
                with torch.no_grad():
                    buffer.copy_(bits.clone().view(buffer.dtype).view(buffer.shape))


def _get(slot: Slot) -> torch.Tensor:
    module, name = slot
    found = buffers_of(module).get(name)
    return torch.empty(0, device="cpu") if found is None else found
