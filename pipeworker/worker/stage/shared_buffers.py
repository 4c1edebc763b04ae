"""Buffers that several stages have: each has a copy, so no forward may change one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from pipeworker.errors import UsageError
from pipeworker.worker import blame
from pipeworker.worker.stage.slots import Slot, get_slot
from pipeworker.worker.stage.values import bytes_of, checksums, is_checked, versions

BufferPlace = tuple[int, str]
"""The index of a layer in the model, and the name of a buffer within the layer."""


_SMALL = 1 << 20
"""The bytes of a buffer of the host up to which all its numbers are looked at in every step."""


class SharedBuffers:
    """The buffers of a stage that other stages have too, as a table of positions.

    Args:
        layers: the layers of the stage.
        first: the index of the first one in the model.
        names: the names of the buffers in messages, by place.
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, names: Mapping[BufferPlace, str]
    ) -> None:
        self._names: dict[Slot, str] = {}
        for (index, key), name in names.items():
            layer, (folder, _, last) = layers[index - first], key.rpartition(".")
            shown = f"{blame.layer(index, blame.kind_of(layer))}: the buffer {name}"
            self._names[layer.get_submodule(folder), last] = shown
        self._known: dict[Slot, tuple[torch.Tensor, list[int], tuple[int, ...]]] = {}
        self._checks = 0

    def begin(self) -> None:
        """Keep what is known of the buffers before the first mini-batch."""
        if not self._known:
            for slot in self._names:
                self._note(slot)

    def check(self, step: int) -> None:
        """Reject a change of a buffer, at the end of a mini-batch of a step.

        A change without a trace in the tensor's version, as of ``buffer.data``, takes a look at all
        numbers. Large buffers are searched for it after the first mini-batch, the second, the
        fourth and so on, and so are those of an accelerator, whose numbers the host would wait for.

        Raises:
            UsageError: a buffer has changed.
        """
        self._checks += 1
        is_due = is_checked(self._checks)
        for slot, (buffer, version, numbers) in self._known.items():
            now = get_slot(slot)
            is_searched = is_due or (buffer.is_cpu and bytes_of(buffer) <= _SMALL)
            if now is buffer and versions(now) == version and not is_searched:
                continue
            if not isinstance(now, torch.Tensor) or checksums(now) != numbers:
                raise UsageError(
                    f"{self._names[slot]} has changed, as the end of step {step} shows, and layers "
                    "of other stages share it, where it would not stay the same; put these layers "
                    "on one stage (--balance), or give each a buffer of its own"
                )
            self._note(slot)

    def _note(self, slot: Slot) -> None:
        buffer = get_slot(slot)
        self._known[slot] = buffer, versions(buffer), checksums(buffer)
