"""A worker's end of the control plane, against a socket of the coordinator's."""

from __future__ import annotations

import socket
import time

import pytest

from pipeworker.environment import timings
from pipeworker.timings import VARIABLE
from pipeworker.wire import codec, reliable_stream, sockets
from pipeworker.wire.messages.directions import Advance, Finish
from pipeworker.wire.messages.presence import Abort, Heartbeat
from pipeworker.worker.control import Control
from pipeworker.worker.settings import Settings

TOKEN = "6f" * 32


def heartbeat(router: sockets.Router) -> tuple[bytes, Heartbeat]:
    """Return the worker's next heartbeat, with its identity."""
    while True:
        assert router.poll(60_000), "the worker sends nothing"
        identity, data = router.recv_multipart()
        _, frame = reliable_stream.unpack(data)
        _, message = codec.decode(frame)
        if isinstance(message, Heartbeat):
            return identity, message


def finish(router: sockets.Router, control: Control) -> None:
    """Send the worker its last message."""
    identity, _ = heartbeat(router)
    frame = codec.encode(Advance(Finish()), 1)
    sockets.send(router, identity, reliable_stream.pack(1, frame))
    assert control.receive() == Advance(Finish())


def aborted(abort: Abort) -> None:
    raise AssertionError(abort)


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_worker_does_not_wait_for_a_coordinator_that_ended_after_its_last_message(
    monkeypatch: pytest.MonkeyPatch, acknowledged: bool
) -> None:
    monkeypatch.setenv(VARIABLE, "linger=60,exit=70,verdict=80")
    with sockets.server(TOKEN, "127.0.0.1", timings()) as (router, endpoint):
        control = Control(Settings(0, endpoint, TOKEN, 0), aborted)
        control.start(signals=False)
        finish(router, control)
        while acknowledged and heartbeat(router)[1].received < 1:
            pass
    if not acknowledged:
        port = int(endpoint.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", port)) as listener:
            listener.settimeout(60)
            listener.accept()[0].close()  # the worker has noticed, and tries to connect again
    begun = time.monotonic()
    control.close()
    assert time.monotonic() - begun < 30  # half of the time to deliver a message


def test_the_last_message_is_acknowledged() -> None:
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        control = Control(Settings(0, endpoint, TOKEN, 0), aborted)
        control.start(signals=False)
        finish(router, control)
        control.close()
        while heartbeat(router)[1].received < 1:
            pass
