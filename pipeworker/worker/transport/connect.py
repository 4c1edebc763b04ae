"""Connects a worker to its neighbours, each edge by the best mechanism that both its ends have."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pipeworker.environment import timings
from pipeworker.errors import PeerLost, UsageError
from pipeworker.plan.actions import Edge, Payload
from pipeworker.plan.placement import Placement
from pipeworker.worker.device.accelerator import Accelerator
from pipeworker.worker.transport.credentials import Credentials, Login
from pipeworker.worker.transport.handshake import AuthenticationError, Membership, RendezvousPoint
from pipeworker.worker.transport.links import gloo, mapped, nccl, shared, tls, unix
from pipeworker.worker.transport.links.link import ConnectedLane, Link, TwoLanes
from pipeworker.worker.transport.links.unix import connect_unix
from pipeworker.worker.transport.network import CoordinatorStore, Network

SHARED, GLOO, TLS, MAPPED, NCCL = "shared", "gloo", "tls", "mapped", "nccl"
_HOST_PAYLOADS = (Payload.TARGET, Payload.DATA)  # their tensors lie on the host where they are sent


def connect(
    edges: Iterable[Edge],
    rank: int,
    placement: Placement,
    store: CoordinatorStore,
    network: Network,
    membership: Membership,
    accelerator: Accelerator | None = None,
    limit: float | None = None,
) -> dict[Edge, Link]:
    """Connect this worker's end of every edge, within `limit` seconds.

    All workers go through the edges in one order. Replicas have edges of the same names, so the
    store's keys name the replica where the edge begins as well.

    Raises:
        PeerLost: a neighbour cannot be reached, or does not come in time.
        UsageError: as in :func:`choose`; or the named interface leads to no other host.
    """
    limit = timings().connect if limit is None else limit
    deadline = time.monotonic() + limit
    store.deadline = deadline
    own = Endpoint.of(accelerator)
    store.set(f"host/{rank}", "\n".join(own))
    credentials = Credentials.of(membership.token) if network.backend == "tls" else None
    connector = _Connector(store, network, membership, credentials, accelerator)
    own_stages, own_replica = placement.stages_of(rank), placement.replica_of(rank)
    links: dict[Edge, Link] = {}
    with contextlib.ExitStack() as unless_all:
        for edge in edges:
            begin, end = (own_replica,) * 2 if edge.origin < 0 else (edge.origin, edge.goal)
            sends = edge.source in own_stages and begin == own_replica
            peer = placement.rank_of(*((edge.target, end) if sends else (edge.source, begin)))
            try:
                other = Endpoint(*store.get(f"host/{peer}").decode().split("\n"))
                if other.host != own.host:
                    network.check_interface()
                mechanisms = choose(edge, own, other, network.backend)
                if mechanisms[0] != SHARED:
                    own_address = f"{socket.gethostname()} ({network.own_address()})"
                    store.set(f"address/{rank}", own_address)
                links[edge] = connector.connect(edge, begin, mechanisms, sends=sends)
            except (OSError, RuntimeError, AuthenticationError) as error:
                late = isinstance(error, TimeoutError) and time.monotonic() >= deadline
                reason = f"it did not come within {limit:g} s" if late else str(error)
                name = f"{placement.names(peer)} (rank {peer})"
                if not late and (hosts := _hosts_between(store, rank, peer)):
                    name += hosts
                    reason += "; let TCP pass between them, to any port"
                raise PeerLost(
                    f"the channel {edge} could not be connected to the worker of {name}: {reason}"
                ) from error
            unless_all.callback(links[edge].close)
        unless_all.pop_all()
    return links


class Endpoint(NamedTuple):
    """The host and device of a worker, as its neighbours need to know them.

    Attributes:
        host: the identity of the host.
        mapping: the kind of handles by which its device maps memory; "" if it cannot.
        unit: the device of the host, if NCCL reaches other devices from it, else "".
    """

    host: str
    mapping: str = ""
    unit: str = ""

    @staticmethod
    def of(accelerator: Accelerator | None) -> Endpoint:
        """Return the endpoint of this worker."""
        mapping = accelerator.mapping if accelerator else None
        communicators = accelerator.communicators if accelerator else None
        return Endpoint(
            unix.host_identity(),
            mapping.kind if mapping else "",
            communicators.unit if communicators else "",
        )


def choose(edge: Edge, own: Endpoint, other: Endpoint, backend: str) -> tuple[str, str]:
    """Return the mechanism between two workers' hosts, and that between their devices or "".

    Both workers choose the same; `backend` is that of ``--backend``.
    """
    one_host = own.host == other.host and backend != "gloo"
    hosts = SHARED if one_host else TLS if backend == "tls" else GLOO
    if edge.payload in _HOST_PAYLOADS:
        return hosts, ""
    if one_host and backend != "nccl":
        return hosts, MAPPED if own.mapping and own.mapping == other.mapping else ""
    if backend not in ("auto", "nccl") or not (own.unit and other.unit):
        return hosts, ""
    if (own.host, own.unit) == (other.host, other.unit):
        raise UsageError(
            f"--backend nccl: each worker needs an accelerator of its own, but the stages of "
            f"{edge} share one ({own.unit}); use fewer stages, or --backend auto"
        )
    return hosts, NCCL


def check_backend(backend: str, device: torch.device, accelerator: Accelerator | None) -> None:
    """Raise UsageError if a worker's device does not support a backend."""
    if backend == NCCL and (accelerator is None or accelerator.communicators is None):
        reason = "this torch is built without NCCL"
        if device.type != "cuda":
            reason = f"requires CUDA devices, but stages compute on {device}"
        raise UsageError(f"--backend nccl: {reason}; use --backend auto")


@dataclass(frozen=True, slots=True)
class _Connector:
    """Connects one edge after another until the deadline of the store."""

    store: CoordinatorStore
    network: Network
    membership: Membership
    credentials: Credentials | None
    accelerator: Accelerator | None

    def connect(
        self, edge: Edge, replica: int, mechanisms: tuple[str, str], *, sends: bool
    ) -> Link:
        """Connect this end of an edge that begins in a replica by the result of :func:`choose`.

        Raises:
            AuthenticationError: the process at the other end is not the peer.
            OSError, RuntimeError: the other end cannot be reached.
        """
        secret, key = self.membership.edge_key(edge, replica), f"replica-{replica}/{edge}"
        accelerator, deadline = self.accelerator, self.store.deadline
        hosts, devices = (
            RendezvousPoint(self.store, f"{mechanism}/{key}", deadline) for mechanism in mechanisms
        )
        link: Link
        if mechanisms[0] == SHARED:
            connection = connect_unix(edge, secret, hosts, sends=sends)
            pin = accelerator.pin if accelerator else None
            link = (
                shared.SendingLink(edge, connection)
                if sends
                else shared.ReceivingLink(edge, connection, pin)
            )
        elif self.credentials:
            login, host = Login(secret, self.credentials), self.network.own_address()
            link = tls.connect(edge, login, hosts, host, sends=sends)
        else:
            link = gloo.connect(edge, secret, hosts, self.network, sends=sends)
        if not mechanisms[1]:
            return link
        assert accelerator
        try:
            lane: ConnectedLane | None
            if mechanisms[1] == MAPPED:
                connection = connect_unix(edge, secret, devices, sends=sends)
                connection.settimeout(devices.seconds_left())
                lane = mapped.negotiate(connection, edge, accelerator, sends=sends)
            else:
                interface = self.network.interface_name()
                lane = nccl.connect(edge, devices, interface, accelerator, sends=sends)
            return TwoLanes(link, lane) if lane else link
        except BaseException:
            link.close()
            raise


def _hosts_between(store: CoordinatorStore, rank: int, peer: int) -> str:
    """Return a phrase with both hosts of a link and their addresses, if both are in the store."""
    keys = [f"address/{end}" for end in (peer, rank)]
    if not store.check(keys):
        return ""
    other, own = (store.get(key).decode() for key in keys)
    return f" on {other}, from {own}"
