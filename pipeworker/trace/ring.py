"""When each action of a mini-batch began and ended, in memory that outlives the worker.

The worker writes two numbers an action. If it dies, its host's agent reads them; of a worker that
has none, as under torchrun, they are in a file of the run, which the coordinator reads.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

from pipeworker.record.files.atomic_file import no_link

CAPACITY = 1 << 18
"""The number of actions for which a ring has memory; pages that are not written take none."""
_HEADER = Struct("<4qd")
_PATH = Struct("<h4094s")
_BYTES = _HEADER.size + _PATH.size + 16 * CAPACITY


@dataclass(frozen=True, slots=True)
class MiniBatchTimes:
    """The times of those actions of a mini-batch that happened.

    Attributes:
        first: the number of the first micro-batch within the step.
        program: the number of the worker's action list.
        began: when the mini-batch began, in seconds of the worker's clock.
        times: the begin and end of each action, alternating; of the last one perhaps only its
            begin.
        memory: the bytes that the worker used behind each action; empty if they were not read.
    """

    step: int
    first: int
    program: int
    began: float
    times: tuple[float, ...]
    memory: tuple[int, ...] = ()


class Ring:
    """The times of the mini-batch that a worker runs, in a shared mapping that survives a fork.

    Args:
        file: a descriptor of the file to map; -1 for memory alone.
    """

    def __init__(self, file: int = -1) -> None:
        self._memory = mmap.mmap(file, _BYTES)
        self._all = memoryview(self._memory)
        self._times = self._all[_HEADER.size + _PATH.size :].cast("d")

    @staticmethod
    def new_file(path: Path) -> Ring:
        """Return an empty ring in a new file, whose space on the disk is reserved.

        Raises:
            OSError: the file cannot be made, or there is no space for it.
        """
        file = no_link(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            # Else a write that the disk has no space for would end the worker by a signal.
            os.posix_fallocate(file, 0, _BYTES)
            return Ring(file)
        finally:
            os.close(file)

    @staticmethod
    def in_file(path: Path) -> Ring:
        """Return the ring in a file.

        Raises:
            OSError: the file cannot be opened, or not be mapped.
            ValueError: it is no ring.
        """
        file = no_link(path, os.O_RDWR)
        try:
            return Ring(file)
        finally:
            os.close(file)

    @property
    def path(self) -> str:
        """The path of the worker's file of rows, to which the agent adds a dead worker's; or ""."""
        length, text = _PATH.unpack_from(self._memory, _HEADER.size)
        return os.fsdecode(text[:length])

    @path.setter
    def path(self, path: str) -> None:
        text = os.fsencode(path)
        if len(text) <= _PATH.size - 2:
            _PATH.pack_into(self._memory, _HEADER.size, len(text), text)

    def begin(
        self, step: int, first: int, program: int, count: int, now: float
    ) -> memoryview[float]:
        """Begin a mini-batch of `count` actions; return the memory of their begins and ends.

        If the ring is too small, the memory does not outlive the worker.
        """
        fits = count <= CAPACITY
        _HEADER.pack_into(self._memory, 0, step, first, program, count if fits else 0, now)
        return self._times[: 2 * count] if fits else memoryview(bytearray(16 * count)).cast("d")

    def end(self) -> None:
        """Note that the mini-batch is complete, and nothing of it is left to record."""
        _HEADER.pack_into(self._memory, 0, 0, 0, 0, 0, 0.0)

    def unfinished(self) -> MiniBatchTimes | None:
        """Return the times of a mini-batch that has begun and not ended; None if there is none."""
        step, first, program, count, began = _HEADER.unpack_from(self._memory, 0)
        if not 0 < count <= CAPACITY:
            return None
        times = self._times[: 2 * count].tolist()
        # What an earlier mini-batch has written there is older than the begin of this one.
        done = next((place for place, at in enumerate(times) if at < began), len(times))
        return MiniBatchTimes(step, first, program, began, tuple(times[:done]))

    def close(self) -> None:
        """Unmap the memory."""
        self._times.release()
        self._all.release()
        self._memory.close()
