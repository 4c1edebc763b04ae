"""The key-value store by which the workers' channels meet, kept by the coordinator. Pure.

Workers reach it over the authenticated control plane, so a job opens no port for it. The operations
are those methods of c10d's ``Store`` that gloo and NCCL call; GET waits until all its keys are set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeworker.errors import ProtocolError
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest

Reply = tuple[bytes, StoreReply]
MAX_BYTES = 1 << 26
"""Limit on keys, values and waiting requests: enough for thousands of workers."""


@dataclass(slots=True)
class KeyValueStore:
    """Keys, values, and the requests that wait for a key. Peers are transport identities."""

    _values: dict[str, bytes] = field(default_factory=dict)
    _waiting: dict[str, list[tuple[bytes, StoreRequest]]] = field(default_factory=dict)  # by key
    _size: int = 0

    def handle(self, peer: bytes, request: StoreRequest) -> list[Reply]:
        """Perform `request`; return the replies that are due now, to `peer` and to waiting peers.

        Raises:
            ProtocolError: the store is full.
        """
        values, keys = self._values, request.keys
        match request.operation:
            case StoreOperation.GET:
                self._grow(_request_size(request))
                return self._answer([(peer, request)])
            case StoreOperation.CHECK:
                present = all(key in values for key in keys)
                return [(peer, StoreReply(request.number, present=present))]
            case StoreOperation.SET:
                replies = [(peer, StoreReply(request.number))]
                for key in keys:
                    old = len(key) + len(values[key]) if key in values else 0
                    self._grow(len(key) + len(request.value) - old)
                    values[key] = request.value
                    replies += self._answer(self._waiting.pop(key, []))
                return replies

    def _grow(self, more: int) -> None:
        if self._size + more > MAX_BYTES:
            raise ProtocolError(f"the store is full: {MAX_BYTES} bytes")
        self._size += more

    def _answer(self, requests: list[tuple[bytes, StoreRequest]]) -> list[Reply]:
        """Answer the requests whose keys are all set; let each other one wait for a missing key."""
        ready: list[Reply] = []
        for peer, request in requests:
            missing = next((key for key in request.keys if key not in self._values), None)
            if missing is None:
                found = tuple(self._values[key] for key in request.keys)
                ready.append((peer, StoreReply(request.number, found)))
                self._size -= _request_size(request)
            else:
                self._waiting.setdefault(missing, []).append((peer, request))
        return ready


def _request_size(request: StoreRequest) -> int:
    """Return the bytes that a waiting request counts for."""
    return 200 + sum(map(len, request.keys))
