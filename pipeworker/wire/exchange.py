"""Messages between two processes that outlast a connection: numbered, kept, sent again.

ZeroMQ connects again by itself, but what a closed connection had under way is lost, and nobody is
told. So each end numbers what it sends to the other and keeps it until the other has it. Heartbeats
and pings stand outside the numbers: they say how many messages each end has sent and received. What
arrives out of turn is dropped; an end that hears of more than it has asks for the rest again (as
TCP does with its cumulative acknowledgements, without its timers: the one connection there is at a
time keeps the order, so what is missing when a ping arrives is lost).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from struct import Struct

from pipeworker.errors import ProtocolError

_NUMBER = Struct("<q")
MOST_KEPT = 64 << 20
"""Bytes that may wait for the other end to say that it has them."""
OUTSIDE = 0
"""The number of a message that stands outside: it is taken as it comes."""


def numbered(number: int, frame: bytes) -> bytes:
    """What crosses the wire for a frame."""
    return _NUMBER.pack(number) + frame


def taken_apart(data: bytes) -> tuple[int, bytes]:
    """The number and the frame.

    Raises:
        ProtocolError: it is no numbered frame.
    """
    if len(data) < _NUMBER.size or data[7] & 0x80:
        raise ProtocolError("not a numbered frame")
    return _NUMBER.unpack_from(data)[0], data[_NUMBER.size :]


@dataclass(slots=True)
class Exchange:
    """One end of what two processes say to each other; `sent` and `received` count from its start.

    Nothing is kept for longer than the other end takes to say that it has it: a heartbeat or two.
    One that never says it has too much kept for it (`overfull`), and is no end to go on with.
    """

    sent: int = 0
    received: int = 0
    _kept: deque[bytes] = field(default_factory=deque)
    _bytes: int = 0
    _speaks: bool = False

    def send(self, frame: bytes) -> bytes:
        """Number a frame and keep it; returns what is to cross the wire."""
        self.sent += 1
        data = numbered(self.sent, frame)
        self._kept.append(data)
        self._bytes += len(data)
        return data

    def receive(self, number: int) -> bool:
        """Whether the message of this number is the next one, or stands outside.

        One that is there already, or comes after one that is lost, is to be dropped.
        """
        if number == OUTSIDE:
            return True
        if number != self.received + 1:
            return False
        self.received = number
        return True

    def lacks(self, sent: int) -> bool:
        """Whether something is lost, when the other end has sent so many."""
        return sent > self.received

    @property
    def awaited(self) -> bool:
        """Whether the other end, which speaks of what it has, does not have everything."""
        return self._speaks and bool(self._kept)

    def heard(self, received: int) -> None:
        """The other end has so many: they need not be kept."""
        self._speaks |= received > 0
        first = self.sent - len(self._kept)  # of those that were let go, the last
        for _ in range(min(received, self.sent) - first):
            self._bytes -= len(self._kept.popleft())

    @property
    def overfull(self) -> bool:
        """Whether more is kept than any end that listens would leave."""
        return self._bytes > MOST_KEPT

    def again(self) -> list[bytes]:
        """What the other end does not have, in order."""
        return list(self._kept)
