"""Links that are connected end by end, and listeners that unauthenticated processes reach."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from pipeworker import environment
from pipeworker.plan.placement import Placement
from pipeworker.timings import VARIABLE
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.connect import connect
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.handshake import AuthenticationError, Membership
from pipeworker.worker.transport.links import unix
from pipeworker.worker.transport.links.link import Link
from pipeworker.worker.transport.network import Network
from support.in_process.transport import ENDPOINT, FORTH, MEMBERSHIP, LocalStore

REJECTED = "the channel 0>1/activation: rejected a connection that is not the peer's"


def timings(monkeypatch: pytest.MonkeyPatch, text: str) -> Iterator[None]:
    """Set other timings, in this process and those it starts, until the generator ends."""
    monkeypatch.setenv(VARIABLE, text)
    environment.timings.cache_clear()
    yield
    environment.timings.cache_clear()


def carries(source: Link, target: Link) -> bool:
    """Return whether a tensor arrives intact."""
    got, sent = torch.empty(3), torch.randn(3)
    receiving = target.bulk.receive([got], 0)[0]
    source.bulk.send(sent, 0).wait()
    receiving.wait()
    return torch.equal(got, sent)


def join(rank: int, local_store: LocalStore, backend: str, member: Membership = MEMBERSHIP) -> Link:
    """Return the link of one of two workers, whose edge is FORTH."""
    two, store = Placement.identity(2), local_store.store()
    network = Network(ENDPOINT, backend)
    return connect([FORTH], rank, two, store, network, member)[FORTH]


class Listener:
    """A target that waits for its source, and the address at which it listens."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.kind, self._stack = kind, stack
        self._meeting, self._hosts = LocalStore(), iter("ab")
        self._pool = stack.enter_context(ThreadPoolExecutor(2))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if kind == "tls":
            patch.setattr(unix, "host_identity", lambda: next(self._hosts))
        self._meeting.store().set("host/0", "" if kind == "tls" else unix.host_identity())
        self.target: Future[Link] = self._join(1)
        names = {"auto": "shared", "tls": "tls"}
        key = f"{names[kind]}/replica-0/{FORTH}"
        self.address = self._meeting.store().get(key).decode()

    def _join(self, rank: int) -> Future[Link]:
        return self._pool.submit(join, rank, self._meeting, self.kind)

    def connect(self) -> socket.socket:
        """Return an unauthenticated connection."""
        if self.kind == "tls":
            host, _, port = self.address.rpartition(" ")
            connection = socket.create_connection((host, int(port)), timeout=20)
        else:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection.connect(f"\0{self.address}")
            connection.settimeout(20)
        self._stack.callback(connection.close)
        return connection

    def fail_handshake(self, secret: bytes, certificate: Credentials) -> None:
        """Do as a source does, with another secret or certificate, and fail."""
        connection = self.connect()
        if self.kind == "tls":
            steps = certificate.steps(connection, secret, connects=True)
        else:
            steps = handshake.plain_steps(connection, secret, sends=True)
        with pytest.raises((AuthenticationError, OSError)):
            self._stack.callback(handshake.complete(steps, connection, time.monotonic() + 20).close)

    def accepts_peer(self) -> bool:
        """Return whether the right source is accepted, and the link carries a tensor."""
        source, target = self._join(0).result(20), self.target.result(20)
        try:
            return carries(source, target)
        finally:
            source.close()
            target.close()
