"""The position of a worker, written before each layer into memory that outlives the worker.

Its host's agent reads what a worker was doing that died without a message.
"""

from __future__ import annotations

import mmap
from struct import Struct

from pipeworker.facts.position import Phase, Position

_RECORD = Struct("<5q")
_COUNTS = Struct("<2q")


class Tracker:
    """The position of one worker, in an anonymous shared mapping that survives a fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _RECORD.size + _COUNTS.size)
        self.set(Phase.STARTING)

    def set(self, phase: Phase, step: int = -1, microbatch: int = -1, layer: int = -1) -> None:
        """Record a position at which the worker computes."""
        _RECORD.pack_into(self._memory, 0, phase, step, microbatch, layer, 0)

    def wait(
        self, step: int = -1, microbatch: int = -1, layer: int = -1, phase: Phase = Phase.WAITING
    ) -> None:
        """Record a position at which the worker may wait for other processes."""
        _RECORD.pack_into(self._memory, 0, phase, step, microbatch, layer, 1)

    def progress(self) -> None:
        """Record that a part of what the worker waits for has arrived."""
        *position, waiting = _RECORD.unpack_from(self._memory, 0)
        _RECORD.pack_into(self._memory, 0, *position, waiting + 1)

    def count(self, evaluated: int, length: int) -> None:
        """Record how many mini-batches of an evaluation set, of `length`, have been read."""
        _COUNTS.pack_into(self._memory, _RECORD.size, evaluated, length)

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of :meth:`count`; 0 outside of an evaluation pass."""
        evaluated, length = _COUNTS.unpack_from(self._memory, _RECORD.size)
        return evaluated, length

    def get(self) -> Position:
        """Return the recorded position."""
        phase, step, microbatch, layer, _ = _RECORD.unpack_from(self._memory, 0)
        return Position(Phase(phase), step, microbatch, layer)

    @property
    def waiting(self) -> int:
        """1 if the worker may wait for other processes, and is stuck without them, else 0.

        Each part of what it waits for that has arrived adds 1.
        """
        waiting: int = _RECORD.unpack_from(self._memory, 0)[4]
        return waiting

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()
