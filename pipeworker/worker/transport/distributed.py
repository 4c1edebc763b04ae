"""Links over torch.distributed point-to-point, one process group of two ranks a directed edge.

The groups stand on their own: no default process group is made or touched, so the user's code may
have one. They meet through :class:`CoordinatorStore`, over the control plane.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from pipeworker.environment import timings
from pipeworker.errors import PeerLost, UsageError
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.wire.interfaces import chosen, outward, own_address
from pipeworker.wire.messages.store import StoreOperation, StoreReply
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.internals import PrefixStore, ProcessGroupGloo, Store, Work, gloo_options
from pipeworker.worker.transport import mapped, shared, tls
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.link import Link, OneLane, Pending
from pipeworker.worker.transport.proof import (
    Membership,
    Place,
    Proving,
    Stranger,
    proving,
    turn_away,
)

# Waits for tensors end when a peer is lost or the coordinator ends the job, which knows who is
# silent and who computes; no clock here can tell a long computation from a hang.
_FOREVER = timedelta(days=30)
_OF_THE_HOST = (Payload.TARGET, Payload.DATA)  # what they carry lies there where it is sent
_ATTEMPTS = 5  # of gloo's to connect, each as long as its timeout
_BROKEN = 3  # connections that fail before a word is said, until the network is to blame


class Ask(Protocol):
    """Performs one operation of the store; raises TimeoutError when that takes too long."""

    def __call__(
        self,
        operation: StoreOperation,
        keys: tuple[str, ...],
        value: bytes,
        expected: bytes,
        seconds: float | None = None,
        /,
    ) -> StoreReply: ...


class CoordinatorStore(Store):
    """A c10d store whose keys are kept by the coordinator; `ask` performs one operation.

    Nobody waits for a key beyond the deadline (monotonic): that raises TimeoutError.
    """

    def __init__(self, ask: Ask, deadline: float = math.inf) -> None:
        super().__init__()
        self._ask = ask
        self.deadline = deadline

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(StoreOperation.SET, (key,), data, b"")

    def get(self, key: str) -> bytes:
        return self._wait_for((key,)).values[0]

    def add(self, key: str, amount: int) -> int:
        return self._ask(StoreOperation.ADD, (key,), str(amount).encode(), b"").result

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(StoreOperation.CHECK, tuple(keys), b"", b"").result)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old = expected.encode() if isinstance(expected, str) else bytes(expected)
        new = desired.encode() if isinstance(desired, str) else bytes(desired)
        return self._ask(StoreOperation.COMPARE_SET, (key,), new, old).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(StoreOperation.DELETE, (key,), b"", b"").result)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for(tuple(keys))

    def _wait_for(self, keys: tuple[str, ...]) -> StoreReply:
        left = None
        if self.deadline < math.inf:
            left = max(0.0, self.deadline - time.monotonic())
        return self._ask(StoreOperation.GET, keys, b"", b"", left)


@dataclass(slots=True)
class _WorkPending:
    """A send or receive under way; keeps the tensor, whose memory gloo reads or writes."""

    work: Work
    edge: Edge
    tensor: torch.Tensor

    def wait(self) -> None:
        try:
            self.work.wait(_FOREVER)
        except RuntimeError as error:
            raise PeerLost(f"the channel {self.edge} closed: {error}") from error


@dataclass(slots=True)
class GroupLink(OneLane):
    """An end of an edge: rank 0 of its group sends, rank 1 receives."""

    edge: Edge
    group: Any  # a ProcessGroup, whose send and recv its type stub lacks
    device: torch.device

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        try:
            return _WorkPending(self.group.send([tensor], 1, tag), self.edge, tensor)
        except RuntimeError as error:
            raise PeerLost(f"the channel {self.edge} closed: {error}") from error

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        try:
            return [_WorkPending(self.group.recv([t], 0, tag), self.edge, t) for t in tensors]
        except RuntimeError as error:
            raise PeerLost(f"the channel {self.edge} closed: {error}") from error

    def close(self) -> None:
        self.group.abort()
        self.group = None


@dataclass(frozen=True, slots=True)
class Network:
    """How workers reach each other.

    Attributes:
        endpoint: the coordinator's address; the interface that reaches it carries the tensors,
        interface: unless this one is to, or ``GLOO_SOCKET_IFNAME`` names another.
        backend: ``auto`` for shared memory between workers of one host and gloo between hosts,
            ``tls`` for TLS between hosts, ``gloo`` for gloo everywhere.
    """

    endpoint: str
    backend: str = "auto"
    interface: str | None = None

    def own_address(self) -> str:
        """This host's, on the interface that carries tensors.

        Raises:
            UsageError: the one that is named has none.
        """
        url = urlsplit(self.endpoint)
        return own_address((url.hostname or "127.0.0.1", url.port or 1), self.interface)

    def check(self) -> None:
        """That the interface which is named, if one is, leads to other hosts.

        Raises:
            UsageError: it does not.
        """
        name, said = chosen(self.interface)
        if name:
            outward(name, said)

    def said(self) -> str:
        """This host and its address, for who reads what went wrong."""
        return f"{socket.gethostname()} ({self.own_address()})"


def connect(
    edges: Iterable[Edge],
    rank: int,
    placement: Placement,
    store: CoordinatorStore,
    network: Network,
    membership: Membership,
    accelerator: Accelerator | None = None,
) -> dict[Edge, Link]:
    """Connect this worker's end of every edge; all workers go through the edges in one order.

    Replicas have edges of the same names, so what meets in the store is named by replica as well:
    the one where the edge begins.

    Args:
        network: how workers reach each other.
        membership: what both ends of an edge prove to each other.
        accelerator: copies to and from the memory of these links, if there is one.

    Raises:
        PeerLost: a neighbour cannot be reached, or does not come in time.
        UsageError: the backend is not available.
    """
    backend = network.backend
    if backend not in ("auto", "gloo", "tls"):
        raise UsageError(f"--backend {backend} is not available yet: use gloo")
    deadline = time.monotonic() + timings().connect
    store.deadline = deadline
    gloo = _Gloo(store, network, deadline)
    secure = Credentials.of(membership.token) if backend == "tls" else None
    identity = shared.host_identity()
    kind = accelerator.mapping.kind if accelerator and accelerator.mapping else ""
    store.set(f"host/{rank}", f"{identity}\n{kind}" if kind else identity)
    held, mine = placement.stages_of(rank), placement.replica_of(rank)
    links: dict[Edge, Link] = {}
    with contextlib.ExitStack() as unless_all:
        for edge in edges:
            replica, goal = (mine, mine) if edge.origin < 0 else (edge.origin, edge.goal)
            sends = edge.source in held and replica == mine
            stage, other = (edge.target, goal) if sends else (edge.source, replica)
            peer = placement.rank_of(stage, other)
            secret = membership.key(edge, replica)
            key = f"replica-{replica}/{edge}"
            try:
                there, _, theirs = store.get(f"host/{peer}").decode().partition("\n")
                here = there == identity
                near = here and backend != "gloo"
                if not here:
                    network.check()
                if not near:
                    store.set(f"address/{rank}", network.said())
                if near:
                    maps = kind and theirs == kind and edge.payload not in _OF_THE_HOST
                    meets = _Near(edge, secret, store, key, deadline, accelerator)
                    links[edge] = meets.connect(sends=sends, maps=bool(maps))
                elif secure is not None:
                    where = Place(store, f"tls/{key}", deadline)
                    host = network.own_address()
                    links[edge] = tls.connect(edge, secret, where, secure, host, sends=sends)
                else:
                    links[edge] = gloo.connect(edge, secret, key, sends=sends)
            except (OSError, RuntimeError, Stranger) as error:
                late = isinstance(error, TimeoutError) and time.monotonic() >= deadline
                why = f"it did not come within {timings().connect:g} s" if late else str(error)
                name = f"{placement.names(peer)} (rank {peer})"
                if not late and (between := _between(store, rank, peer)):
                    name += between
                    why += "; let TCP pass between them, to any port"
                raise PeerLost(
                    f"the channel {edge} could not be connected to the worker of {name}: {why}"
                ) from error
            unless_all.callback(links[edge].close)
        unless_all.pop_all()
    return links


@dataclass(frozen=True, slots=True)
class _Near:
    """Connects within a host: through its memory, or devices among themselves."""

    edge: Edge
    secret: bytes
    store: CoordinatorStore
    key: str
    deadline: float
    accelerator: Accelerator | None

    def connect(self, *, sends: bool, maps: bool) -> Link:
        """With `maps`, both ends have devices that may map each other's memory."""
        edge, secret, accelerator = self.edge, self.secret, self.accelerator
        pin = accelerator.pin if accelerator else None
        host = shared.connect(edge, secret, self._where("shared"), pin, sends=sends)
        if not maps or accelerator is None:
            return host
        try:
            where = self._where("mapped")
            return mapped.connect(host, edge, secret, where, accelerator, sends=sends)
        except BaseException:
            host.close()
            raise

    def _where(self, how: str) -> Place:
        return Place(self.store, f"{how}/{self.key}", self.deadline)


def _between(store: CoordinatorStore, rank: int, peer: int) -> str:
    """The two hosts of a link and their addresses, as far as they have come to say them."""
    keys = [f"address/{end}" for end in (peer, rank)]
    if not store.check(keys):
        return ""
    theirs, mine = (store.get(key).decode() for key in keys)
    return f" on {theirs}, from {mine}"


@dataclass(slots=True)
class _Gloo:
    """Connects by gloo, whose port gives a stage's place to whoever knows a small number.

    So the ends of a group prove themselves over it. When they do not, a stranger has a place in it,
    and both try again with another group, which meets at another port.
    """

    store: CoordinatorStore
    network: Network
    deadline: float
    device: ProcessGroupGloo.Device | None = None

    def connect(self, edge: Edge, secret: bytes, key: str, *, sends: bool) -> GroupLink:
        """The sender has rank 0 of its group.

        Raises:
            TimeoutError: the peer does not come before the deadline.
            RuntimeError: it cannot be reached.
        """
        rank = 0 if sends else 1
        for attempt in itertools.count(1):
            prefix = f"{key}/{attempt}"
            self.store.set(f"{prefix}/here-{rank}", "")
            self.store.get(f"{prefix}/here-{1 - rank}")  # what comes now is a matter of the network
            began = time.monotonic()
            try:
                until = min(began + timings().reach, self.deadline)
                group: Any = self._group(prefix, rank, until)
                wrong = _proof_over(group, proving(secret, sends=sends), rank)
            except RuntimeError as error:  # a stranger may have broken it, but not again and again
                slow = time.monotonic() - began > timings().reach / 2  # no stranger takes so long
                if slow or attempt == _BROKEN:
                    raise
                group, wrong = None, str(error)
            # One end may know long before the other, which is silent until its time is over.
            self.store.set(f"{prefix}/proven-{rank}", "no" if wrong else "yes")
            if self.store.get(f"{prefix}/proven-{1 - rank}") == b"yes" and not wrong:
                return GroupLink(edge, group, torch.device("cpu"))
            turn_away(edge, wrong or "at the other end")
            if group is not None:
                group.abort()
            self.device = None
        raise AssertionError("there is always another attempt")

    def _group(self, prefix: str, rank: int, deadline: float) -> Any:
        if self.device is None:
            self.device = _device(self.network)
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        options = gloo_options(self.device, left / _ATTEMPTS)
        return ProcessGroupGloo(PrefixStore(prefix, self.store), rank, 2, options)


def _proof_over(group: Any, part: Proving, rank: int) -> str:
    """Prove over a group of two; returns what was wrong, if anything."""
    deadline = time.monotonic() + timings().handshake
    kept = []  # gloo reads or writes it until the group is gone

    def wait(work: Work) -> None:
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        work.wait(left)

    try:
        message, count = next(part)
        while True:
            if message:
                kept.append(torch.frombuffer(bytearray(message), dtype=torch.uint8))
                wait(group.send([kept[-1]], 1 - rank, 0))
            memory = bytearray(count)
            if count:
                kept.append(torch.frombuffer(memory, dtype=torch.uint8))
                wait(group.recv([kept[-1]], 1 - rank, 0))
            message, count = part.send(bytes(memory))
    except StopIteration:
        return ""
    except (Stranger, RuntimeError) as error:
        group.abort()
        return str(error)


def _device(network: Network) -> ProcessGroupGloo.Device:
    name, _ = chosen(network.interface)
    if name and sys.platform != "linux":
        return ProcessGroupGloo.create_device(interface=name)
    return ProcessGroupGloo.create_device(hostname=network.own_address())
