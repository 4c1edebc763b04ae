"""Links by gloo: one process group of two ranks for each directed edge.

The groups stand alone: no default process group is made or used, so the user's code may have one.
Their ends meet at the coordinator's store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeworker.environment import timings
from pipeworker.plan.actions import Edge
from pipeworker.worker.internals import PrefixStore, ProcessGroupGloo, Store, gloo_options
from pipeworker.worker.transport.handshake import (
    Authentication,
    AuthenticationError,
    RendezvousPoint,
    authenticate,
    log_rejection,
)
from pipeworker.worker.transport.links.link import GroupWork, OneLane, Pending, peer_lost
from pipeworker.worker.transport.network import Network

if TYPE_CHECKING:
    from pipeworker.worker.internals import Work

# A wait for a tensor ends when a peer is lost or the coordinator ends the job. Only the coordinator
# knows which workers compute and which are gone, so no timeout here could distinguish them.
_NO_TIMEOUT = timedelta(days=30)
_MIN_TIMEOUT = timedelta(milliseconds=1)  # gloo counts whole ones, and takes 0 for no timeout
_CONNECT_ATTEMPTS = 5  # of gloo's own, each as long as the group's timeout
_MAX_BROKEN = 3  # groups that fail at once, before the network is to blame


@dataclass(slots=True)
class GroupLink(OneLane):
    """One end of an edge: rank 0 of its group sends, rank 1 receives."""

    edge: Edge
    group: Any  # a ProcessGroup; torch's type stub lacks send and recv

    def send(self, tensor: torch.Tensor, tag: int) -> Pending:
        return self._submit(self.group.send, tensor, 1, tag)

    def receive(self, tensors: Sequence[torch.Tensor], tag: int) -> Sequence[Pending]:
        return [self._submit(self.group.recv, tensor, 0, tag) for tensor in tensors]

    def close(self) -> None:
        """Abort the group; transfers under way fail."""
        group, self.group = self.group, None
        if group is not None:
            group.abort()

    def _submit(
        self, start: Callable[..., Work], tensor: torch.Tensor, rank: int, tag: int
    ) -> Pending:
        try:
            work = start([tensor], rank, tag)
        except RuntimeError as error:
            raise peer_lost(self.edge, error) from error
        return GroupWork(self.edge, partial(work.wait, _NO_TIMEOUT), tensor)


def connect(
    edge: Edge, secret: bytes, point: RendezvousPoint, network: Network, *, sends: bool
) -> GroupLink:
    """Connect this worker's end of an edge by gloo.

    gloo accepts any connection that sends a small number, so an unauthenticated process may take a
    rank of a group. Therefore the two ends authenticate each other over the group. If that fails,
    both try again with a new group, which meets at another port.

    Raises:
        TimeoutError: the peer does not come before the deadline.
        RuntimeError: it cannot be reached.
    """
    rank, attempt, store = 0 if sends else 1, 0, point.store
    while True:
        attempt += 1
        prefix = f"{point.key}/{attempt}"
        store.set(f"{prefix}/here-{rank}", "")
        store.get(f"{prefix}/here-{1 - rank}")  # from here on, only the network takes time
        began = time.monotonic()
        group: Any = None
        try:
            until = min(began + timings().reach, point.deadline)
            group = create_group(store, network, prefix, rank, until)
            failure = _authenticate_over(group, authenticate(secret, sends=sends), rank)
        except RuntimeError as error:
            # An unauthenticated process may break a group, but fails fast and not every time.
            slow = time.monotonic() - began > timings().reach / 2
            if slow or attempt == _MAX_BROKEN:
                raise
            group, failure = None, str(error)
        # One end may learn of a failure long before the other, which waits for its timeout.
        store.set(f"{prefix}/proven-{rank}", "no" if failure else "yes")
        if store.get(f"{prefix}/proven-{1 - rank}") == b"yes" and not failure:
            return GroupLink(edge, group)
        log_rejection(edge, failure or "at the other end")
        if group is not None:
            group.abort()


def create_group(store: Store, network: Network, prefix: str, rank: int, deadline: float) -> Any:
    """Return a group of two; raise RuntimeError if it is not connected by `deadline`.

    Each group has a device of its own. If a group fails, its device goes with it: a device that
    other groups keep open would accept the late peer and crash, because gloo calls the freed pair
    of the failed group.
    """
    device = create_device(network)
    left = timedelta(seconds=deadline - time.monotonic())
    options = gloo_options([device], max(_MIN_TIMEOUT, left / _CONNECT_ATTEMPTS))
    return ProcessGroupGloo(PrefixStore(prefix, store), rank, 2, options)


def create_device(network: Network) -> ProcessGroupGloo.Device:
    """Return a gloo device that listens at this host's address; each has a port of its own."""
    return ProcessGroupGloo.create_device(hostname=network.own_address())


def _authenticate_over(group: Any, authentication: Authentication, rank: int) -> str:
    """Perform an authentication over a group of two; return the failure, or ""."""
    deadline = time.monotonic() + timings().handshake
    in_use = []  # gloo reads or writes these until the group is gone

    def transfer(start: Callable[..., Work], data: bytes) -> bytearray:
        memory = bytearray(data)
        if memory:
            in_use.append(torch.frombuffer(memory, dtype=torch.uint8))
            left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
            start([in_use[-1]], 1 - rank, 0).wait(left)
        return memory

    try:
        message, count = next(authentication)
        while True:
            transfer(group.send, message)
            message, count = authentication.send(bytes(transfer(group.recv, bytes(count))))
    except StopIteration:
        return ""
    except (AuthenticationError, RuntimeError) as error:
        group.abort()
        return str(error)
