"""Where workers meet before they are connected, and what of a host carries tensors."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol
from urllib.parse import urlsplit

from pipeworker.wire.interfaces import chosen, named, outward, own_address
from pipeworker.wire.messages.store import StoreOperation, StoreReply
from pipeworker.worker.internals import Store


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


@dataclass(frozen=True, slots=True)
class Network:
    """How workers reach each other.

    Attributes:
        endpoint: the coordinator's address; the interface that reaches it carries the tensors,
        interface: unless this one is to, or ``GLOO_SOCKET_IFNAME`` names another.
        backend: ``auto`` for shared memory between workers of one host, or what their devices map
            of each other's, and between hosts NCCL where both have it, else gloo; ``tls`` for TLS
            between hosts; ``gloo`` or ``nccl`` for that everywhere.
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

    def carrier(self) -> str:
        """The name of that interface; empty where it is not found."""
        name, _ = chosen(self.interface)
        return name or named(self.own_address())

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
