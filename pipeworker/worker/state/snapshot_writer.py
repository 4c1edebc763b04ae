"""Snapshots of a worker's state: copied to memory while steps run, and from memory to disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeworker.errors import RecordError
from pipeworker.facts.checkpoint_file import CheckpointFile
from pipeworker.host import cgroups, streams
from pipeworker.host.task_thread import TaskThread
from pipeworker.record.checkpoint.manifest import file_names
from pipeworker.record.checkpoint.snapshot_buffer import CopyPairs, SnapshotBuffer, file_contents
from pipeworker.record.checkpoint.snapshot_memory import (
    LacksMemory,
    SnapshotMemory,
    write_contents,
    write_files,
)
from pipeworker.record.checkpoint.stage_state import StageState
from pipeworker.wire.messages.checkpoint import Copy, Save, Saved
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.device.device import peak_resident, used_memory
from pipeworker.worker.state.weight_watch import WeightWatch
from pipeworker.worker.state.writer_process import WriterProcess
from pipeworker.worker.transport.snapshot_transfer import MirrorClient

_NICENESS = 10
"""Niceness of the threads: steps come first."""
_KILL_SECONDS = 0.05
"""Seconds between attempts to end the process that writes."""
_SPARE = 2
"""The snapshots of all workers together may take one part in so many of the available memory."""

_CPU = torch.device("cpu")
_WRITES = "the process that writes checkpoints"

Position = Mapping[str, Any] | None
"""Position in the data; None on a worker that does not read it."""


class SnapshotWriter:
    """The snapshot memories of a worker, and the threads that fill them and have them written.

    Args:
        rank: rank of the worker among the `ranks` that write.
        memories: memories that outlive the worker; if there are none, it uses one of its own.
        folder: returns the folder of the checkpoint of a step, while it is not complete.
        inherited: descriptors that the path of the folder leads through.
        send: reports to the coordinator each part that was written while steps run.
        sharing: number of workers, of all replicas, that share the available memory.
        mirror: makes the client by which another host mirrors each snapshot, if one does. It is
            called at the first snapshot: by then all hosts can be reached. A snapshot counts as
            complete once it is mirrored.
        accelerator: the device of the state, if it is not the host.

    Attributes:
        lacked_memory: whether a snapshot was not made because memory is short.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        memories: Sequence[SnapshotMemory],
        folder: Callable[[int], Path],
        inherited: Sequence[int],
        send: Callable[[Saved], None],
        sharing: int = 1,
        mirror: Callable[[], MirrorClient | None] = lambda: None,
        accelerator: Accelerator | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._rank, self._ranks, self._sharing = rank, ranks, max(ranks, sharing)
        self._names = file_names(rank, ranks)
        self._folder, self._inherited, self._send = folder, inherited, send
        self._own_memories = [] if memories else [SnapshotMemory()]
        self._buffers = [
            SnapshotBuffer(memory, ranks) for memory in (*memories, *self._own_memories)
        ]
        self._make_mirror: Callable[[], MirrorClient | None] | None = mirror
        self._mirror: MirrorClient | None = None
        # Three threads, because a copy must wait neither for the disk nor for another host.
        self._copies, self._writes, self._mirrors = (
            TaskThread(name, self._failed, _NICENESS) for name in ("copies", "writes", "mirrors")
        )
        self._process: WriterProcess | None = None
        self._copied = threading.Event()
        """Set while no copy is in progress."""
        self._copied.set()
        self._error: BaseException | None = None
        self._watch = WeightWatch()
        self._complete = self._copied_last = -1, 0.0
        self._unmirrored = -1
        self.lacked_memory = False

    @property
    def complete(self) -> tuple[int, float]:
        """Step of the last complete snapshot, or -1, and the seconds of work it took.

        The main thread asks after a step, so that all that the step's forwards have changed is
        known.
        """
        copied = self._copied_last
        if copied != self._complete and copied[0] not in self._watch.torn():
            self._complete = copied
        return self._complete

    @property
    def torn(self) -> int:
        """The last step whose snapshot is given up: torn, or not mirrored; -1 for none."""
        return max((*self._watch.torn(), self._unmirrored))

    def copy(
        self, copy: Copy, parts: Sequence[StageState], elsewhere: set[int], position: Position
    ) -> None:
        """Begin a snapshot; :meth:`wait_copied` waits until it is whole.

        Weights and optimizer state do not change until the next update, so a thread copies them
        while the next step runs. Everything else is copied at once, and so are weights that
        forwards change, which the first snapshot of a worker finds out. `elsewhere` has the ids of
        parameters whose optimizer state another stage writes. If there is too little memory for a
        copy, no snapshot is made, and a checkpoint is written at once.
        """
        self._raise()
        make_mirror, self._make_mirror = self._make_mirror, None
        if make_mirror is not None:
            self._mirror = make_mirror()
        began = time.monotonic()
        buffer = self._buffers[copy.slot]
        room = self._free if copy.save else self._room
        try:
            pairs = buffer.begin(parts, elsewhere, position, room)
        except LacksMemory as lack:
            if copy.save:
                self._report(self._write_directly(copy.step, parts, elsewhere, position, lack))
            else:
                self._lacks_memory(copy.step, lack)
            return
        at_once = [pair for pair in pairs if self._watch.may_change(pair[1])]
        pairs = [pair for pair in pairs if not self._watch.may_change(pair[1])]
        self._watch.begin(copy.step, [t for _, t in pairs], [t for _, t in at_once])
        for view, tensor in at_once:
            view.copy_(tensor)
        self._copied.clear()
        seconds = time.monotonic() - began
        if pairs:
            stream = self._stream_behind()
            self._copies.submit(lambda: self._copy(copy, buffer, pairs, seconds, stream))
        else:  # waking a thread would cost more than what is left
            self._copy(copy, buffer, pairs, seconds, nullcontext())

    def wait_copied(self) -> None:
        """Wait until the snapshot in progress is copied, because weights are about to change."""
        self._wait()
        if (step := self._watch.end()) >= 0:
            streams.note(f"no snapshot of step {step}: a forward began to change weights in place")

    def _wait(self) -> None:
        self._copied.wait()
        self._raise()

    def save(
        self, save: Save, parts: Sequence[StageState], elsewhere: set[int], position: Position
    ) -> Saved:
        """Write this worker's part of a checkpoint now, after all writes in progress."""
        self._wait()
        self._writes.finish()
        self._raise()
        buffer = self._buffers[save.slot]
        try:
            buffer.fill(save.step, parts, elsewhere, position, self._free)
            files = write_files(buffer.memory.handles, self._folder(save.step), self._names)
        except LacksMemory as lack:
            return self._write_directly(save.step, parts, elsewhere, position, lack)
        except RecordError as error:
            return Saved(self._rank, save.step, error=str(error))
        return Saved(self._rank, save.step, files)

    def close(self) -> None:
        """End the threads and the process, and abandon writes in progress."""
        self._copies.close()
        if self._mirror is not None:
            self._mirror.close()
        self._mirrors.close()
        while not self._writes.close(_KILL_SECONDS):
            if self._process is not None:
                self._process.kill()
        if self._process is not None:
            self._process.close()
            self._process = None
        self._buffers = []
        while self._own_memories:
            self._own_memories.pop().close()

    def _free(self) -> int:
        """Return the bytes of memory that this worker may use for its next copy.

        The next step may take as much memory again as this process has released since its peak.
        """
        released = max(0, peak_resident() - used_memory(_CPU))
        return cgroups.available_memory() // self._sharing - released

    def _room(self) -> int:
        """Return the bytes by which one of this worker's snapshots may grow.

        All slots get the same share: a single snapshot could never be replaced by a newer one.
        """
        empty = sum(not buffer.memory.size for buffer in self._buffers)
        return self._free() // (_SPARE * max(1, empty))

    def _lacks_memory(self, step: int, lack: LacksMemory) -> None:
        """Report that there is no snapshot: the coordinator waits for it, and requests no other."""
        self.lacked_memory = True
        streams.note(f"no snapshot of step {step}: {lack.strerror}")

    def _write_directly(
        self,
        step: int,
        parts: Sequence[StageState],
        elsewhere: set[int],
        position: Position,
        lack: LacksMemory,
    ) -> Saved:
        """Write this worker's part of a checkpoint from the state itself, after earlier writes."""
        streams.note(
            f"the checkpoint of step {step} is written before the next step: {lack.strerror}"
        )
        self._writes.finish()
        contents = file_contents(step, self._names, self._ranks, parts, elsewhere, position)
        try:
            files = write_contents(contents, self._folder(step))
        except RecordError as error:
            return Saved(self._rank, step, error=str(error))
        return Saved(self._rank, step, files)

    def _report(self, saved: Saved) -> None:
        """Report a part that was written beside the steps."""
        self._send(replace(saved, beside=True))

    def _failed(self, error: BaseException) -> None:
        """Have the main thread raise a thread's exception when it next calls."""
        self._error = error
        self._copied.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _stream_behind(self) -> AbstractContextManager[object]:
        """Return a context for another thread, whose copies wait for the work until now alone.

        In this thread's stream each copy would wait for what the next step has submitted by then.
        """
        accelerator = self._accelerator
        if accelerator is None:
            return nullcontext()
        accelerator.snapshots.wait_event(accelerator.event(accelerator.current))
        return accelerator.using(accelerator.snapshots)

    def _copy(
        self,
        copy: Copy,
        buffer: SnapshotBuffer,
        pairs: CopyPairs,
        seconds: float,
        stream: AbstractContextManager[object],
    ) -> None:
        began = time.thread_time()
        with torch.no_grad(), stream:
            for view, tensor in pairs:
                view.copy_(tensor)
        try:
            buffer.commit(copy.step)
        except LacksMemory as lack:
            self._lacks_memory(copy.step, lack)
            if copy.save:
                self._report(Saved(self._rank, copy.step, error=str(lack.strerror)))
            self._copied.set()
            return
        seconds += time.thread_time() - began
        if self._mirror is None:
            self._copied_last = copy.step, seconds
        else:
            mirrored = partial(self._mirror_snapshot, self._mirror, copy, buffer, seconds)
            self._mirrors.submit(mirrored)
        if copy.save:
            self._writes.submit(lambda: self._write(copy.step, buffer.memory))
        self._copied.set()

    def _mirror_snapshot(
        self, mirror: MirrorClient, copy: Copy, buffer: SnapshotBuffer, seconds: float
    ) -> None:
        began = time.thread_time()
        try:
            is_mirrored = mirror.mirror(copy.slot, buffer.memory, copy.step)
        except LacksMemory as lack:
            self._lacks_memory(copy.step, lack)
            return
        if is_mirrored:
            self._copied_last = copy.step, seconds + time.thread_time() - began
        else:
            self._unmirrored = copy.step

    def _write(self, step: int, memory: SnapshotMemory) -> None:
        files, error = self._write_by_process(step, memory)
        if step in self._watch.torn():
            files, error = (), "a forward began to change weights in place while they were copied"
        self._report(Saved(self._rank, step, files, error))

    def _write_by_process(
        self, step: int, memory: SnapshotMemory
    ) -> tuple[tuple[CheckpointFile, ...], str]:
        """Have a process write the files; return them, and why they cannot be written, or "".

        The process that wrote the last checkpoint may have been killed since, so another one tries
        once more.
        """
        lasting = self._process is not None
        for _ in range(1 + lasting):
            if self._process is None:
                handles = [handle for buffer in self._buffers for handle in buffer.memory.handles]
                try:
                    self._process = WriterProcess([*handles, *self._inherited])
                except OSError as refused:  # too few processes or descriptors
                    return (), f"{_WRITES} cannot be started: {refused.strerror}"
            with suppress(BrokenPipeError):
                return self._process.write(memory.handles, self._folder(step), self._names)
            self._process.close()
            self._process = None
        return (), f"{_WRITES} is gone"
