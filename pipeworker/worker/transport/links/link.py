"""The interface of a link: one directed edge that moves raw, dense tensors in order.

A link has two *lanes*: control, for headers and the tensors that a header describes, and bulk, for
tensors that both ends expect. Where one connection carries both, the lanes are the same object, and
the order of messages distinguishes them. Otherwise a notice on the control lane precedes every
expected tensor.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from pipeworker.errors import PeerLost
from pipeworker.plan.actions import Edge


class Pending(Protocol):
    """A send or receive under way."""

    def wait(self) -> None:
        """Return when the tensor may be reused (send), or read by the host or stream (receive)."""


class _Complete:
    def wait(self) -> None:
        """Return at once."""


COMPLETE = _Complete()
"""The result of a send that was complete when it returned."""


@dataclass(slots=True, eq=False)
class PendingReceive:
    """A posted receive into a contiguous tensor, which its lane completes."""

    complete: Callable[[PendingReceive], None]
    tensor: torch.Tensor
    done: bool = False  # whether the host may read the tensor
    work: Any = None  # what the stream waits for instead, where a device receives the tensor

    def wait(self) -> None:
        if not self.done:
            self.complete(self)


@dataclass(slots=True, eq=False)
class PendingSend:
    """A queued send."""

    tensor: torch.Tensor | None  # None once it is sent
    tag: int
    parts: deque[memoryview] = field(default_factory=deque)  # what a stream has not taken yet
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        """Report the tensor as sent, and drop it: the caller may wait only much later."""
        self.tensor = None
        self.done.set()

    def fail(self, error: Exception) -> None:
        """Report a failure; the tensor stays, since the thread may still read its memory."""
        self.error = error
        self.done.set()


@dataclass(slots=True)
class GroupWork:
    """A send or receive of a process group, whose failure names the edge."""

    edge: Edge
    finish: Callable[[], object]
    tensor: torch.Tensor | None = None  # whose memory the group reads or writes

    def wait(self) -> None:
        try:
            self.finish()
        except RuntimeError as error:
            raise peer_lost(self.edge, error) from error


class Lane(Protocol):
    """One direction of messages; those of one tag arrive in the order they were sent.

    Tensors are contiguous, on :attr:`device`, and never empty. Sends and receives return at once
    and raise PeerLost if the other end is gone. On an accelerator both follow the calling thread's
    current stream: a send takes the values that the stream has computed by then, and waiting for a
    receive makes that stream wait. A receive may start as late as when it is waited for.
    """

    device: torch.device
    mapped: bool
    """Whether it receives only into memory from :meth:`allocate`."""

    def allocate(self, count: int) -> torch.Tensor:
        """Return memory to receive into: a uint8 tensor of `count` bytes."""

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        """Start sending a tensor, whose memory stays alive until the send is complete."""

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        """Post buffers for the next messages of a tag, one a message, in order."""


class ConnectedLane(Lane, Protocol):
    """A lane with a connection of its own."""

    def close(self) -> None:
        """Close the connection; transfers under way fail."""


class Link(Protocol):
    """One end of a directed edge."""

    @property
    def control(self) -> Lane:
        """The lane on which a posted receive may stay without a message."""

    @property
    def bulk(self) -> Lane:
        """The lane on which every posted receive is sent to."""

    def close(self) -> None:
        """Close the connection; transfers under way fail."""


class OneLane:
    """A lane that is a link by itself: both lanes are this one, of the host's memory by default.

    The source's end overrides :meth:`send`, the target's :meth:`receive`.
    """

    __slots__ = ()
    device = torch.device("cpu")
    mapped = False

    @property
    def control(self) -> Lane:
        return self

    @property
    def bulk(self) -> Lane:
        return self

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device="cpu")

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        raise AssertionError(f"a {type(self).__name__} does not send")

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        raise AssertionError(f"a {type(self).__name__} does not receive")


@dataclass(frozen=True, slots=True)
class TwoLanes:
    """A link of two connections: the host's, for its control lane, and one between the devices.

    Their messages have no order between them.
    """

    host: Link
    bulk: ConnectedLane

    @property
    def control(self) -> Lane:
        return self.host.control

    def close(self) -> None:
        with contextlib.closing(self.host):
            self.bulk.close()


def peer_lost(edge: Edge, reason: object) -> PeerLost:
    """Return the error of an edge whose other end is gone."""
    return PeerLost(f"the channel {edge} closed: {reason}")
