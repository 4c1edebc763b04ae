"""The content of the files of a worker: weights, other tensors, and the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint.frozen_weights import COMPLEX, NAMES
from pipeworker.record.checkpoint.json_state import Tensors, pack, pack_tensor
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.record.checkpoint.tensor_file import supports


@dataclass(frozen=True, slots=True)
class TensorContent:
    """The tensors of a file, and its metadata; there is no file without metadata."""

    tensors: Tensors = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerContent:
    """The content of a worker's files: two or three of tensors, and one of JSON.

    Weights of dtype complex128, which `complex` names, are stored as pairs of real numbers; no
    update changes those that `frozen` names.
    """

    weights: Tensors = field(default_factory=dict)
    others: Tensors = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    complex: list[str] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        stages: Sequence[StageState],
        elsewhere: Collection[int],
        position: Mapping[str, Any] | None,
    ) -> WorkerContent:
        """Collect what a worker saves of its stages.

        Another stage writes the optimizer state of the parameters with the ids `elsewhere`.

        Raises:
            UsageError: a state holds something else than tensors and plain values; it is named.
        """
        content = cls()
        extra: dict[str, Any] = {}
        buffers: dict[str, Any] = {}
        strides: dict[str, list[int]] = {}
        made: dict[str, str] = {}
        aliases: dict[str, str] = {}
        for stage in stages:
            content.frozen |= stage.frozen()
            for name, value in stage.entries().items():
                tensors: Tensors = {}
                is_tensor = isinstance(value, torch.Tensor)
                packed = (pack_tensor if is_tensor else pack)(value, tensors, name)
                if packed in ({"$tensor": name}, {"$complex": name}):
                    content.weights[name] = tensors[name]
                    if "$complex" in packed:
                        content.complex.append(name)
                else:
                    extra[name] = pack(value, content.others, name)
            strides |= stage.strides()
            made |= stage.made_buffers()
            aliases |= stage.aliases()
            for name, buffer in stage.unlisted_buffers().items():
                with suppress(UsageError):  # a sparse one, which the layer builds again
                    buffers[name] = pack(buffer, content.others, f"buffers/{name}")
        content.frozen &= content.weights.keys()
        updates = [
            update for stage in stages for update in stage.pack_updates(elsewhere, content.others)
        ]
        content.plain = {
            "extra": extra,
            "buffers": buffers,
            "updates": updates,
            "strides": strides,
            "made": made,
            "aliases": aliases,
        }
        for stage in stages:
            if stage.adapters is not None:
                content.plain["adapters"] = dict(stage.adapters)
        if position is not None:
            content.plain["data"] = pack(dict(position), content.others, "data")
        for name, tensor in (content.weights | content.others).items():
            if not supports(tensor.dtype):
                raise UsageError(f"{name} is a tensor of {tensor.dtype}, which no checkpoint holds")
        return content

    def tensor_files(self) -> tuple[TensorContent, TensorContent, TensorContent]:
        """Return the content of the files with tensors: weights, others, and frozen weights.

        Frozen weights have a file of their own if not all weights are frozen.
        """
        others = TensorContent(self.others, {NAMES: json.dumps([*self.others])})
        trained = {name: t for name, t in self.weights.items() if name not in self.frozen}
        if not (trained and self.frozen):
            return self._file_of(self.weights), others, TensorContent()
        frozen = {name: t for name, t in self.weights.items() if name in self.frozen}
        return self._file_of(trained), others, self._file_of(frozen)

    def _file_of(self, weights: Tensors) -> TensorContent:
        complex_ = [name for name in self.complex if name in weights]
        return TensorContent(
            weights, {NAMES: json.dumps([*weights]), COMPLEX: json.dumps(complex_)}
        )


def check_savable(
    stages: Sequence[StageState],
    elsewhere: Collection[int] = (),
    position: Mapping[str, Any] | None = None,
) -> None:
    """Refuse at once what could not be saved later; see :meth:`WorkerContent.of`."""
    WorkerContent.of(stages, elsewhere, position)
