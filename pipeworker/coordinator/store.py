"""The key-value store by which the workers' channels meet, kept by the coordinator. Pure.

Workers reach it over the authenticated control plane, so a job opens no port for it. The operations
are those of c10d's ``Store``; GET waits until all its keys are set.
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
            ProtocolError: the request adds a value that is not a number of 62 bits, or the store is
                full; nothing has changed.
        """
        operation, values = request.operation, self._values
        if operation is StoreOperation.GET:
            self._grow(_request_size(request))
            return self._answer([(peer, request)])
        key = request.keys[0] if request.keys else ""
        result = 0
        found: tuple[bytes, ...] = ()
        match operation:
            case StoreOperation.SET:
                self._set(key, request.value)
            case StoreOperation.ADD:
                result = _number(values.get(key, b"0")) + _number(request.value)
                self._set(key, str(result).encode())
            case StoreOperation.CHECK:
                result = int(all(name in values for name in request.keys))
            case StoreOperation.COMPARE_SET:
                if values.get(key, b"") == request.expected:
                    self._set(key, request.value)
                found = (values.get(key, request.expected),)
            case StoreOperation.DELETE if key in values:
                self._size -= len(key) + len(values.pop(key))
                result = 1
        due = self._answer(self._waiting.pop(key, [])) if key in values else []
        return [(peer, StoreReply(request.number, found, result)), *due]

    def _set(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        self._grow(len(value) + (len(key) if old is None else -len(old)))
        self._values[key] = value

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
                ready.append((peer, StoreReply(request.number, found, 0)))
                self._size -= _request_size(request)
            else:
                self._waiting.setdefault(missing, []).append((peer, request))
        return ready


def _request_size(request: StoreRequest) -> int:
    """Return the bytes that a waiting request counts for."""
    return 200 + sum(map(len, request.keys))


def _number(value: bytes) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ProtocolError(f"ADD needs a number, not {value[:20]!r}") from None
    if abs(number) >= 1 << 62:  # the sum still fits a message
        raise ProtocolError("ADD of a number beyond 62 bits")
    return number
