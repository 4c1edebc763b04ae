"""A worker's end of the control plane, against a socket of the coordinator's."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from pipeworker.environment import timings
from pipeworker.facts.failure import Cause, Failure
from pipeworker.facts.position import Position
from pipeworker.timings import VARIABLE
from pipeworker.wire import codec, reliable_stream, sockets
from pipeworker.wire.messages.directions import Advance, Finish, Message, ToWorker
from pipeworker.wire.messages.presence import Abort, Failed, Heartbeat, Hello, Ping
from pipeworker.wire.messages.step import EndPass
from pipeworker.worker.control import Control
from pipeworker.worker.settings import Settings
from support.processes.proxy import Proxy
from support.real_jobs.jobs import until

TOKEN = "6f" * 32
HELLO = Hello(0, "host", 1)


def received(router: sockets.Router) -> tuple[bytes, Message]:
    """Return the worker's next message, with its identity."""
    assert router.poll(60_000), "the worker sends nothing"
    identity, data = router.recv_multipart()
    _, frame = reliable_stream.unpack(data)
    _, message = codec.decode(frame)
    return identity, message


def heartbeat(router: sockets.Router) -> tuple[bytes, Heartbeat]:
    """Return the worker's next heartbeat, with its identity."""
    while True:
        identity, message = received(router)
        if isinstance(message, Heartbeat):
            return identity, message


def finish(router: sockets.Router, control: Control) -> ToWorker:
    """Send the worker its last message; return it as the worker received it."""
    control.send(HELLO)
    identity, _ = heartbeat(router)
    frame = codec.encode(Advance(Finish()), 1)
    sockets.send(router, identity, reliable_stream.pack(1, frame))
    message = control.receive()
    assert message == Advance(Finish())
    return message


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


def test_no_heartbeat_precedes_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "heartbeat=0.02")
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        control = Control(Settings(0, endpoint, TOKEN, 0), aborted)
        control.start(signals=False)
        assert not router.poll(300)
        control.send(HELLO)
        assert received(router)[1] == HELLO
        finish(router, control)
        control.close()


def test_a_message_that_an_interrupt_took_from_the_queue_is_received_again() -> None:
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        control = Control(Settings(0, endpoint, TOKEN, 0), aborted)
        control.start(signals=False)
        first = finish(router, control)
        assert control.receive_after(None) is first
        identity, _ = heartbeat(router)
        frame = codec.encode(Advance(Finish()), 1)
        sockets.send(router, identity, reliable_stream.pack(2, frame))
        second = control.receive_after(first)
        assert second is not first
        assert control.receive_after(first) is second
        control.close()


def test_a_message_that_cannot_be_encoded_is_its_senders_error() -> None:
    with sockets.server(TOKEN, "127.0.0.1", timings()) as (router, endpoint):
        control = Control(Settings(0, endpoint, TOKEN, 0), aborted)
        control.start(signals=False)
        with pytest.raises(AttributeError):  # an int of more than 64 bits
            control.send(Hello(1 << 70, "host", 1))
        finish(router, control)  # the thread goes on
        control.close()


def test_the_last_message_is_acknowledged() -> None:
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        control = Control(Settings(0, endpoint, TOKEN, 0), aborted)
        control.start(signals=False)
        finish(router, control)
        control.close()
        while heartbeat(router)[1].received < 1:
            pass


def test_a_failure_is_reported_although_the_connection_is_lost_when_the_worker_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupted script does not wait for the coordinator's answer."""
    monkeypatch.setenv(VARIABLE, "linger=60,exit=70,verdict=80")
    failed = Failed(0, Failure(Cause.SIGNAL, "interrupted", 0, Position()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        control = Control(Settings(0, f"tcp://127.0.0.1:{port}", TOKEN, 0), aborted)
        before = {*threading.enumerate()}
        control.start(signals=False)
        (thread,) = {*threading.enumerate()} - before
        for _ in range(2):  # the worker has noticed, and tries to connect again
            listener.accept()[0].close()
        control.send(failed)
        closing = threading.Thread(target=control.close)
        closing.start()
        thread.join()

    def bind(router: sockets.Router, address: str) -> int:
        router.bind(f"{address}:{port}")
        return int(port)

    monkeypatch.setattr(sockets.Router, "bind_to_random_port", bind)
    with sockets.server(TOKEN, "127.0.0.1") as (router, _):
        while received(router)[1] != failed:
            pass
    closing.join()


@pytest.mark.parametrize("quiet", [False, True])
def test_another_connection_replaces_a_silent_one(
    monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    """TCP waits ever longer to send again, in one direction or in both."""
    if quiet:  # pings arrive, and report that no heartbeats do
        monkeypatch.setenv(VARIABLE, "redial=60")
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        proxy = Proxy(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        control = Control(Settings(0, "tcp://{}:{}".format(*proxy.address), TOKEN, 0), aborted)
        control.silence_timeout = 60.0
        control.start(signals=False)
        control.send(HELLO)
        identity, _ = heartbeat(router)
        if quiet:
            frame = codec.encode(Ping(quiet=True), 1)
            sockets.send(router, identity, reliable_stream.pack(reliable_stream.UNNUMBERED, frame))
        else:
            proxy.stall()
        until(lambda: proxy.accepted == 2)
        while router.poll(0):
            assert received(router)[0] == identity
        assert heartbeat(router)[0] == identity
        finish(router, control)
        control.close()
        proxy.close()


def test_the_first_reason_of_the_end_is_the_one_that_counts() -> None:
    """A script may make its next call when the coordinator is long gone."""
    exits: list[Abort] = []
    first = Abort("another rank failed", 1)
    messages: list[Message] = [first, Abort("the coordinator is gone", 1), EndPass(7)]
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        control = Control(Settings(0, endpoint, TOKEN, 0), exits.append)
        control.start(signals=False)
        control.send(HELLO)
        identity, _ = heartbeat(router)
        for number, message in enumerate(messages, 1):
            frame = codec.encode(message, 1)
            sockets.send(router, identity, reliable_stream.pack(number, frame))
        until(lambda: control.ended_pass == 7)
        assert (control.receive(), control.ended, exits) == (first, first, [first])
        control.close()
