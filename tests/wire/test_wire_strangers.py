"""Silent connections: cut off above a limit, the oldest first, and nobody who belongs."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
import zmq

from pipeworker.wire import sockets, strangers
from pipeworker.wire.keys import new_token
from support.jobs import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel counts on Linux")
TOKEN = new_token()
MOST = 5
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)

Server = tuple[zmq.Socket[bytes], str]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(strangers, "_MOST", MOST)
    with sockets.server(TOKEN, "127.0.0.1") as (router, endpoint):
        router.setsockopt(zmq.RCVTIMEO, 10_000)
        yield router, endpoint


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def connect(endpoint: str) -> socket.socket:
    url = urlsplit(endpoint)
    assert url.port
    return socket.create_connection((url.hostname, url.port), timeout=10)


def is_cut(connection: socket.socket) -> bool:
    """Whether its end has come; the server's greeting may have come before."""
    connection.setblocking(False)
    try:
        while connection.recv(1000):
            continue
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True
    return True


def test_the_oldest_silent_connections_are_cut_off_above_the_limit(server: Server) -> None:
    with ExitStack() as stack:
        made = []
        for count in range(1, 20):
            made.append(stack.enter_context(connect(server[1])))
            until(lambda count=count: sum(map(is_cut, made)) == max(0, count - MOST))  # type: ignore[misc]
        assert [is_cut(one) for one in made] == [True] * (19 - MOST) + [False] * MOST


def test_who_has_said_nothing_goes_before_who_is_shaking_hands(server: Server) -> None:
    with ExitStack() as stack:
        slow = stack.enter_context(connect(server[1]))
        slow.sendall(GREETING)
        until(lambda: slow.recv(1000, socket.MSG_PEEK)[10:])  # the server has read it
        silent = [stack.enter_context(connect(server[1])) for _ in range(20)]
        until(lambda: sum(map(is_cut, silent)) == 20 - MOST + 1)
        assert not is_cut(slow)


def test_who_has_proven_itself_is_not_counted(
    server: Server, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    router, endpoint = server
    peers, places = [], []
    for _ in range(3 * MOST):  # in turn: never more than one is still shaking hands
        peers.append(sockets.client(context, TOKEN, endpoint))
        peers[-1].send(b"here")
        places.append(router.recv_multipart()[0])
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(endpoint)) for _ in range(4 * MOST)]
        until(lambda: sum(map(is_cut, silent)) == 3 * MOST)
        for place in places:  # none had to come back
            router.send_multipart([place, b"still there"])
        for peer in peers:
            assert peer.poll(10_000)


OPENS = """
import os, resource
from pipeworker.wire import strangers

resource.setrlimit(resource.RLIMIT_NOFILE, (50, 90))
strangers._TRIES = 5
descriptors = strangers.Descriptors()
made = []

def use_up():
    before = len(made)
    while True:
        try:
            made.append(os.dup(0))
        except OSError:
            return len(made) - before

def write():
    open("/dev/null").close()
    tries.append(use_up())

def write_when_one_is_cut_off():
    tries.append(0)
    if len(tries) == 3:
        os.close(made.pop())
    open("/dev/null").close()

tries = []
print(use_up() > 35, use_up())
descriptors.spare(write)
print(tries[0] > 20, use_up())
tries = []
descriptors.spare(write_when_one_is_cut_off)
print(len(tries), use_up())
descriptors.spare(write)
try:
    descriptors.spare(write)
except OSError as error:
    print(error.strerror)
"""


def test_files_have_descriptors_that_connections_cannot_take() -> None:
    """The system's limit is raised as far as it goes, less those."""
    ran = subprocess.run([sys.executable, "-c", OPENS], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == ["True 0", "True 0", "3 0", "Too many open files"]
