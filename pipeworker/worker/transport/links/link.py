"""One directed edge that moves raw, dense tensors in order; and one in memory, for tests.

A link has two *lanes*: control, for headers and whatever a header describes, and bulk, for tensors
that both ends expect. Where one connection does both they are one, and its order tells the two
apart. Where they are two (nccl has neither tags nor a receive that may never come, so its control
lane is another connection) a notice on the control lane precedes every tensor that is expected.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pipeworker.errors import PeerLost


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Return when the tensor may be reused (send) or read (receive).

        Raises:
            PeerLost: the other end is gone.
        """


class _Complete:
    def wait(self) -> None:
        """Nothing is left to wait for."""


COMPLETE = _Complete()
"""What a send gives whose tensor may be reused at once."""


class Lane(Protocol):
    """Moves tensors one way. Messages of one tag arrive in the order they were sent.

    Tensors are contiguous, on :attr:`device`, and never of size zero. Both calls return at once.
    Where the device works on by itself, both are about the thread's current stream: what it has
    been given by then is sent, and who waits for a receive has that stream wait. A receive may
    begin only when it is waited for.
    """

    device: torch.device
    mapped: bool
    """Whether it only receives into what it allocates."""

    def allocate(self, count: int) -> torch.Tensor:
        """Memory of so many bytes that is good to receive into."""

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """The tensor's memory is kept until the send is complete."""

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        """Post buffers for the next messages of a tag, in one go."""


class Link(Protocol):
    """One end of a directed edge."""

    @property
    def control(self) -> Lane:
        """Where a receive may stay posted for ever."""

    @property
    def bulk(self) -> Lane:
        """Where each receive that is posted is sent to."""

    def close(self) -> None:
        """Let go of the connection; nothing may be under way but what will never come."""


class OneLane:
    """A lane that is a link by itself: both lanes are this one."""

    __slots__ = ()
    mapped = False

    @property
    def control(self: Any) -> Lane:
        lane: Lane = self
        return lane

    @property
    def bulk(self: Any) -> Lane:
        lane: Lane = self
        return lane


@dataclass(frozen=True, slots=True)
class TwoLanes:
    """A link of two connections, without an order between them."""

    control: Lane
    bulk: Lane
    closing: Callable[[], None] = lambda: None

    def close(self) -> None:
        self.closing()


@dataclass(slots=True)
class _Slot:
    """One message in memory: filled by the sender, then copied into the receiver's tensor."""

    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def match(self) -> None:
        if self.source is not None and self.target is not None:
            source = bytes_of(self.source)
            bytes_of(self.target)[: source.numel()].copy_(source)
            self.done.set()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory; a dim of size 1 may have any stride."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


@dataclass(slots=True)
class MemoryPending:
    """A send or receive in memory."""

    slot: _Slot
    limit: float

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self.slot.done.is_set()

    def wait(self) -> None:
        if not self.slot.done.wait(self.limit):
            raise PeerLost(f"no matching send or receive within {self.limit:g} s")


@dataclass(slots=True)
class MemoryLink(OneLane):
    """Both ends of an edge between two threads of one process."""

    limit: float = 30.0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _unreceived: dict[int, deque[_Slot]] = field(default_factory=dict)
    _unsent: dict[int, deque[_Slot]] = field(default_factory=dict)

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def send(self, tensor: torch.Tensor, tag: int) -> MemoryPending:
        self.sent += 1
        with self._lock:
            slot = self._take(self._unsent, self._unreceived, tag)
            slot.source = tensor
            slot.match()
        return MemoryPending(slot, self.limit)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[MemoryPending]:
        return [self._receive(tensor, tag) for tensor in tensors]

    def _receive(self, tensor: torch.Tensor, tag: int) -> MemoryPending:
        with self._lock:
            slot = self._take(self._unreceived, self._unsent, tag)
            slot.target = tensor
            slot.match()
        return MemoryPending(slot, self.limit)

    def close(self) -> None:
        """Both ends are memory, which goes by itself."""

    @staticmethod
    def _take(theirs: dict[int, deque[_Slot]], mine: dict[int, deque[_Slot]], tag: int) -> _Slot:
        """The slot the other side left for this tag, else a new one left for it."""
        waiting = theirs.get(tag)
        if waiting:
            return waiting.popleft()
        slot = _Slot()
        mine.setdefault(tag, deque()).append(slot)
        return slot
