"""Links over torch.distributed point-to-point, one process group of two ranks a directed edge.

The groups stand on their own: no default process group is made or touched, so the user's code may
have one. They meet through :class:`CoordinatorStore`, over the control plane.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch

from pipeworker.errors import PeerLost, UsageError
from pipeworker.plan.actions import Edge
from pipeworker.plan.placement import Placement
from pipeworker.wire.messages import StoreOperation, StoreReply
from pipeworker.worker.internals import PrefixStore, ProcessGroupGloo, Store, Work, gloo_options
from pipeworker.worker.transport import shared
from pipeworker.worker.transport.link import Link, OneLane, Pending

Ask = Callable[[StoreOperation, tuple[str, ...], bytes, bytes], StoreReply]

# Waits end when a peer is lost or the coordinator ends the job, not by a clock of their own.
_FOREVER = timedelta(days=30)


class CoordinatorStore(Store):
    """A c10d store whose keys are kept by the coordinator; `ask` performs one operation."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(StoreOperation.SET, (key,), data, b"")

    def get(self, key: str) -> bytes:
        return self._ask(StoreOperation.GET, (key,), b"", b"").values[0]

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
        self._ask(StoreOperation.GET, tuple(keys), b"", b"")


@dataclass(slots=True)
class _WorkPending:
    """A send or receive under way; keeps the tensor, whose memory gloo reads or writes."""

    work: Work
    edge: Edge
    tensor: torch.Tensor

    def wait(self) -> None:
        try:
            self.work.wait()
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


def connect(
    edges: Iterable[Edge],
    rank: int,
    placement: Placement,
    store: Store,
    endpoint: str,
    backend: str,
) -> dict[Edge, Link]:
    """Connect this worker's end of every edge; all workers go through the edges in one order.

    Replicas have edges of the same names, so what meets in the store is named by replica as well.

    Args:
        endpoint: the coordinator's address; the interface that reaches it carries the tensors,
            unless ``GLOO_SOCKET_IFNAME`` names another.
        backend: ``auto`` for shared memory between workers of one host and gloo between hosts,
            ``gloo`` for gloo everywhere. Tensors on an accelerator are staged through the host.

    Raises:
        PeerLost: a neighbour cannot be reached.
        UsageError: the backend is not available.
    """
    if backend not in ("auto", "gloo"):
        raise UsageError(f"--backend {backend} is not available yet: use gloo")
    options = gloo_options(_device(endpoint), _FOREVER)
    identity = shared.host_identity()
    store.set(f"host/{rank}", identity)
    held, replica = placement.stages_of(rank), placement.replica_of(rank)
    links: dict[Edge, Link] = {}
    for edge in edges:
        sends = edge.source in held
        peer = placement.rank_of(edge.target if sends else edge.source, replica)
        key = f"replica-{replica}/{edge}"
        if backend == "auto" and store.get(f"host/{peer}") == identity.encode():
            links[edge] = shared.connect(edge, sends=sends, key=f"shared/{key}", store=store)
            continue
        try:
            group = ProcessGroupGloo(PrefixStore(key, store), 0 if sends else 1, 2, options)
        except RuntimeError as error:
            raise PeerLost(f"the channel {edge} could not be connected: {error}") from error
        links[edge] = GroupLink(edge, group, torch.device("cpu"))
    return links


def _device(endpoint: str) -> ProcessGroupGloo.Device:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname=_address_towards(endpoint))


def _address_towards(endpoint: str) -> str:
    """This host's own address on the route to the coordinator (no packet is sent)."""
    url = urlsplit(endpoint)
    host, port = url.hostname or "127.0.0.1", url.port or 1
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
