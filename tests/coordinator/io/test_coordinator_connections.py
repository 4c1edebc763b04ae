"""The coordinator's end of the control plane, with real sockets."""

from __future__ import annotations

import time

import zmq

from pipeworker.coordinator.io.workers import WorkerConnections
from pipeworker.facts.position import Position
from pipeworker.wire import codec, reliable_stream, sockets
from pipeworker.wire.keys import new_token
from pipeworker.wire.messages.presence import Heartbeat, Ping

REDIAL = 0.3


def test_a_worker_whose_heartbeats_do_not_arrive_is_told_at_once_and_once() -> None:
    token = new_token()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with sockets.server(token, "127.0.0.1") as (router, endpoint):
        worker = sockets.client(context, token, endpoint, identity=b"w0")
        connections = WorkerConnections(router, lambda event: None, lambda: 1, REDIAL)

        def beat() -> None:
            frame = codec.encode(Heartbeat(0, Position()), 1)
            worker.send(reliable_stream.pack(reliable_stream.UNNUMBERED, frame))
            assert connections.wait(10)
            assert len(list(connections.events(time.monotonic() + 0.2))) == 1

        def pings() -> list[bool]:
            found = []
            while worker.poll(200):
                _, message = codec.decode(reliable_stream.unpack(worker.recv())[1])
                assert isinstance(message, Ping)
                found.append(message.quiet)
            return found

        for _ in range(2):
            beat()
            connections.ping_quiet({b"w0"})
            assert pings() == []
            time.sleep(REDIAL)
            for _ in range(2):
                connections.ping_quiet({b"w0"})
            assert pings() == [True]
        worker.close(linger=0)
    context.term()
