"""A link by gloo: a process group of two ranks, one a directed edge.

The groups stand on their own: no default process group is made or touched, so the user's code may
have one. They meet over the control plane.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from pipeworker.environment import timings
from pipeworker.errors import PeerLost
from pipeworker.plan.actions import Edge
from pipeworker.wire.interfaces import chosen
from pipeworker.worker.internals import PrefixStore, ProcessGroupGloo, Work, gloo_options
from pipeworker.worker.transport.links.link import OneLane, Pending
from pipeworker.worker.transport.network import CoordinatorStore, Network
from pipeworker.worker.transport.proof import Proving, Stranger, proving, turn_away

# Waits for tensors end when a peer is lost or the coordinator ends the job, which knows who is
# silent and who computes; no clock here can tell a long computation from a hang.
_FOREVER = timedelta(days=30)
_ATTEMPTS = 5  # of gloo's to connect, each as long as its timeout
_BROKEN = 3  # connections that fail before a word is said, until the network is to blame


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


@dataclass(slots=True)
class Gloo:
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
