"""Copies of a worker's state: into memory while steps run, and from there to disk."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeworker.errors import RecordError
from pipeworker.host import streams
from pipeworker.host.spawn import command
from pipeworker.record.checkpoint import Album, Part
from pipeworker.record.image import Pairs
from pipeworker.record.manifest import file_names
from pipeworker.record.memory import Memory, available, write
from pipeworker.wire.messages.checkpoint import Copy, File, Saved
from pipeworker.worker.transport.memories import Mirror

_NICE = 10
_LOOK_SECONDS = 0.05
_SPARE = 2
"""A copy may take one part in so many of what is available, with those of all other workers."""


class Keeper:
    """The memories of one worker, and a thread that fills them and has them written.

    Args:
        memories: that outlive the worker; without any it makes one of its own.
        folder: of the checkpoint of a step, while it is not complete.
        send: tells the coordinator of parts that are written while steps run.
        sharing: workers that memory is taken to be for; those of all replicas.
        mirror: has another host keep each copy as well; it counts when that is done.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        memories: Sequence[Memory],
        folder: Callable[[int], Path],
        send: Callable[[Saved], None],
        sharing: int = 1,
        mirror: Mirror | None = None,
    ) -> None:
        self._rank, self._sharing = rank, max(ranks, sharing)
        self._names = file_names(rank, ranks)
        self._folder, self._send = folder, send
        self._mine = [] if memories else [Memory()]
        self._albums = [Album(memory) for memory in (*memories, *self._mine)]
        self._mirror = mirror
        # One each, since a copy may wait neither for the disk nor for another host.
        names = ("copies", "writes", "mirrors")
        self._copies, self._writes, self._mirrors = (_Hand(name, self._failed) for name in names)
        self._writer: _Writer | None = None
        self._whole = threading.Event()
        self._whole.set()
        self._error: BaseException | None = None
        self._copied = -1, 0.0

    @property
    def whole(self) -> tuple[int, float]:
        """The last step whose state is copied as a whole, and the seconds of work that took."""
        return self._copied

    def copy(
        self,
        copy: Copy,
        parts: Sequence[Part],
        elsewhere: set[int],
        position: Mapping[str, Any] | None,
    ) -> None:
        """Begin a copy; it is whole when :meth:`settle` returns.

        Raises:
            OSError: there is not enough memory.
        """
        self._raise()
        began = time.monotonic()
        album = self._albums[copy.slot]
        room = None if copy.save else available() // (_SPARE * self._sharing)
        later = album.take(parts, elsewhere, position, room)
        if later is None:  # the coordinator goes on waiting for it, and asks for no other
            streams.note(f"no copy of step {copy.step}: memory for it would be taken from others")
            return
        self._whole.clear()
        spent = time.monotonic() - began
        self._copies.do(lambda: self._copy(copy, album, later, spent))

    def settle(self) -> None:
        """Wait until what is being copied is whole: weights are about to change."""
        self._whole.wait()
        self._raise()

    def save(
        self,
        step: int,
        slot: int,
        parts: Sequence[Part],
        elsewhere: set[int],
        position: Mapping[str, Any] | None,
    ) -> Saved:
        """Write this worker's part at once, behind what is still being written."""
        self.settle()
        self._writes.finish()
        self._raise()
        album = self._albums[slot]
        try:
            album.fill(step, parts, elsewhere, position)
            files = write(album.memory.handles, self._folder(step), self._names)
        except RecordError as error:
            return Saved(self._rank, step, error=str(error))
        return Saved(self._rank, step, files)

    def close(self) -> None:
        """End the threads and the process; nobody waits any more for what is being written."""
        self._copies.close()
        if self._mirror is not None:
            self._mirror.close()
        self._mirrors.close()
        while not self._writes.close(_LOOK_SECONDS):
            if self._writer is not None:
                self._writer.kill()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._albums = []
        while self._mine:
            self._mine.pop().close()

    def _failed(self, error: BaseException) -> None:
        """Raised where the main thread next looks."""
        self._error = error
        self._whole.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _copy(self, copy: Copy, album: Album, later: Pairs, spent: float) -> None:
        began = time.thread_time()
        with torch.no_grad():
            for view, tensor in later:
                view.copy_(tensor)
        album.seal(copy.step)
        spent += time.thread_time() - began
        if self._mirror is None:
            self._copied = copy.step, spent
        else:
            self._mirrors.do(partial(self._keep_elsewhere, self._mirror, copy, album, spent))
        if copy.save:
            self._writes.do(lambda: self._write(copy.step, album.memory))
        self._whole.set()

    def _keep_elsewhere(self, mirror: Mirror, copy: Copy, album: Album, spent: float) -> None:
        began = time.thread_time()
        if mirror.keep(copy.slot, album.memory, copy.step):
            self._copied = copy.step, spent + time.thread_time() - began

    def _write(self, step: int, memory: Memory) -> None:
        if self._writer is None:
            handles = [handle for album in self._albums for handle in album.memory.handles]
            self._writer = _Writer(handles)
        try:
            files, error = self._writer.write(memory.handles, self._folder(step), self._names)
        except BrokenPipeError:
            files, error = (), "the process that writes checkpoints is gone"
            self._writer.close()
            self._writer = None  # the next checkpoint has another
        self._send(Saved(self._rank, step, files, error))


class _Hand:
    """A thread that does one thing after the other, from the first on.

    Args:
        failed: is told what one raised.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None]) -> None:
        self._name, self._failed = name, failed
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def do(self, work: Callable[[], None]) -> None:
        """Behind what it is doing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._work.put(work)

    def finish(self) -> None:
        """Wait for what it is doing."""
        if self._thread is not None:
            done = threading.Event()
            self._work.put(done.set)
            done.wait()

    def close(self, seconds: float | None = None) -> bool:
        """End it, behind what it is doing; returns whether it has ended, within some seconds."""
        if self._thread is None:
            return True
        self._work.put(None)
        self._thread.join(seconds)
        ended = not self._thread.is_alive()
        if ended:
            self._thread = None
        return ended

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own: steps come first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while (work := self._work.get()) is not None:
            try:
                work()
            except BaseException as error:
                self._failed(error)


class _Writer:
    """A process that writes memories to disk."""

    def __init__(self, handles: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            command("pipeworker.record.writer"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=handles,
        )

    def write(
        self, handles: Sequence[int], folder: Path, names: Sequence[str]
    ) -> tuple[tuple[File, ...], str]:
        """Returns the files, or why they cannot be written.

        Raises:
            BrokenPipeError: the process is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = json.dumps([str(folder), list(handles), list(names)])
        self._process.stdin.write(request.encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.endswith(b"\n"):
            raise BrokenPipeError
        files, error = json.loads(answer)
        return tuple(File(*file) for file in files), error

    def kill(self) -> None:
        """End it, whatever it is writing."""
        self._process.kill()

    def close(self) -> None:
        """End it, behind what it is writing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
