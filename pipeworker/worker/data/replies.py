"""The mini-batches that a process has read, and keeps for its worker.

It keeps those since the oldest state from which a recovery may continue, if they take little
memory: a new worker gets them again.
"""

from __future__ import annotations

import resource
import sys
from collections import deque
from dataclasses import dataclass

from pipeworker.host import cgroups
from pipeworker.worker.data.packing import Packed
from pipeworker.worker.data.reader_requests import DataPlace

_UNCHECKED = 1 << 26
"""Bytes of mini-batches that are kept however little memory is available."""
_SHARE = 8
"""Mini-batches may take one part in so many of the memory that would be available without them."""
_DESCRIPTORS = 4
"""They may take one part in so many of the descriptors that the process may have open."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to a request for a mini-batch: that or, as the last one, the end or a failure.

    Attributes:
        before, after: its places; None for a failure.
        status: the status with which the process exits once the reply is sent; None to go on.
    """

    packed: Packed
    before: DataPlace | None = None
    after: DataPlace | None = None
    is_last: bool = True
    status: int | None = None


class Replies:
    """The mini-batches that were read: those that the worker was sent, and those that wait."""

    def __init__(self) -> None:
        self._kept: deque[Reply] = deque()
        self._sent = 0
        self._bytes = 0
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = descriptors // _DESCRIPTORS if descriptors > 0 else sys.maxsize

    @property
    def waiting(self) -> int:
        """The number of replies that the worker was not sent."""
        return len(self._kept) - self._sent

    def add(self, reply: Reply) -> None:
        """Keep a reply; drop the oldest that the worker was sent, if they take too much.

        That is too much memory, or too many descriptors: a large mini-batch has one.
        """
        self._kept.append(reply)
        while len(self._kept) > self._most and self._sent:
            self._drop_oldest()
        self._bytes += reply.packed.size
        if self._bytes > _UNCHECKED:
            most = (cgroups.available_memory() + self._bytes) // _SHARE
            while self._bytes > most and self._sent:
                self._drop_oldest()

    def next(self) -> Reply:
        """Return the next reply; the last one again and again."""
        reply = self._kept[self._sent]
        self._sent += not reply.is_last
        return reply

    def seek(self, place: DataPlace) -> bool:
        """Continue at a place; return whether the mini-batch after it is kept."""
        for number, reply in enumerate(self._kept):
            if place in (reply.before, reply.after):
                self._sent = number + (place != reply.before)
                return True
        return False

    def drop_before(self, place: DataPlace) -> None:
        """Drop what the worker was sent and lies before a place."""
        while self._sent and (after := self._kept[0].after) and after <= place:
            self._drop_oldest()

    def drop_sent(self) -> None:
        """Drop all that the worker was sent."""
        while self._sent:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped = self._kept.popleft()
        self._sent -= 1
        self._bytes -= dropped.packed.size
        dropped.packed.close()
