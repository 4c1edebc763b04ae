"""A lane between devices of two hosts, by a communicator of its own.

NCCL has no tags, and a receive may not be left for ever: so it carries what both ends expect, each
tensor as long as the buffer that is posted for it, in turn. Neither host waits for a device; what
does is the stream that computes, for what it needs and for room to send.

A receive keeps the device busy from when it is given to it until it is sent to. Whatever is given
later may have to wait for that: a kernel that is loaded, memory that is let go of. So it is given
when it is waited for, which needs only what was given before; and as the host is far ahead of the
device by then, it travels while what is before it computes.

Whether a peer is gone NCCL does not say: the coordinator does, and ends the process.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pipeworker.environment import timings
from pipeworker.errors import PeerLost
from pipeworker.plan.actions import Edge
from pipeworker.worker.device.accelerator import Accelerator, Event
from pipeworker.worker.device.nccl import Group, Work
from pipeworker.worker.internals import PrefixStore, Store
from pipeworker.worker.transport.links.link import Link, Pending, TwoLanes, bytes_of
from pipeworker.worker.transport.proof import Place

_PATIENCE = 2  # NCCL looks at all there is between the devices first
T = TypeVar("T")
_INSTEAD = " (--backend gloo does without)"


@dataclass(frozen=True, slots=True)
class _Sending:
    lane: NcclLane
    work: Work

    def wait(self) -> None:
        """The current stream goes on when it has left."""
        self.lane.guarded(self.work.wait)


@dataclass(slots=True, eq=False)
class _Receiving:
    lane: NcclLane
    tensor: torch.Tensor
    free: Event
    work: Work | None = None

    def wait(self) -> None:
        """The current stream goes on when the tensor is there."""
        while self.work is None:
            self.lane.begin_next()
        self.lane.guarded(self.work.wait)


class NcclLane:
    """An end of an edge: rank 0 of its group sends, rank 1 receives."""

    mapped = False

    def __init__(self, edge: Edge, group: Group, accelerator: Accelerator) -> None:
        self.device = accelerator.device
        self._edge, self._group, self._accelerator = edge, group, accelerator
        self._posted: deque[_Receiving] = deque()

    def allocate(self, count: int) -> torch.Tensor:
        return self._accelerator.empty(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return _Sending(self, self.guarded(lambda: self._group.send([bytes_of(tensor)], 1, 0)))

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        free = self._accelerator.event(self._accelerator.current)
        posted = [_Receiving(self, tensor, free) for tensor in tensors]
        self._posted += posted
        return posted

    def begin_next(self) -> None:
        """The device is given the first of the posted receives."""
        first, receives = self._posted.popleft(), self._accelerator.receives
        with self._accelerator.using(receives):
            receives.wait_event(first.free)
            tensors = [bytes_of(first.tensor)]
            first.work = self.guarded(lambda: self._group.recv(tensors, 0, 0))

    def guarded(self, act: Callable[[], T]) -> T:
        """What the group says of a lost peer names the channel."""
        try:
            return act()
        except RuntimeError as error:
            raise PeerLost(f"the channel {self._edge} closed: {error}") from error

    def close(self) -> None:
        """NCCL may not come back from a peer that is gone."""
        aborts = threading.Thread(target=self._group.abort, name="nccl closes", daemon=True)
        aborts.start()
        aborts.join(timings().leave)


def connect(
    host: Link, edge: Edge, where: Place, interface: str, accelerator: Accelerator, *, sends: bool
) -> Link:
    """A link whose bulk lane is between the devices, and whose control lane is another link's.

    Args:
        host: the other link, which is closed with this one.
        interface: what carries what they say to connect; empty to have NCCL choose.
        accelerator: one that has communicators, as the other end's has.

    Raises:
        RuntimeError: the devices cannot be connected, or not in time.
    """
    communicators = accelerator.communicators
    assert communicators
    meeting, rank = _Meeting(where.store), 0 if sends else 1
    store = PrefixStore(where.key, meeting)
    store.set(f"here-{rank}", "")
    store.get(f"here-{1 - rank}")  # what comes now is a matter of the network
    seconds = min(_PATIENCE * timings().reach, where.left())
    try:
        group = _in_time(lambda: communicators.group(store, rank, interface), seconds)
    finally:
        meeting.over = True
    lane = NcclLane(edge, group, accelerator)
    closing = contextlib.ExitStack()
    closing.callback(host.close)
    closing.callback(lane.close)
    return TwoLanes(host.control, lane, closing.close)


class _Meeting(Store):
    """A store until the two ends have met.

    A group keeps it, and tells it of a peer that is lost. By then the job may be over, so that
    nobody answers; and who lets go of the group waits for its threads.
    """

    over = False

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._open().set(key, value)

    def get(self, key: str) -> bytes:
        return self._open().get(key)

    def check(self, keys: list[str]) -> bool:
        return self._open().check(keys)

    def _open(self) -> Store:
        if self.over:
            raise ConnectionError("the two ends have met")
        return self._store


def _in_time(make: Callable[[], Group], seconds: float) -> Group:
    """NCCL waits for its peer without end, on a thread that is left to itself then."""
    future: Future[Group] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="nccl connects", daemon=True).start()
    done, _ = futures.wait([future], seconds)
    if not done:
        raise RuntimeError(f"NCCL: no answer within {seconds:.0f} s{_INSTEAD}")
    try:
        return future.result()
    except RuntimeError as error:
        raise RuntimeError(f"NCCL: {_said(str(error))}{_INSTEAD}") from error


def _said(text: str) -> str:
    """What NCCL says happened, and what it knows of why: the line behind ``Last error``."""
    first, *more = text.splitlines() or [""]
    _, _, why = "\n".join(more).partition("Last error:")
    return ": ".join([first, *why.strip().splitlines()[:1]])
