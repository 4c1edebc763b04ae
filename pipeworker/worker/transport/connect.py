"""Connects a worker to its neighbours: each edge by what its two ends can have between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from pipeworker.environment import timings
from pipeworker.errors import PeerLost, UsageError
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.links import mapped, nccl, shared, tls
from pipeworker.worker.transport.links.gloo import Gloo
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.network import CoordinatorStore, Network
from pipeworker.worker.transport.proof import Membership, Place, Stranger

SHARED, GLOO, TLS, MAPPED, NCCL = "shared", "gloo", "tls", "mapped", "nccl"
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
        UsageError: as :func:`choose`; or the interface that is named leads to no other host.
    """
    deadline = time.monotonic() + timings().connect
    store.deadline = deadline
    mine = End.of(accelerator)
    store.set(f"host/{rank}", mine.said())
    joining = _Joining(store, network, membership, accelerator)
    held, own = placement.stages_of(rank), placement.replica_of(rank)
    links: dict[Edge, Link] = {}
    with contextlib.ExitStack() as unless_all:
        for edge in edges:
            replica, goal = (own, own) if edge.origin < 0 else (edge.origin, edge.goal)
            sends = edge.source in held and replica == own
            stage, other = (edge.target, goal) if sends else (edge.source, replica)
            peer = placement.rank_of(stage, other)
            try:
                theirs = End.heard(store.get(f"host/{peer}").decode())
                if theirs.host != mine.host:
                    network.check()
                means = choose(edge, mine, theirs, network.backend)
                if means[0] != SHARED:
                    store.set(f"address/{rank}", network.said())
                links[edge] = joining.join(edge, replica, means, sends=sends)
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
class End:
    """What a worker says of where it is.

    Attributes:
        host: which host.
        maps: of whose handles of memory its device understands; empty where it has none.
        unit: which device of the host, if NCCL reaches others from it.
    """

    host: str
    maps: str = ""
    unit: str = ""

    @staticmethod
    def of(accelerator: Accelerator | None) -> End:
        """This worker's."""
        mapping = accelerator.mapping if accelerator else None
        communicators = accelerator.communicators if accelerator else None
        return End(
            shared.host_identity(),
            mapping.kind if mapping else "",
            communicators.unit if communicators else "",
        )

    def said(self) -> str:
        return "\n".join((self.host, self.maps, self.unit))

    @staticmethod
    def heard(text: str) -> End:
        return End(*text.split("\n")[:3])


def choose(edge: Edge, mine: End, theirs: End, backend: str) -> tuple[str, str]:
    """What connects two workers: their hosts, and their devices, if anything does.

    Raises:
        UsageError: NCCL alone is to, and they share a device.
    """
    near = mine.host == theirs.host and backend != "gloo"
    host = SHARED if near else TLS if backend == "tls" else GLOO
    if edge.payload in _OF_THE_HOST:
        return host, ""
    if near and backend != "nccl":
        return host, MAPPED if mine.maps and mine.maps == theirs.maps else ""
    if backend not in ("auto", "nccl") or not (mine.unit and theirs.unit):
        return host, ""
    if (mine.host, mine.unit) == (theirs.host, theirs.unit):
        raise UsageError(
            f"--backend nccl needs an accelerator for each worker, and the stages of {edge} share "
            f"one ({mine.unit}): take fewer stages, or --backend auto"
        )
    return host, NCCL


def check_backend(backend: str, device: torch.device, accelerator: Accelerator | None) -> None:
    """That a worker's device can do what a backend needs.

    Raises:
        UsageError: it cannot.
    """
    if backend != NCCL or (accelerator is not None and accelerator.communicators is not None):
        return
    if device.type != "cuda":
        raise UsageError(f"--backend nccl needs CUDA devices, and stages compute on {device}")
    raise UsageError("--backend nccl: this torch is built without NCCL; use --backend auto")


class _Joining:
    """Joins one edge after the other, as long as the store waits."""

    def __init__(
        self,
        store: CoordinatorStore,
        network: Network,
        membership: Membership,
        accelerator: Accelerator | None,
    ) -> None:
        self._store, self._network, self._membership = store, network, membership
        self._accelerator = accelerator
        self._gloo = Gloo(store, network, store.deadline)
        secure = network.backend == "tls"
        self._credentials = Credentials.of(membership.token) if secure else None

    def join(self, edge: Edge, replica: int, means: tuple[str, str], *, sends: bool) -> Link:
        """This end of an edge.

        Raises:
            OSError, RuntimeError, Stranger: it cannot be.
        """
        secret, key = self._membership.key(edge, replica), f"replica-{replica}/{edge}"
        hosts, devices = means
        link = self._hosts(hosts, edge, secret, key, sends=sends)
        if not devices:
            return link
        where = Place(self._store, f"{devices}/{key}", self._store.deadline)
        accelerator = self._accelerator
        assert accelerator
        try:
            if devices == MAPPED:
                return mapped.connect(link, edge, secret, where, accelerator, sends=sends)
            carrier = self._network.carrier()
            return nccl.connect(link, edge, where, carrier, accelerator, sends=sends)
        except BaseException:
            link.close()
            raise

    def _hosts(self, means: str, edge: Edge, secret: bytes, key: str, *, sends: bool) -> Link:
        where = Place(self._store, f"{means}/{key}", self._store.deadline)
        if means == SHARED:
            pin = self._accelerator.pin if self._accelerator else None
            return shared.connect(edge, secret, where, pin, sends=sends)
        if self._credentials:
            host = self._network.own_address()
            return tls.connect(edge, secret, where, self._credentials, host, sends=sends)
        return self._gloo.connect(edge, secret, key, sends=sends)


def _between(store: CoordinatorStore, rank: int, peer: int) -> str:
    """The two hosts of a link and their addresses, as far as they have come to say them."""
    keys = [f"address/{end}" for end in (peer, rank)]
    if not store.check(keys):
        return ""
    theirs, mine = (store.get(key).decode() for key in keys)
    return f" on {theirs}, from {mine}"
