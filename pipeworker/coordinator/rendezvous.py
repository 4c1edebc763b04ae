"""The key-value store torch.distributed meets at, kept by the coordinator. Pure.

Workers reach it over the authenticated control plane, so that a job opens no key-value port.
The operations are those of c10d's ``Store``; GET waits until all its keys are set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeworker.errors import ProtocolError
from pipeworker.wire.messages import StoreOperation, StoreReply, StoreRequest

Answer = tuple[bytes, StoreReply]


@dataclass(slots=True)
class Rendezvous:
    """Keys, values, and who waits for what. Peers are transport identities."""

    _values: dict[str, bytes] = field(default_factory=dict)
    _waiting: list[tuple[bytes, StoreRequest]] = field(default_factory=list)

    def handle(self, peer: bytes, request: StoreRequest) -> list[Answer]:
        """Perform `request`; returns every answer that is due now, to `peer` and to waiters.

        Raises:
            ProtocolError: ADD of, or to, what is no number of 62 bits; nothing has changed.
        """
        operation, values = request.operation, self._values
        if operation is StoreOperation.GET:
            self._waiting.append((peer, request))
            return self._release()
        key = request.keys[0] if request.keys else ""
        result = 0
        found: tuple[bytes, ...] = ()
        if operation is StoreOperation.SET:
            values[key] = request.value
        elif operation is StoreOperation.ADD:
            result = _number(values.get(key, b"0")) + _number(request.value)
            values[key] = str(result).encode()
        elif operation is StoreOperation.CHECK:
            result = int(all(name in values for name in request.keys))
        elif operation is StoreOperation.COMPARE_SET:
            if values.get(key, b"") == request.expected:
                values[key] = request.value
            found = (values.get(key, request.expected),)
        elif operation is StoreOperation.DELETE:
            result = int(values.pop(key, None) is not None)
        return [(peer, StoreReply(request.number, found, result)), *self._release()]

    def _release(self) -> list[Answer]:
        ready: list[Answer] = []
        waiting: list[tuple[bytes, StoreRequest]] = []
        for peer, request in self._waiting:
            if all(key in self._values for key in request.keys):
                found = tuple(self._values[key] for key in request.keys)
                ready.append((peer, StoreReply(request.number, found, 0)))
            else:
                waiting.append((peer, request))
        self._waiting = waiting
        return ready


def _number(value: bytes) -> int:
    try:
        number = int(value)
    except ValueError:
        raise ProtocolError(f"ADD needs a number, not {value[:20]!r}") from None
    if abs(number) >= 1 << 62:  # the sum still fits a message
        raise ProtocolError("ADD of a number beyond 62 bits")
    return number
