"""Links over TLS; what all links do is in test_transport_link.py."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError
from pipeworker.worker.transport.links import tls
from pipeworker.worker.transport.links.link import COMPLETE, Pending
from pipeworker.worker.transport.links.tls import ReceivingLink, SendingLink
from support.jobs import until
from support.transport import FORTH, connect_all

Pair = tuple[SendingLink, ReceivingLink]
LARGE = tls._LARGE_BYTES // 4
HUGE = 16 << 20  # elements: more than sockets hold


def made() -> Pair:
    source, target = (links[FORTH] for links in connect_all((FORTH,), 2, "tls"))
    assert isinstance(source, SendingLink)
    assert isinstance(target, ReceivingLink)
    return source, target


@pytest.fixture
def pair() -> Iterator[Pair]:
    source, target = made()
    yield source, target
    source.close()
    target.close()


def received(target: ReceivingLink, count: int, tag: int = 0) -> torch.Tensor:
    got = torch.empty(count)
    target.receive([got], tag)[0].wait()
    return got


def test_a_small_send_is_complete_at_once_and_needs_no_thread(pair: Pair) -> None:
    source, target = pair
    before = threading.active_count()
    for count in (1, 4092, 4093, LARGE - 1):
        assert source.send(torch.full((count,), 2.0), 0) is COMPLETE
        assert torch.equal(received(target, count), torch.full((count,), 2.0))
    assert threading.active_count() == before


def test_a_send_that_the_socket_does_not_take_waits_and_the_caller_does_not(pair: Pair) -> None:
    source, target = pair
    tensor = torch.arange(HUGE, dtype=torch.float32)
    alive = weakref.ref(tensor)
    sending = source.send(tensor, 0)
    after = source.send(torch.ones(1), 0)  # keeps its place
    assert sending is not COMPLETE
    assert after is not COMPLETE
    assert torch.equal(received(target, HUGE), tensor)
    assert received(target, 1).item() == 1.0
    del tensor
    until(lambda: alive() is None)  # before anyone waits
    for pending in (sending, after):
        pending.wait()
    assert source.send(torch.ones(1), 0) is COMPLETE


def test_a_large_tensor_arrives_while_nobody_waits(pair: Pair) -> None:
    source, target = pair
    got = [torch.empty(HUGE), torch.empty(1)]
    large, small = target.receive(got, 0)
    source.send(torch.ones(HUGE), 0).wait()
    source.send(torch.ones(1), 0)
    until(lambda: large.done)  # type: ignore[attr-defined]
    small.wait()
    assert got[0].min().item() == got[1].item() == 1.0


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1, 5000, LARGE])), min_size=1, max_size=8
    ),
    st.permutations(range(3)),
    st.integers(0, 8),
)
def test_messages_find_their_tags_whatever_is_posted_when(
    messages: list[tuple[int, int]], order: list[int], ahead: int
) -> None:
    """Some posted before they are sent, the others tag by tag, in any order of tags."""
    if not LASTING:
        LASTING.append(made())
    source, target = LASTING[0]
    waiting: list[tuple[Pending, torch.Tensor, float]] = []

    def post(number: int) -> None:
        tag, count = messages[number]
        got = torch.empty(count)
        waiting.append((target.receive([got], tag)[0], got, float(number)))

    for number in range(len(messages))[:ahead]:
        post(number)
    sending = [
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
    for sent in sending:
        sent.wait()


LASTING: list[Pair] = []
"""One link for all examples."""


@pytest.mark.parametrize("count", [2, 4, 9000])
@pytest.mark.parametrize("first", ["send", "receive"])
def test_another_length_than_was_posted_is_an_error_and_writes_nothing(
    pair: Pair, count: int, first: str
) -> None:
    source, target = pair
    memory = torch.zeros(12)
    if first == "send":
        source.send(torch.ones(count), 7)
        source.send(torch.ones(1), 0)
        received(target, 1)  # what is before it has come

    def receive() -> None:
        (receiving,) = target.receive([memory[4:7]], 7)
        source.send(torch.ones(count), 7)
        receiving.wait()

    words = f"the channel 0>1/activation: {4 * count} bytes came where 12 were expected"
    with pytest.raises(PipeworkerError, match=words) as caught:
        receive()
    assert not isinstance(caught.value, PeerLost)  # no echo: it is the cause
    assert not memory.any()


@pytest.mark.parametrize("count", [-1, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("reads", ["who waits", "the thread"])
def test_a_length_that_cannot_be_is_an_error_and_takes_no_memory(
    pair: Pair, count: int, reads: str
) -> None:
    source, target = pair
    (receiving,) = target.receive([torch.empty(3 if reads == "who waits" else LARGE)], 7)
    source._socket.sendall(tls._HEAD.pack(1, count))
    with pytest.raises(ProtocolError, match=f"0>1/activation: {count} bytes were to come"):
        receiving.wait()


def test_a_close_in_the_middle_of_a_tensor_ends_both_ends(pair: Pair) -> None:
    source, target = pair
    sending = source.send(torch.ones(HUGE), 0)
    source.close()
    with pytest.raises(PeerLost, match="0>1/activation was closed"):
        sending.wait()
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        received(target, HUGE)
    with pytest.raises(PeerLost):
        target.receive([torch.empty(1)], 0)
    with pytest.raises(PeerLost):
        source.send(torch.ones(1), 0)


def test_a_receiver_that_closes_wakes_the_sender(pair: Pair) -> None:
    source, target = pair
    sending = source.send(torch.ones(HUGE), 0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(sending.wait)
        target.close()
        with pytest.raises(PeerLost, match="0>1/activation closed"):
            waiting.result(20)
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        source.send(torch.ones(1), 0)


@pytest.mark.parametrize("count", [1, LARGE], ids=["read by who waits", "read by the thread"])
def test_a_close_wakes_who_waits_and_ends_the_threads(count: int) -> None:
    before = threading.active_count()
    source, target = made()
    receiving = target.receive([torch.empty(count)], 0)[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receiving.wait)
        until(lambda: target._reads)
        target.close()
        with pytest.raises(PeerLost, match="0>1/activation"):
            waiting.result(20)
    source.close()
    assert threading.active_count() == before
    assert source._socket.fileno() == target._socket.fileno() == -1


def test_what_is_changed_on_the_wire_is_noticed(pair: Pair) -> None:
    source, target = pair
    record = b"\x17\x03\x03\x00\x20" + bytes(32)  # that nobody encrypted
    os.write(source._socket.fileno(), record)
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        received(target, 1)
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        until(lambda: source.send(torch.ones(1), 0) is None)  # the other end says so
