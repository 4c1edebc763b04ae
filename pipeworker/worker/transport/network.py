"""The store at which workers meet before they are connected, and the network of their hosts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

from pipeworker.wire.interfaces import configured, external_address_of, interface_with, own_address
from pipeworker.wire.messages.store import StoreOperation, StoreReply
from pipeworker.worker.internals import Store

StoreCall = Callable[[StoreOperation, tuple[str, ...], bytes, "float | None"], StoreReply]
"""Performs one operation of the store, given its keys, value, and limit in seconds; raises
TimeoutError when it takes too long."""


class CoordinatorStore(Store):
    """A c10d store whose keys the coordinator keeps, with the operations that gloo and NCCL use.

    Until `deadline` (monotonic) it waits for a key; then it raises TimeoutError.
    """

    deadline = math.inf

    def __init__(self, call: StoreCall) -> None:
        super().__init__()
        self._call = call

    def set(self, key: str, value: str | bytes) -> None:
        new = value.encode() if isinstance(value, str) else bytes(value)
        self._call(StoreOperation.SET, (key,), new, None)

    def get(self, key: str) -> bytes:
        return self._wait_for((key,)).values[0]

    def check(self, keys: list[str]) -> bool:
        return self._call(StoreOperation.CHECK, tuple(keys), b"", None).present

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait_for(tuple(keys))

    def _wait_for(self, keys: tuple[str, ...]) -> StoreReply:
        seconds = None
        if self.deadline < math.inf:
            seconds = max(0.0, self.deadline - time.monotonic())
        return self._call(StoreOperation.GET, keys, b"", seconds)


@dataclass(frozen=True, slots=True)
class Network:
    """The network between the hosts of a job, and the mechanism that the job uses on it.

    Attributes:
        endpoint: the coordinator's address; the interface that leads to it carries the tensors
            unless `interface` or ``GLOO_SOCKET_IFNAME`` names another one.
        backend: ``auto`` for shared memory between workers of one host, or device memory that both
            map, and between hosts for NCCL where both have it, else gloo; ``tls`` for TLS between
            hosts; ``gloo`` or ``nccl`` for that everywhere.
        interface: the name of the interface that carries the tensors.
    """

    endpoint: str
    backend: str = "auto"
    interface: str | None = None

    def own_address(self) -> str:
        """Return this host's address on the interface that carries tensors."""
        url = urlsplit(self.endpoint)
        return own_address((url.hostname or "127.0.0.1", url.port or 1), self.interface)

    def interface_name(self) -> str:
        """Return the name of the interface that carries tensors, or "" if it is not found."""
        name, _ = configured(self.interface)
        return name or interface_with(self.own_address())

    def check_interface(self) -> None:
        """Raise UsageError if the named interface does not lead to other hosts."""
        name, source = configured(self.interface)
        if name:
            external_address_of(name, source)
