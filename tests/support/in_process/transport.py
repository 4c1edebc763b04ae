"""Links between the workers of one process: connected ones, and ones in memory."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol, cast
from unittest import mock

import torch

from pipeworker.coordinator.store import KeyValueStore
from pipeworker.errors import PeerLost
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.record.checkpoint.tensor_file import raw_bytes
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.transport.connect import connect
from pipeworker.worker.transport.handshake import Membership
from pipeworker.worker.transport.links import unix
from pipeworker.worker.transport.links.link import Lane, Link, OneLane, Pending, TwoLanes
from pipeworker.worker.transport.network import CoordinatorStore, Network, StoreCall

ENDPOINT = "tcp://127.0.0.1:1"
MEMBERSHIP = Membership("the secret of these tests", 1)
FORTH, BACK = Edge(0, 1, Payload.ACTIVATION), Edge(1, 0, Payload.GRADIENT)


class LocalStore:
    """The coordinator's store for the threads of this process; each sends one request at a time."""

    def __init__(self) -> None:
        self._values = KeyValueStore()
        self._lock = threading.Lock()
        self._replies: dict[bytes, queue.SimpleQueue[StoreReply]] = {}

    def connect(self) -> StoreCall:
        """Return the function by which a new peer sends requests."""
        with self._lock:  # two threads may call at once
            peer = str(len(self._replies)).encode()
            own = self._replies[peer] = queue.SimpleQueue()
        numbers = itertools.count()

        def call(
            operation: StoreOperation,
            keys: tuple[str, ...],
            value: bytes = b"",
            seconds: float | None = None,
        ) -> StoreReply:
            request = StoreRequest(0, next(numbers), operation, keys, value)
            with self._lock:
                for other, reply in self._values.handle(peer, request):
                    self._replies[other].put(reply)
            deadline = time.monotonic() + min(20.0, 20.0 if seconds is None else seconds)
            try:
                while True:
                    reply = own.get(timeout=max(0.0, deadline - time.monotonic()))
                    if reply.number == request.number:
                        return reply
            except queue.Empty:
                raise TimeoutError(f"no peer has set {', '.join(keys)}") from None

        return call

    def store(self) -> CoordinatorStore:
        """Return a new peer's store."""
        return CoordinatorStore(self.connect())


def connect_all(
    edges: tuple[Edge, ...],
    stages: int,
    backend: str = "auto",
    devices: Sequence[Accelerator] = (),
    *,
    apart: bool = False,
) -> list[dict[Edge, Link]]:
    """Return the links of each worker; each has one stage and connects on a thread of its own.

    Args:
        edges: the edges to connect.
        stages: the number of workers.
        backend: as ``--backend``; with ``tls`` each worker seems to be on a host of its own.
        devices: one a worker; empty for the CPU.
        apart: whether each worker seems to be on a host of its own with any backend.
    """
    local_store = LocalStore()
    stores = [local_store.store() for _ in range(stages)]
    placement = Placement.identity(stages)
    on_each: Sequence[Accelerator | None] = devices or [None] * stages
    hosts, network = iter(range(stages)), Network(ENDPOINT, backend)
    hosted = mock.patch.object(unix, "host_identity", side_effect=lambda: f"host {next(hosts)}")
    with ThreadPoolExecutor(stages) as pool, hosted if apart or backend == "tls" else nullcontext():
        made = [
            pool.submit(connect, own, k, placement, store, network, MEMBERSHIP, on)
            for k, (store, on) in enumerate(zip(stores, on_each, strict=True))
            if (own := [edge for edge in edges if k in (edge.source, edge.target)])
        ]
        found = [future.result() for future in made]
    _connected.extend(link for links in found for link in links.values())
    return found


_connected: list[Link] = []


def close_connected() -> None:
    """Close all links that :func:`connect_all` has returned, and so end their threads."""
    while _connected:
        _connected.pop().close()


# Links in memory.


@dataclass(slots=True)
class _Slot:
    """One message, which is copied once both its tensors are there."""

    source: torch.Tensor | None = None
    target: torch.Tensor | None = None
    done: threading.Event = field(default_factory=threading.Event)
    lost: bool = False

    def lose(self) -> None:
        self.lost = True
        self.done.set()

    def match(self) -> None:
        if self.source is not None and self.target is not None:
            source = raw_bytes(self.source)
            raw_bytes(self.target)[: source.numel()].copy_(source)
            self.done.set()


@dataclass(slots=True)
class MemoryPending:
    """A send or receive in memory."""

    slot: _Slot
    limit: float

    def done(self) -> bool:
        """Return whether :meth:`wait` would return at once."""
        return self.slot.done.is_set()

    def wait(self) -> None:
        if not self.slot.done.wait(self.limit) or self.slot.lost:
            raise PeerLost(f"no matching send or receive within {self.limit:g} s")


@dataclass(slots=True)
class MemoryLink(OneLane):
    """Both ends of an edge between two threads of one process.

    Attributes:
        limit: the seconds after which a wait raises PeerLost.
        sent: the number of messages sent, by tag.
    """

    limit: float = 30.0
    sent: Counter[int] = field(default_factory=Counter)
    _lost: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _unreceived: dict[int, deque[_Slot]] = field(default_factory=dict)
    _unsent: dict[int, deque[_Slot]] = field(default_factory=dict)

    def send(self, tensor: torch.Tensor, tag: int) -> MemoryPending:
        self.sent[tag] += 1
        with self._lock:
            slot = self._match(self._unsent, self._unreceived, tag)
            slot.source = tensor
            slot.match()
        return MemoryPending(slot, self.limit)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[MemoryPending]:
        return [self._receive(tensor, tag) for tensor in tensors]

    def unmatched(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the numbers of sends without a receive and of receives without a send, by tag."""
        unreceived, unsent = (
            {tag: len(slots) for tag, slots in queues.items() if slots}
            for queues in (self._unreceived, self._unsent)
        )
        return unreceived, unsent

    def _receive(self, tensor: torch.Tensor, tag: int) -> MemoryPending:
        with self._lock:
            slot = self._match(self._unreceived, self._unsent, tag)
            slot.target = tensor
            slot.match()
        return MemoryPending(slot, self.limit)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def lose(self) -> None:
        """Have all sends and receives that are not complete raise PeerLost, now and later."""
        with self._lock:
            self._lost = True
            for slots in (*self._unreceived.values(), *self._unsent.values()):
                for slot in slots:
                    slot.lose()

    def _match(
        self, other: dict[int, deque[_Slot]], own: dict[int, deque[_Slot]], tag: int
    ) -> _Slot:
        """Return the slot that the other end has left for a tag, or leave a new one for it."""
        waiting = other.get(tag)
        if waiting:
            return waiting.popleft()
        slot = _Slot()
        if self._lost:
            slot.lose()
        own.setdefault(tag, deque()).append(slot)
        return slot


class StrictLane:
    """A bulk lane in memory with NCCL's rules: no tags, equal sizes, every receive is sent to.

    It fails where NCCL would hang or mix up messages.
    """

    device = torch.device("cpu")
    mapped = False

    def __init__(self, limit: float = 20.0) -> None:
        self._link = MemoryLink(limit)
        self._lock = threading.Lock()
        self._sent: list[int] = []
        self._posted: list[int] = []

    @property
    def sent(self) -> Counter[int]:
        return self._link.sent

    @property
    def waiting(self) -> int:
        """The number of receives that nothing was sent to."""
        return len(self._posted) - len(self._sent)

    def allocate(self, count: int) -> torch.Tensor:
        return self._link.allocate(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        self._note(self._sent, [tensor])
        return self._link.send(tensor, 0)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        self._note(self._posted, tensors)
        return [_StrictPending(pending) for pending in self._link.receive(tensors, 0)]

    def _note(self, own: list[int], tensors: Sequence[torch.Tensor]) -> None:
        with self._lock:
            own += [tensor.nbytes for tensor in tensors]
            count = min(len(self._sent), len(self._posted))
            assert self._sent[:count] == self._posted[:count], "messages of other sizes meet"

    def close(self) -> None:
        assert self.waiting <= 0, f"closed with {self.waiting} receives that nothing was sent to"


@dataclass(frozen=True)
class _StrictPending:
    pending: MemoryPending

    def done(self) -> bool:
        return self.pending.done()

    def wait(self) -> None:
        try:
            self.pending.wait()
        except PeerLost:
            raise AssertionError("nothing was ever sent to a receive") from None


def two_lanes(limit: float = 20.0) -> TwoLanes:
    """Return one link in memory for both ends, with a strict bulk lane."""
    bulk = StrictLane(limit)
    return TwoLanes(MemoryLink(limit), bulk)


class TakingTurns:
    """A link between workers of which one runs at a time: only a wait lets another one run."""

    def __init__(self, link: Link, turn: threading.Lock) -> None:
        self.control: Lane = _TurnLane(link.control, turn)
        self.bulk = self.control if link.bulk is link.control else _TurnLane(link.bulk, turn)
        self._link = link

    def close(self) -> None:
        self._link.close()


class _TurnLane:
    def __init__(self, lane: Lane, turn: threading.Lock) -> None:
        self._lane, self._turn, self.device = lane, turn, lane.device
        self.mapped = lane.mapped

    def allocate(self, count: int) -> torch.Tensor:
        return self._lane.allocate(count)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return _TurnPending(cast("_InMemory", self._lane.send(tensor, tag)), self._turn)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        pending = cast("Sequence[_InMemory]", self._lane.receive(tensors, tag))
        return [_TurnPending(one, self._turn) for one in pending]


class _InMemory(Pending, Protocol):
    def done(self) -> bool: ...


@dataclass(frozen=True)
class _TurnPending:
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
