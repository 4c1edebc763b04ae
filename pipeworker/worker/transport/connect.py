"""Connects a worker to its neighbours: each edge by what its two ends can have between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

from pipeworker.environment import timings
from pipeworker.errors import PeerLost, UsageError
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.links import mapped, shared, tls
from pipeworker.worker.transport.links.gloo import Gloo
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.network import CoordinatorStore, Network
from pipeworker.worker.transport.proof import Membership, Place, Stranger

_OF_THE_HOST = (Payload.TARGET, Payload.DATA)  # what they carry lies there where it is sent


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
    gloo = Gloo(store, network, deadline)
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
