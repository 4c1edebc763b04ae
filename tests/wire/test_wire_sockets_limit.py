"""The limit on unauthenticated connections: the busiest source's oldest are closed above it."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
import zmq

from pipeworker.timings import DEFAULT
from pipeworker.wire import sockets
from pipeworker.wire.keys import new_token
from support.real_jobs.jobs import until

TOKEN = new_token()


LIMIT = 5


Server = tuple[sockets.Router, str]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(sockets, "MAX_PENDING", LIMIT)
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        yield router, endpoint


def connect(endpoint: str, source: str = "127.0.0.1") -> socket.socket:
    url = urlsplit(endpoint)
    assert url.port
    return socket.create_connection((url.hostname, url.port), 10, (source, 0))


def is_closed(connection: socket.socket) -> bool:
    """Return whether the limited has closed it; its greeting may have come before."""
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def closed(connections: list[socket.socket]) -> list[bool]:
    return [is_closed(connection) for connection in connections]


def receive(router: sockets.Router) -> tuple[bytes, bytes]:
    assert router.poll(10_000)
    return sockets.receive(router)


def test_the_oldest_silent_connections_are_closed_above_the_limit(limited: Server) -> None:
    with ExitStack() as stack:
        made: list[socket.socket] = []
        for count in range(1, 20):
            made.append(stack.enter_context(connect(limited[1])))
            until(lambda count=count: sum(closed(made)) == max(0, count - LIMIT))  # type: ignore[misc]
        assert closed(made) == [True] * (19 - LIMIT) + [False] * LIMIT


def test_a_flood_from_one_address_closes_no_connection_from_another(limited: Server) -> None:
    with ExitStack() as stack:
        slow = stack.enter_context(connect(limited[1], "127.0.0.2"))
        until(lambda: slow.recv(1000, socket.MSG_PEEK))  # it is accepted before the others
        flood = [stack.enter_context(connect(limited[1])) for _ in range(20)]
        until(lambda: sum(closed(flood)) == 20 - LIMIT + 1)
        assert not is_closed(slow)


def test_authenticated_connections_are_not_counted(
    limited: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router, endpoint = limited
    peers, identities = [], []
    for _ in range(3 * LIMIT):  # in turn: never is more than one in its handshake
        peers.append(sockets.client(context, TOKEN, endpoint))
        peers[-1].send(b"hello")
        identities.append(receive(router)[0])
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(endpoint)) for _ in range(4 * LIMIT)]
        until(lambda: sum(closed(silent)) == 3 * LIMIT)
        for identity in identities:  # fails if a connection was closed
            sockets.send(router, identity, b"still connected")
        for peer in peers:
            assert peer.poll(10_000)


class MonitoredSocket:
    """A ROUTER's part for `ConnectionLimit`: the test says when it reports which event."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self._events = context.socket(zmq.PAIR)

    def monitor(self, endpoint: str, events: int) -> None:
        self._events.bind(endpoint)

    def report(self, event: int, connection: socket.socket | None = None) -> None:
        descriptor = connection.fileno() if connection else 0
        self._events.send_multipart([struct.pack("=HI", event, descriptor), b""])

    def disable_monitor(self) -> None:
        self.report(zmq.EVENT_MONITOR_STOPPED)


Monitored = tuple[MonitoredSocket, sockets.ConnectionLimit]


@pytest.fixture
def monitored(
    monkeypatch: pytest.MonkeyPatch, context: zmq.Context[zmq.Socket[bytes]]
) -> Monitored:
    """Return a socket and the limit of its connections."""
    monkeypatch.setattr(sockets, "MAX_PENDING", LIMIT)
    server = MonitoredSocket(context)
    return server, sockets.ConnectionLimit(server)  # type: ignore[arg-type]


Pairs = tuple[list[socket.socket], list[socket.socket]]


def pairs(stack: ExitStack, count: int) -> Pairs:
    """Return the accepted and the connected ends of some connections."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    accepted, connected = [], []
    for _ in range(count):
        address = listener.getsockname()
        connected.append(stack.enter_context(socket.create_connection(address, 10)))
        accepted.append(stack.enter_context(listener.accept()[0]))
    return accepted, connected


def test_a_connection_that_has_ended_is_not_counted(monitored: Monitored) -> None:
    server, limit = monitored
    with ExitStack() as stack:
        accepted, connected = pairs(stack, 2 * LIMIT)
        for number, connection in enumerate(accepted):
            server.report(zmq.EVENT_ACCEPTED, connection)
            if LIMIT <= number < 2 * LIMIT - 1:
                server.report(zmq.EVENT_DISCONNECTED, connection)
        until(lambda: any(closed(connected)))  # for the last one, which is above the limit
        limit.close()
        assert closed(connected) == [True] + [False] * (2 * LIMIT - 1)


def test_the_next_connection_with_a_descriptor_is_not_closed_for_the_last_one(
    monitored: Monitored,
) -> None:
    server, limit = monitored
    with ExitStack() as stack:
        accepted, connected = pairs(stack, LIMIT + 4)
        *first, other, second, third = accepted
        for connection in first:
            server.report(zmq.EVENT_ACCEPTED, connection)
        until(lambda: is_closed(connected[0]))
        os.dup2(other.fileno(), first[1].fileno())  # the oldest of the others
        for connection in (second, third):
            server.report(zmq.EVENT_ACCEPTED, connection)
        until(lambda: is_closed(connected[2]))
        limit.close()
        assert closed(connected)[3:] == [False] * (LIMIT + 1)


def test_a_frame_that_is_read_before_its_connection_is_reported(monitored: Monitored) -> None:
    server, limit = monitored
    with ExitStack() as stack:
        accepted, connected = pairs(stack, LIMIT + 2)
        limit.on_frame({zmq.SRCFD: accepted[0].fileno()})  # type: ignore[arg-type]
        for connection in accepted:
            server.report(zmq.EVENT_ACCEPTED, connection)
        until(lambda: any(closed(connected)))
        assert closed(connected) == [False, True] + [False] * LIMIT
        server.report(zmq.EVENT_DISCONNECTED, accepted[0])
        server.report(zmq.EVENT_ACCEPTED, accepted[0])  # another connection at its descriptor
        until(lambda: sum(closed(connected)) == 2)
        limit.close()
        assert closed(connected) == [False, True, True] + [False] * (LIMIT - 1)


def test_a_peer_connects_during_a_flood(
    limited: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router, endpoint = limited
    with ExitStack() as stack:
        flood = [stack.enter_context(connect(endpoint)) for _ in range(4 * LIMIT)]
        until(lambda: sum(closed(flood)) == 3 * LIMIT)
        sockets.client(context, TOKEN, endpoint).send(b"hello")
        assert receive(router)[1] == b"hello"


def test_a_handshake_has_a_deadline() -> None:
    timings = DEFAULT.scaled(0.05)
    with sockets.server(TOKEN, "127.0.0.1", timings) as (_, endpoint), connect(endpoint) as silent:
        until(lambda: is_closed(silent), 10)


def test_the_number_of_closed_connections_is_logged(
    monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    monkeypatch.setattr(sockets, "MAX_PENDING", LIMIT)
    with ExitStack() as stack:
        _, endpoint = stack.enter_context(sockets.server(TOKEN, "127.0.0.1"))
        made = [stack.enter_context(connect(endpoint)) for _ in range(10)]
        until(lambda: sum(closed(made)) == 10 - LIMIT)
        stack.pop_all().close()
    with sockets.server(TOKEN, "127.0.0.1"):
        pass  # of none, nothing is logged
    assert logged == [
        "closed 1 unauthenticated connections so far",
        f"{10 - LIMIT} unauthenticated connections were closed",
    ]
