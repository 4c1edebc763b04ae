"""A snapshot of a worker's stages in memory, laid out as the files of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipeworker.errors import SnapshotLost
from pipeworker.record.checkpoint.frozen_weights import frozen_name
from pipeworker.record.checkpoint.json_state import Tensors
from pipeworker.record.checkpoint.manifest import WorkerFiles
from pipeworker.record.checkpoint.snapshot_memory import (
    Chunk,
    FileContent,
    LacksMemory,
    SnapshotMemory,
)
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.record.checkpoint.tensor_file import TensorInfo, file_layout, raw_bytes
from pipeworker.record.checkpoint.worker_content import TensorContent, WorkerContent

CopyPairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Copies to make: the target and the source of each, of one shape and dtype."""
_LEAST_BYTES = 1 << 12
"""A smaller tensor is copied at once."""


class SafetensorsLayout:
    """The file `number` of a snapshot's memory, with room for tensors."""

    def __init__(self, memory: SnapshotMemory, number: int) -> None:
        self._memory = memory
        self._number = number
        self._contents: object = None
        self._views: Tensors = {}

    def place(self, content: TensorContent) -> CopyPairs:
        """Make room for tensors under a header, and return the copies that fill it.

        Room for the same names, shapes and dtypes is used again.

        Raises:
            LacksMemory: there is not enough memory.
        """
        tensors, metadata = content.tensors, content.metadata
        infos = _infos(tensors)
        contents = list(infos.items()), dict(metadata)
        if contents != self._contents:
            self._contents, self._views = None, {}
            if not metadata:
                self._memory.write(self._number, b"")
                return []
            header, ranges = file_layout(infos, metadata)
            start, end = len(header), max((last for _, last in ranges.values()), default=0)
            room = self._memory.allocate(self._number, start + end)
            room[:start] = header
            for name, (first, last) in ranges.items():
                if last > first:
                    dtype, shape = infos[name]
                    data = torch.frombuffer(room, dtype=torch.uint8, offset=start)
                    self._views[name] = data[first:last].view(dtype).view(shape)
            self._contents = contents
        return [(self._views[name], t.detach()) for name, t in tensors.items() if t.numel()]


class SnapshotBuffer:
    """A snapshot in memory: files of tensors, and one of plain values.

    The file of plain values is empty until the snapshot is complete. The snapshots of `ranks`
    workers hold the whole state.
    """

    def __init__(self, memory: SnapshotMemory, ranks: int = 1) -> None:
        self.memory = memory
        self._ranks = ranks
        self._layouts = [SafetensorsLayout(memory, number) for number in (0, 1, 3)]
        self._plain: dict[str, Any] = {}

    def begin(
        self,
        stages: Sequence[StageState],
        elsewhere: Collection[int],
        position: Mapping[str, Any] | None,
        most: Callable[[], int] | None,
    ) -> CopyPairs:
        """Begin a snapshot, and return the copies that the caller still has to make.

        Those are of weights and optimizer state, which do not change until the next update; all
        else is copied at once. See :meth:`WorkerContent.of` for the arguments.

        Raises:
            LacksMemory: there is not enough memory, or it would grow by more than the bytes that
                `most` returns.
            UsageError: a state holds something else than tensors and plain values.
        """
        content = WorkerContent.of(stages, elsewhere, position)
        files = content.tensor_files()
        size = sum(tensor.nbytes for file in files for tensor in file.tensors.values())
        growth = size - self.memory.size
        if most is not None and growth > 0 and growth > most():
            raise LacksMemory
        self.memory.write(2, b"")
        self._plain = content.plain
        unchanged = {t.data_ptr() for stage in stages for t in stage.changed_by_update()}
        later: CopyPairs = []
        for layout, file in zip(self._layouts, files, strict=True):
            for view, tensor in layout.place(file):
                if tensor.nbytes >= _LEAST_BYTES and tensor.data_ptr() in unchanged:
                    later.append((view, tensor))
                else:
                    view.copy_(tensor)
        return later

    def commit(self, step: int) -> None:
        """Complete the snapshot: it is the state after `step`.

        Raises:
            LacksMemory: there is not enough memory.
        """
        self.memory.write(2, _plain_file(self._plain, step, self._ranks))

    def fill(
        self,
        step: int,
        stages: Sequence[StageState],
        elsewhere: Collection[int] = (),
        position: Mapping[str, Any] | None = None,
        most: Callable[[], int] | None = None,
    ) -> None:
        """Make a whole snapshot of the state after `step` at once; see :meth:`begin`."""
        for view, tensor in self.begin(stages, elsewhere, position, most):
            view.copy_(tensor)
        self.commit(step)


def file_contents(
    step: int,
    names: Sequence[str],
    ranks: int,
    stages: Sequence[StageState],
    elsewhere: Collection[int] = (),
    position: Mapping[str, Any] | None = None,
) -> list[FileContent]:
    """Return the files of a snapshot that is not in memory, under their `names`.

    A tensor is copied only if it is on an accelerator or not contiguous, one at a time. See
    :class:`SnapshotBuffer` and :meth:`WorkerContent.of` for the arguments.

    Raises:
        UsageError: a state holds something else than tensors and plain values.
    """
    content = WorkerContent.of(stages, elsewhere, position)
    model, optimizer, state = names
    plain = memoryview(_plain_file(content.plain, step, ranks))
    weights, others, frozen = content.tensor_files()
    found = [
        FileContent(model, partial(_tensor_chunks, weights)),
        FileContent(optimizer, partial(_tensor_chunks, others)),
        FileContent(state, lambda: iter([plain])),
    ]
    if frozen.tensors:
        chunks = partial(_tensor_chunks, frozen)
        found.append(FileContent(frozen_name(model), chunks, shared=True))
    return found


def _tensor_chunks(content: TensorContent) -> Iterator[Chunk]:
    tensors = content.tensors
    header, ranges = file_layout(_infos(tensors), content.metadata)
    yield memoryview(header)
    for name in ranges:  # by their place in the file
        if tensors[name].numel():
            whole = tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous()
            yield raw_bytes(whole).numpy().data


def _infos(tensors: Tensors) -> dict[str, TensorInfo]:
    return {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}


def _plain_file(plain: Mapping[str, Any], step: int, ranks: int) -> bytes:
    return json.dumps({**plain, "step": step, "ranks": ranks}).encode()


def content_of(state: bytes) -> dict[str, Any]:
    """Return what a snapshot's state file has; nothing if a worker was killed as it wrote it."""
    try:
        content: dict[str, Any] = json.loads(state)
    except ValueError:
        return {}
    return content


def snapshot_files(memory: SnapshotMemory, step: int, ranks: int) -> WorkerFiles:
    """Return the files of a worker's snapshot of the state after `step`, one of `ranks` workers.

    The state after a step is the same in every generation, but not the part of it that a rank has:
    a host that no longer has this rank may keep what it had before the job shrank.

    Raises:
        SnapshotLost: the snapshot is incomplete, of another step or of other workers.
    """
    files = WorkerFiles(*memory.paths)
    content = content_of(files.state.read_bytes())
    if (content.get("step"), content.get("ranks")) != (step, ranks):
        raise SnapshotLost(f"the snapshot of step {step} in memory is lost")
    return files
