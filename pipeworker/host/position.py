"""Where a worker is, written before each layer into memory that outlives the worker.

The process that forked the worker shares the memory: when the worker dies without a word, what it
was doing is still known. Writing costs a fraction of a microsecond.
"""

from __future__ import annotations

import mmap
from struct import Struct

from pipeworker.wire.messages.position import Phase, Position

_RECORD = Struct("<5q")


class Tracker:
    """The position of one worker, in an anonymous shared mapping that survives a fork."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _RECORD.size)
        self.set(Phase.STARTING)

    def set(self, phase: Phase, step: int = -1, microbatch: int = -1, layer: int = -1) -> None:
        """The worker computes."""
        _RECORD.pack_into(self._memory, 0, phase, step, microbatch, layer, 0)

    def wait(
        self,
        step: int = -1,
        microbatch: int = -1,
        layer: int = -1,
        phase: Phase = Phase.WAITING,
    ) -> None:
        """The worker may have to wait for others."""
        _RECORD.pack_into(self._memory, 0, phase, step, microbatch, layer, 1)

    def get(self) -> Position:
        phase, step, microbatch, layer, _ = _RECORD.unpack_from(self._memory, 0)
        return Position(Phase(phase), step, microbatch, layer)

    @property
    def waits(self) -> bool:
        """Whether it is stuck when the others are gone."""
        return bool(_RECORD.unpack_from(self._memory, 0)[4])

    def close(self) -> None:
        self._memory.close()
