"""Links over TLS; test_transport_link.py tests all links."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError
from pipeworker.worker.transport import handshake
from pipeworker.worker.transport.credentials import Credentials
from pipeworker.worker.transport.links.link import COMPLETE, Pending, PendingReceive
from pipeworker.worker.transport.links.tls import LARGE_BYTES, ReceivingLink, SendingLink
from support.in_process.transport import FORTH, MEMBERSHIP
from support.real_jobs.jobs import until

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
LARGE = LARGE_BYTES // 4
HUGE = 16 << 20  # elements: more than sockets hold
HEADER = struct.Struct("<2q")  # tag, bytes


@dataclass
class Pair:
    """Both ends of a link, and their sockets."""

    source: SendingLink
    target: ReceivingLink
    sending: socket.socket
    receiving: socket.socket

    def close(self) -> None:
        self.source.close()
        self.target.close()


def connected() -> Pair:
    key, credentials = MEMBERSHIP.edge_key(FORTH, 0), Credentials.of(MEMBERSHIP.token)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]

    def authenticated(connection: socket.socket, sends: bool) -> socket.socket:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        steps = credentials.steps(connection, key, connects=sends)
        return handshake.complete(steps, connection, time.monotonic() + 20)

    with ThreadPoolExecutor(2) as pool:
        sending, receiving = pool.map(authenticated, ends, (True, False))
    return Pair(SendingLink(FORTH, sending), ReceivingLink(FORTH, receiving), sending, receiving)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = connected()
    yield made
    made.close()


def received(target: ReceivingLink, count: int, tag: int = 0) -> torch.Tensor:
    got = torch.empty(count)
    target.receive([got], tag)[0].wait()
    return got


def nothing_unread(connection: socket.socket) -> bool:
    """Return whether all that has arrived at a socket has been read from it."""
    try:
        socket.socket.recv(connection, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    return False


def test_a_small_send_completes_at_once_without_a_thread(pair: Pair) -> None:
    before = threading.active_count()
    for count in (1, 4092, 4093, LARGE - 1):
        assert pair.source.send(torch.full((count,), 2.0), 0) is COMPLETE
        assert torch.equal(received(pair.target, count), torch.full((count,), 2.0))
    assert threading.active_count() == before


def test_a_send_larger_than_the_socket_is_queued_and_does_not_block(pair: Pair) -> None:
    tensor = torch.arange(HUGE, dtype=torch.float32)
    alive = weakref.ref(tensor)
    large = pair.source.send(tensor, 0)
    small = pair.source.send(torch.ones(1), 0)  # keeps its place
    assert large is not COMPLETE
    assert small is not COMPLETE
    assert torch.equal(received(pair.target, HUGE), tensor)
    assert received(pair.target, 1).item() == 1.0
    del tensor
    until(lambda: alive() is None)  # before it is waited for
    for pending in (large, small):
        pending.wait()
    assert pair.source.send(torch.ones(1), 0) is COMPLETE


def test_a_large_tensor_arrives_before_it_is_waited_for(pair: Pair) -> None:
    got = [torch.empty(HUGE), torch.empty(1)]
    large, small = pair.target.receive(got, 0)
    pair.source.send(torch.ones(HUGE), 0).wait()
    pair.source.send(torch.ones(1), 0)
    assert isinstance(large, PendingReceive)
    until(lambda: large.done)
    small.wait()
    assert got[0].min().item() == got[1].item() == 1.0


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1, 5000, LARGE])), min_size=1, max_size=8
    ),
    st.permutations(range(3)),
    st.integers(0, 8),
)
def test_messages_match_their_tags_in_any_order_of_posts(
    messages: list[tuple[int, int]], order: list[int], ahead: int
) -> None:
    """Some receives are posted before the sends, the others tag by tag, in any order of tags."""
    if not LASTING:
        LASTING.append(connected())
    source, target = LASTING[0].source, LASTING[0].target
    waiting: list[tuple[Pending, torch.Tensor, float]] = []

    def post(number: int) -> None:
        tag, count = messages[number]
        got = torch.empty(count)
        waiting.append((target.receive([got], tag)[0], got, float(number)))

    for number in range(len(messages))[:ahead]:
        post(number)
    sends = [
        source.send(torch.full((count,), float(number)), tag)
        for number, (tag, count) in enumerate(messages)
    ]
    for tag in order:
        for number in range(len(messages))[ahead:]:
            if messages[number][0] == tag:
                post(number)
                waiting[-1][0].wait()
    for pending, got, value in waiting:
        pending.wait()
        assert torch.unique(got).tolist() == [value]
    for send in sends:
        send.wait()


LASTING: list[Pair] = []
"""One link for all examples."""


@pytest.mark.parametrize("count", [2, 4, 9000])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_message_of_another_length_is_an_error_and_writes_nothing(
    pair: Pair, count: int, first: str
) -> None:
    source, target = pair.source, pair.target
    memory = torch.zeros(12)
    if first == "send":
        source.send(torch.ones(count), 7)
        source.send(torch.ones(1), 0)
        received(target, 1)  # the message before it has arrived

    def receive() -> None:
        (pending,) = target.receive([memory[4:7]], 7)
        source.send(torch.ones(count), 7)
        pending.wait()

    words = f"the channel 0>1/activation: received {4 * count} bytes where 12 were expected"
    with pytest.raises(PipeworkerError, match=words) as caught:
        receive()
    assert not isinstance(caught.value, PeerLost)  # it is a cause, not a secondary failure
    assert not memory.any()


@pytest.mark.parametrize("count", [-1, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("elements", [3, LARGE], ids=["read by the caller", "read by the thread"])
def test_an_impossible_length_is_an_error_and_allocates_nothing(
    pair: Pair, count: int, elements: int
) -> None:
    (pending,) = pair.target.receive([torch.empty(elements)], 7)
    pair.sending.sendall(HEADER.pack(1, count))
    with pytest.raises(ProtocolError, match=f"0>1/activation: the sender announced {count} bytes"):
        pending.wait()


def test_closing_the_source_within_a_message_ends_both_ends(pair: Pair) -> None:
    sending = pair.source.send(torch.ones(HUGE), 0)
    pair.source.close()
    with pytest.raises(PeerLost, match="0>1/activation was closed"):
        sending.wait()
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        received(pair.target, HUGE)
    with pytest.raises(PeerLost):
        pair.target.receive([torch.empty(1)], 0)
    with pytest.raises(PeerLost):
        pair.source.send(torch.ones(1), 0)


def test_closing_the_target_wakes_the_sender(pair: Pair) -> None:
    sending = pair.source.send(torch.ones(HUGE), 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sending.wait)
        pair.target.close()
        with pytest.raises(PeerLost, match="0>1/activation closed"):
            waiting.result(20)
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        pair.source.send(torch.ones(1), 0)


@pytest.mark.parametrize("count", [1, LARGE], ids=["read by the caller", "read by the thread"])
def test_closing_the_target_wakes_its_waiting_thread_and_ends_the_threads(count: int) -> None:
    before = threading.active_count()
    pair = connected()
    receive = pair.target.receive([torch.empty(count)], 0)[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive.wait)
        pair.sending.sendall(HEADER.pack(0, 4 * count))
        until(lambda: nothing_unread(pair.receiving))  # a thread waits for the rest
        pair.target.close()
        with pytest.raises(PeerLost, match="0>1/activation"):
            waiting.result(20)
    pair.source.close()
    assert threading.active_count() == before
    assert pair.sending.fileno() == pair.receiving.fileno() == -1


def test_a_failure_of_the_links_thread_wakes_a_waiting_one(pair: Pair) -> None:
    pair.target.receive([torch.empty(LARGE)], 0)
    pair.sending.sendall(HEADER.pack(0, 4 * LARGE))
    until(lambda: nothing_unread(pair.receiving))  # the link's thread waits for the rest
    (small,) = pair.target.receive([torch.empty(1)], 1)
    with ThreadPoolExecutor(1) as pool, closing(pair):
        waiting = pool.submit(small.wait)
        until(lambda: pair.target._waiting == 1)
        pair.source.close()
        with pytest.raises(PeerLost, match="0>1/activation closed"):
            waiting.result(20)


def test_bytes_changed_on_the_wire_are_noticed(pair: Pair) -> None:
    record = b"\x17\x03\x03\x00\x20" + bytes(32)  # encrypted with no key
    os.write(pair.sending.fileno(), record)
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        received(pair.target, 1)
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        until(lambda: pair.source.send(torch.ones(1), 0) is None)  # the other end reports it
