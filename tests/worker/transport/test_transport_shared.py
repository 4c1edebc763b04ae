"""Links through shared memory; what all links do is in test_transport_connect.py."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeworker.errors import PeerLost, ProtocolError
from pipeworker.worker.transport.links import shared
from pipeworker.worker.transport.links.link import COMPLETE
from pipeworker.worker.transport.links.shared import ReceivingLink, SendingLink
from support.jobs import until
from support.memory import shared_memory
from support.transport import FORTH, connect_all


@pytest.fixture
def pair() -> tuple[SendingLink, ReceivingLink]:
    source, target = connect_all((FORTH,), 2)
    sending, receiving = source[FORTH], target[FORTH]
    assert isinstance(sending, SendingLink)
    assert isinstance(receiving, ReceivingLink)
    return sending, receiving


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def buffer(link: ReceivingLink, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return link.allocate(4 * count)[: 4 * count].view(torch.float32).view(shape)


def test_a_posted_buffer_is_written_in_place(pair: tuple[SendingLink, ReceivingLink]) -> None:
    source, target = pair
    for step in range(3):
        got = buffer(target, 300, 500)
        receiving = target.receive([got], 0)[0]
        sent = torch.randn(300, 500)
        source.send(sent, 0).wait()
        receiving.wait()
        assert torch.equal(got, sent), step


def test_a_send_before_its_buffer_waits_and_the_caller_does_not(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    source, target = pair
    sends = [source.send(torch.full((20_000,), float(n)), 0) for n in range(5)]
    waiting = threading.Thread(target=sends[-1].wait)
    waiting.start()
    for n in range(5):
        got = buffer(target, 20_000)
        target.receive([got], 0)[0].wait()
        assert torch.unique(got).tolist() == [n]
    waiting.join(20)
    assert not waiting.is_alive()
    source.send(torch.ones(3), 1)  # and the next ones are delivered again
    got = torch.zeros(3)
    target.receive([got], 1)[0].wait()
    assert got.tolist() == [1.0] * 3


def test_memory_nobody_uses_is_given_out_again(pair: tuple[SendingLink, ReceivingLink]) -> None:
    _, target = pair
    first = target.allocate(10_000)
    address = first.data_ptr()
    assert target.allocate(10_000).data_ptr() != address
    kept = first[5:]
    del first
    assert target.allocate(10_000).data_ptr() != address
    del kept
    assert target.allocate(10_100).data_ptr() == address


def test_ranges_between_what_is_in_use_are_given_out_again(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    _, target = pair
    count = 2000
    held = [target.allocate(4000) for _ in range(count)]
    addresses = {block.data_ptr() for block in held}
    assert len(addresses) == count
    del held[::2]
    again = [target.allocate(4000) for _ in range(count // 2)]
    assert {block.data_ptr() for block in again} <= addresses  # nothing new was made


def test_a_range_is_found_in_as_few_calls_however_many_are_in_use(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    _, target = pair

    def calls() -> int:
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            held.append(target.allocate(4000))
        finally:
            sys.setprofile(None)
        return count

    held = [target.allocate(4000) for _ in range(10)]
    few = calls()
    held += [target.allocate(4000) for _ in range(4000)]
    del held[::2]
    held.append(target.allocate(4000))  # notes what is free again
    assert 0 < calls() < few + 10


def test_memory_goes_back_to_the_system_when_sizes_change(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    source, target = pair
    chance = random.Random(1)
    gc.collect()
    before = shared_memory()
    most = 0
    for step in range(40):
        buffers = []
        for _ in range(6):
            got = buffer(target, chance.randint(10_000, 500_000))
            receiving = target.receive([got], 0)[0]
            source.send(torch.full_like(got, float(step)), 0).wait()
            receiving.wait()
            buffers.append(got)
        most = max(most, sum(b.nbytes for b in buffers))
        assert all(bool((b == step).all()) for b in buffers)
        del got, receiving
        assert most // 3 < shared_memory() - before < 1.2 * most
    assert len(target._arenas) == len(source._arenas) < 4


def test_holes_between_what_is_in_use_go_back_to_the_system(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    _, target = pair
    gc.collect()
    before = shared_memory()
    held = [buffer(target, 25_000).fill_(number) for number in range(100)]
    del held[1::2]
    held += [buffer(target, 30_000).fill_(number) for number in range(100, 140)]  # fit in no hole
    assert all(bool((b == b[0]).all()) for b in held)
    assert [int(b[0]) for b in held] == [*range(0, 100, 2), *range(100, 140)]
    most = 100 * 100_000
    assert most * 0.9 < shared_memory() - before < 1.2 * most


def test_memory_has_no_name_and_few_descriptors(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    source, target = pair
    buffers = []
    before = descriptors()
    for size in range(1, 200):
        buffers.append(buffer(target, 5000 * size))
        receiving = target.receive([buffers[-1]], 0)[0]
        source.send(torch.full((5000 * size,), float(size)), 0).wait()
        receiving.wait()
    assert [b[-1].item() for b in buffers] == list(range(1, 200))  # none overlaps another
    assert descriptors() - before < 2 * 12  # both ends are in this process
    assert not [path for path in Path("/dev/shm").iterdir() if "pipeworker" in path.name]


def test_other_memory_takes_small_messages_only(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    with pytest.raises(ValueError, match="need memory from allocate"):
        pair[1].receive([torch.empty(10_000)], 0)


def test_the_other_end_gone(pair: tuple[SendingLink, ReceivingLink]) -> None:
    source, target = pair
    pending = source.send(torch.ones(3), 0)
    target._socket.close()
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        pending.wait()
    with pytest.raises(PeerLost, match="0>1/activation closed"):
        source.send(torch.ones(3), 0).wait()


@pytest.mark.parametrize(
    "posts",
    [
        [(0, 0, 0, 2 << 20)],  # more than the arena has
        [(0, 0, -64, 64)],
        [(0, 0, 1 << 62, 64)],
        [(0, 0, 0, -(1 << 62)), (0, 0, 0, 4)],  # forgotten, and posted nonetheless
        [(0, 7, 0, 4)],
        [(0, -2, 0, 4)],
        [(0, -1, 0, 1 << 20)],
        [(0, -1, 0, -1)],
    ],
)
@pytest.mark.parametrize("waits", [True, False], ids=["by the thread", "by who sends"])
def test_the_sender_writes_nowhere_else_than_into_the_memory_it_was_given(
    pair: tuple[SendingLink, ReceivingLink], posts: list[tuple[int, ...]], waits: bool
) -> None:
    source, target = pair
    target.receive([buffer(target, 10_000)], 1)  # there is an arena
    source.send(torch.ones(10_000), 1).wait()
    pending = [source.send(torch.ones(3), 2)] if waits else []
    target._socket.send(b"".join(shared._POST.pack(*post) for post in posts))
    with pytest.raises(ProtocolError, match="0>1/activation: the receiver posted"):
        (pending or [source.send(torch.ones(3), 0)])[0].wait()


def test_memory_that_is_posted_stays_though_the_receiver_forgets_it(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    source, target = pair
    target.receive([buffer(target, 10_000)], 1)
    source.send(torch.ones(10_000), 1).wait()
    for post in ((0, 0, 0, 4), (0, 0, 0, -1), (0, -1, 0, 4)):
        target._socket.send(shared._POST.pack(*post))
    (memory, _), gone = source._arenas[0], threading.Event()
    weakref.finalize(memory, gone.set)
    del memory
    while len(source._posts.get(0, ())) < 2:
        heard = source._hear(0)
        assert heard
        source._register(*heard)
    assert not source._arenas
    assert not gone.is_set()
    for _ in range(2):
        assert source.send(torch.ones(1), 0) is COMPLETE
    assert gone.is_set()


@pytest.mark.parametrize("length", [4096, 0, -1, 1 << 40])
@pytest.mark.parametrize("sealed", [True, False])
def test_the_sender_maps_no_memory_that_can_be_made_smaller(
    pair: tuple[SendingLink, ReceivingLink], length: int, sealed: bool
) -> None:
    source, target = pair
    handle = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, 4096)
    if sealed:
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    socket.send_fds(target._socket, [shared._POST.pack(-1, -1, 0, length)], [handle])
    os.close(handle)
    before = descriptors()
    target._socket.send(shared._POST.pack(0, -1, 0, 12))
    if sealed and 0 <= length <= 4096:
        assert source.send(torch.ones(3), 0) is COMPLETE
        return
    with pytest.raises(ProtocolError, match="the receiver posted memory"):
        source.send(torch.ones(3), 0)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("tag", "count"), [(0, 13), (0, 32 << 10), (1, 12), (-1, 0), (2, 1)], ids=str
)
def test_the_receiver_takes_no_more_than_it_has_posted(
    pair: tuple[SendingLink, ReceivingLink], tag: int, count: int
) -> None:
    source, target = pair
    got = torch.zeros(8)
    pending = target.receive([got[:3]], 0)
    target.receive([buffer(target, 10_000)], 2)
    source._socket.send(shared._DONE.pack(tag) + b"\1" * count)
    with pytest.raises(ProtocolError, match="bytes that nothing was posted for"):
        pending[0].wait()
    assert not got.any()


def test_what_is_too_short_for_a_message_is_none(pair: tuple[SendingLink, ReceivingLink]) -> None:
    source, target = pair
    pending = target.receive([torch.zeros(3)], 0)
    source._socket.send(b"short")
    with pytest.raises(ProtocolError, match="5 bytes that nothing was posted for"):
        pending[0].wait()
    target._socket.send(b"short")
    source.send(torch.ones(3), 0).wait()  # what was posted before comes first
    with pytest.raises(ProtocolError, match="the receiver posted 5 bytes"):
        source.send(torch.ones(3), 0)


def test_a_close_ends_the_thread_that_waits_to_deliver(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    source, target = pair
    before = threading.active_count()
    pending = source.send(torch.ones(3), 0)  # nothing is posted, nor ever will be
    assert threading.active_count() == before + 1
    source.close()
    assert threading.active_count() == before
    with pytest.raises(PeerLost):
        pending.wait()
    target.close()
    assert source._socket.fileno() == target._socket.fileno() == -1


def test_a_delivered_tensor_is_let_go_before_anyone_waits(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    source, target = pair
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    pending = source.send(tensor, 0)  # nothing is posted yet
    del tensor
    assert alive() is not None
    got = buffer(target, 3)
    target.receive([got], 0)[0].wait()
    until(lambda: alive() is None)
    pending.wait()


def test_hosts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared.host_identity() == shared.host_identity()
    monkeypatch.setattr("sys.platform", "darwin")
    assert shared.host_identity() != shared.host_identity()


def test_buffers_posted_in_one_go_are_filled_in_order(
    pair: tuple[SendingLink, ReceivingLink],
) -> None:
    source, target = pair
    buffers = [buffer(target, 3) for _ in range(3 * shared._POSTS_AT_ONCE + 1)]
    receiving = target.receive(buffers, 0)
    for number in range(len(buffers)):
        source.send(torch.full((3,), float(number)), 0).wait()
    for pending in receiving:
        pending.wait()
    assert [b[2].item() for b in buffers] == list(range(len(buffers)))


def test_pinned_memory_keeps_its_pages_until_it_is_let_go() -> None:
    pins: dict[int, int] = {}

    def pin(address: int, size: int) -> Callable[[], None]:
        pins[address] = size
        return lambda: pins.__delitem__(address)

    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = ReceivingLink(FORTH, here, pin)
    block = link.allocate(100_000).fill_(7)
    (first,) = pins
    assert pins[first] >= 100_000
    link._arenas[first].clear(first, pins[first])  # as when it is free
    assert int(block.min()) == 7  # a device would go on with the pages that it had
    del block
    larger = link.allocate(3 << 20)
    assert [*pins] == [larger.data_ptr()]
    link.close()
    there.close()
