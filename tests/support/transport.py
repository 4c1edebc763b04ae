"""Links between the workers of one process: real ones, which meet, and ones in memory."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, cast
from unittest import mock

import torch

from pipeworker.coordinator.rendezvous import Rendezvous
from pipeworker.errors import PeerLost
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.transport.connect import connect
from pipeworker.worker.transport.links import shared
from pipeworker.worker.transport.links.link import (
    Lane,
    Link,
    MemoryLink,
    MemoryPending,
    Pending,
    TwoLanes,
)
from pipeworker.worker.transport.network import Ask, CoordinatorStore, Network
from pipeworker.worker.transport.proof import Membership

ENDPOINT = "tcp://127.0.0.1:1"
MEMBERSHIP = Membership("the secret of these tests", 1)
FORTH, BACK = Edge(0, 1, Payload.ACTIVATION), Edge(1, 0, Payload.GRADIENT)


class Meeting:
    """The coordinator's store, for the threads of this process; each asks one thing at a time."""

    def __init__(self) -> None:
        self._rendezvous = Rendezvous()
        self._lock = threading.Lock()
        self._replies: dict[bytes, queue.SimpleQueue[StoreReply]] = {}

    def ask(self) -> Ask:
        """A new peer's way to ask."""
        with self._lock:  # two threads may come at once
            peer = str(len(self._replies)).encode()
            mine = self._replies[peer] = queue.SimpleQueue()
        numbers = itertools.count()

        def ask(
            operation: StoreOperation,
            keys: tuple[str, ...],
            value: bytes,
            expected: bytes,
            seconds: float | None = None,
        ) -> StoreReply:
            request = StoreRequest(0, next(numbers), operation, keys, value, expected)
            with self._lock:
                for other, reply in self._rendezvous.handle(peer, request):
                    self._replies[other].put(reply)
            deadline = time.monotonic() + min(20.0, 20.0 if seconds is None else seconds)
            try:
                while True:
                    reply = mine.get(timeout=max(0.0, deadline - time.monotonic()))
                    if reply.number == request.number:
                        return reply
            except queue.Empty:
                raise TimeoutError(f"nobody has set {', '.join(keys)}") from None

        return ask

    def store(self) -> CoordinatorStore:
        return CoordinatorStore(self.ask())


def connect_all(
    edges: tuple[Edge, ...],
    stages: int,
    backend: str = "auto",
    memberships: Sequence[Membership] = (),
    devices: Sequence[Accelerator] = (),
    *,
    apart: bool = False,
) -> list[dict[Edge, Link]]:
    """The links of each worker, which has one stage; each connects on a thread of its own.

    With ``tls`` each is on a host of its own, as far as they can tell; and where they are `apart`.

    Args:
        memberships: of each, where they are not all of one job.
        devices: of each, instead of the CPU.
    """
    meeting = Meeting()
    stores = [meeting.store() for _ in range(stages)]
    placement = Placement.identity(stages)
    on_each: Sequence[Accelerator | None] = devices or [None] * stages
    members = memberships or [MEMBERSHIP] * stages
    hosts, network = iter(range(stages)), Network(ENDPOINT, backend)
    hosted = mock.patch.object(shared, "host_identity", side_effect=lambda: f"host {next(hosts)}")
    with ThreadPoolExecutor(stages) as pool, hosted if apart or backend == "tls" else nullcontext():
        made = [
            pool.submit(connect, mine, k, placement, store, network, members[k], on)
            for k, (store, on) in enumerate(zip(stores, on_each, strict=True))
            if (mine := [edge for edge in edges if k in (edge.source, edge.target)])
        ]
        return [future.result() for future in made]


class StrictLane:
    """A bulk lane in memory as nccl's are: no tags, equal sizes, and every receive is sent to.

    Where nccl would hang, or mix up messages, this fails.
    """

    device = torch.device("cpu")
    mapped = False

    def __init__(self, limit: float = 20.0) -> None:
        self._link = MemoryLink(limit)
        self._lock = threading.Lock()
        self._sent: list[int] = []
        self._posted: list[int] = []

    @property
    def sent(self) -> int:
        return self._link.sent

    @property
    def waiting(self) -> int:
        """Receives that nothing was sent to."""
        return len(self._posted) - len(self._sent)

    def allocate(self, count: int) -> torch.Tensor:
        return self._link.allocate(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        self._note(self._sent, [tensor])
        return self._link.send(tensor, 0)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        self._note(self._posted, tensors)
        return [_Awaited(pending) for pending in self._link.receive(tensors, 0)]

    def _note(self, mine: list[int], tensors: Sequence[torch.Tensor]) -> None:
        with self._lock:
            mine += [tensor.nbytes for tensor in tensors]
            count = min(len(self._sent), len(self._posted))
            assert self._sent[:count] == self._posted[:count], "messages of other sizes meet"

    def close(self) -> None:
        assert self.waiting <= 0, f"closed with {self.waiting} receives that nothing was sent to"


@dataclass(frozen=True)
class _Awaited:
    pending: MemoryPending

    def done(self) -> bool:
        return self.pending.done()

    def wait(self) -> None:
        try:
            self.pending.wait()
        except PeerLost:
            raise AssertionError("nothing was ever sent to a receive") from None


def two_lanes(limit: float = 20.0) -> TwoLanes:
    """One link in memory for both ends: the bulk lane is strict."""
    bulk = StrictLane(limit)
    return TwoLanes(MemoryLink(limit), bulk, bulk.close)


class TakingTurns:
    """A link between workers of which one runs at a time: a turn is given up only to wait."""

    def __init__(self, link: Link, turn: threading.Lock) -> None:
        self.control: Lane = _Turns(link.control, turn)
        self.bulk = self.control if link.bulk is link.control else _Turns(link.bulk, turn)
        self._link = link

    def close(self) -> None:
        self._link.close()


class _Turns:
    def __init__(self, lane: Lane, turn: threading.Lock) -> None:
        self._lane, self._turn, self.device = lane, turn, lane.device
        self.mapped = lane.mapped

    def allocate(self, count: int) -> torch.Tensor:
        return self._lane.allocate(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return _Turn(cast("_InMemory", self._lane.send(tensor, tag)), self._turn)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        pending = cast("Sequence[_InMemory]", self._lane.receive(tensors, tag))
        return [_Turn(one, self._turn) for one in pending]


class _InMemory(Pending, Protocol):
    def done(self) -> bool: ...


@dataclass(frozen=True)
class _Turn:
    pending: _InMemory
    turn: threading.Lock

    def wait(self) -> None:
        if self.pending.done():
            return
        self.turn.release()
        try:
            self.pending.wait()
        finally:
            self.turn.acquire()
