"""The key-value store torch.distributed meets at, kept by the coordinator. Pure.

Workers reach it over the authenticated control plane, so that a job opens no key-value port.
The operations are those of c10d's ``Store``; GET waits until all its keys are set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeworker.errors import ProtocolError
from pipeworker.wire.messages.store import StoreOperation, StoreReply, StoreRequest

Answer = tuple[bytes, StoreReply]
MOST = 1 << 26
"""Bytes that keys, values and those who wait may take: those of thousands of workers."""


@dataclass(slots=True)
class Rendezvous:
    """Keys, values, and who waits for what. Peers are transport identities."""

    _values: dict[str, bytes] = field(default_factory=dict)
    _waiting: dict[str, list[tuple[bytes, StoreRequest]]] = field(default_factory=dict)  # by a key
    _held: int = 0

    def handle(self, peer: bytes, request: StoreRequest) -> list[Answer]:
        """Perform `request`; returns every answer that is due now, to `peer` and to waiters.

        Raises:
            ProtocolError: ADD of, or to, what is no number of 62 bits, or no room for it; nothing
                has changed.
        """
        operation, values = request.operation, self._values
        if operation is StoreOperation.GET:
            self._hold(_size(request))
            return self._get([(peer, request)])
        key = request.keys[0] if request.keys else ""
        result = 0
        found: tuple[bytes, ...] = ()
        if operation is StoreOperation.SET:
            self._set(key, request.value)
        elif operation is StoreOperation.ADD:
            result = _number(values.get(key, b"0")) + _number(request.value)
            self._set(key, str(result).encode())
        elif operation is StoreOperation.CHECK:
            result = int(all(name in values for name in request.keys))
        elif operation is StoreOperation.COMPARE_SET:
            if values.get(key, b"") == request.expected:
                self._set(key, request.value)
            found = (values.get(key, request.expected),)
        elif operation is StoreOperation.DELETE:
            gone = values.pop(key, None)
            result = int(gone is not None)
            if gone is not None:
                self._held -= len(key) + len(gone)
        due = self._get(self._waiting.pop(key, [])) if key in values else []
        return [(peer, StoreReply(request.number, found, result)), *due]

    def _set(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        self._hold(len(value) + (len(key) if old is None else -len(old)))
        self._values[key] = value

    def _hold(self, more: int) -> None:
        if self._held + more > MOST:
            raise ProtocolError(f"the store is full: {MOST} bytes")
        self._held += more

    def _get(self, asked: list[tuple[bytes, StoreRequest]]) -> list[Answer]:
        """Answer those whose keys are all there; the others wait for one that is not."""
        ready: list[Answer] = []
        for peer, request in asked:
            missing = next((key for key in request.keys if key not in self._values), None)
            if missing is None:
                found = tuple(self._values[key] for key in request.keys)
                ready.append((peer, StoreReply(request.number, found, 0)))
                self._held -= _size(request)
            else:
                self._waiting.setdefault(missing, []).append((peer, request))
        return ready


def _size(request: StoreRequest) -> int:
    """Bytes that one who waits takes, the request itself included."""
    return 200 + sum(map(len, request.keys))


def _number(value: bytes) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ProtocolError(f"ADD needs a number, not {value[:20]!r}") from None
    if abs(number) >= 1 << 62:  # the sum still fits a message
        raise ProtocolError("ADD of a number beyond 62 bits")
    return number
