"""Messages between two processes that survive a lost connection: numbered, stored, sent again.

Heartbeats and pings, which are not numbered, carry how many messages each end has sent and
received. These are TCP's cumulative acknowledgements without its timers, because there is one
connection at a time and it preserves the order, so a message that is missing when a ping arrives is
lost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from struct import Struct

from pipeworker.errors import ProtocolError

_NUMBER = Struct("<q")
MAX_UNACKNOWLEDGED = 64 << 20
"""Bytes that are stored at most for an end that acknowledges nothing."""
UNNUMBERED = 0
"""The number of a message outside the sequence, which is accepted at any time."""


def pack(number: int, frame: bytes) -> bytes:
    """Return the bytes that cross the wire for a frame."""
    return _NUMBER.pack(number) + frame


def unpack(data: bytes) -> tuple[int, bytes]:
    """Return the number and the frame.

    Raises:
        ProtocolError: `data` is not a numbered frame.
    """
    if len(data) < _NUMBER.size or data[7] & 0x80:
        raise ProtocolError("not a numbered frame")
    return _NUMBER.unpack_from(data)[0], data[_NUMBER.size :]


@dataclass(slots=True)
class ReliableStream:
    """One end of a conversation, with the numbers of messages sent and received so far.

    A message is stored until the other end acknowledges it: for a heartbeat or two.
    """

    sent: int = 0
    received: int = 0
    _stored: deque[bytes] = field(default_factory=deque)
    _bytes: int = 0
    _acknowledges: bool = False

    def sequence(self, frame: bytes) -> bytes:
        """Return the bytes to send for a frame: it gets the next number and is stored."""
        self.sent += 1
        data = pack(self.sent, frame)
        self._stored.append(data)
        self._bytes += len(data)
        return data

    def accept(self, number: int) -> bool:
        """Return whether a message is the next one, or unnumbered; any other is to be dropped."""
        if number == UNNUMBERED:
            return True
        if number != self.received + 1:
            return False
        self.received = number
        return True

    def is_missing(self, sent: int) -> bool:
        """Return whether a message is lost, given how many the other end has sent."""
        return sent > self.received

    def acknowledge(self, received: int) -> None:
        """Drop the stored messages that the other end has received."""
        self._acknowledges |= received > 0
        first = self.sent - len(self._stored)  # the last message that was dropped
        for _ in range(min(received, self.sent) - first):
            self._bytes -= len(self._stored.popleft())

    @property
    def is_pending(self) -> bool:
        """Whether the other end, which acknowledges messages, has not received all of them."""
        return self._acknowledges and bool(self._stored)

    @property
    def is_overfull(self) -> bool:
        """Whether more is stored than for any end that acknowledges messages."""
        return self._bytes > MAX_UNACKNOWLEDGED

    def unacknowledged(self) -> list[bytes]:
        """Return the messages that the other end has not received, in order."""
        return list(self._stored)
