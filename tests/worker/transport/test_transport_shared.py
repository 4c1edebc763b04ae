"""Links through shared memory; test_transport_link.py tests all links."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import random
import socket
import struct
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from pipeworker.errors import PeerLost, PipeworkerError, ProtocolError
from pipeworker.worker.transport.handshake import RendezvousPoint
from pipeworker.worker.transport.links import unix
from pipeworker.worker.transport.links.arena import Arena
from pipeworker.worker.transport.links.link import COMPLETE
from pipeworker.worker.transport.links.shared import POSTS_AT_ONCE, ReceivingLink, SendingLink
from support.in_process.transport import FORTH, LocalStore, connect_all
from support.processes.memory import shared_memory
from support.real_jobs.jobs import until
from support.slow import slow

Pair = tuple[SendingLink, ReceivingLink]
Sockets = tuple[socket.socket, socket.socket]
POST, NOTICE = struct.Struct("<4q"), struct.Struct("<q")  # as they are on the wire


@pytest.fixture
def pair() -> Iterator[Pair]:
    source, target = connect_all((FORTH,), 2)
    sending, receiving = source[FORTH], target[FORTH]
    assert isinstance(sending, SendingLink)
    assert isinstance(receiving, ReceivingLink)
    yield sending, receiving
    sending.close()
    receiving.close()


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    """A link's socket, and the test's own at the other end."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.settimeout(20)
    with own, other:
        yield own, other


def descriptors() -> int:
    gc.collect()  # links of earlier tests
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings() -> Counter[str]:
    """Return how often this process maps each arena, by its inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return Counter(line.split()[4] for line in lines if "memfd:pipeworker" in line)


def buffer(link: ReceivingLink, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return link.allocate(4 * count)[: 4 * count].view(torch.float32).view(shape)


def share_arena(receiver: socket.socket, size: int = 4096, *, length: int = 0) -> mmap.mmap:
    """Announce an arena of `size` bytes, or that claims another length, as a receiver does."""
    descriptor = os.memfd_create("pipeworker", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    socket.send_fds(receiver, [POST.pack(-1, -1, 0, length or size)], [descriptor])
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return memory


def test_a_posted_buffer_is_written_in_place(pair: Pair) -> None:
    source, target = pair
    for step in range(3):
        got = buffer(target, 300, 500)
        receive = target.receive([got], 0)[0]
        sent = torch.randn(300, 500)
        source.send(sent, 0).wait()
        receive.wait()
        assert torch.equal(got, sent), step


def test_a_send_without_a_posted_buffer_is_queued_and_does_not_block(pair: Pair) -> None:
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
    source.send(torch.ones(3), 1)  # later sends are delivered as well
    got = torch.zeros(3)
    target.receive([got], 1)[0].wait()
    assert got.tolist() == [1.0] * 3


def test_sends_keep_their_order_while_buffers_are_posted(pair: Pair) -> None:
    sender, receiver = pair
    received: list[int] = []

    def receive() -> None:
        for _ in range(2000):
            memory = torch.zeros(1, dtype=torch.int64)
            receiver.receive([memory], 0)[0].wait()
            received.append(int(memory))

    thread = threading.Thread(target=receive)
    thread.start()
    sends = [sender.send(torch.tensor([number]), 0) for number in range(2000)]
    thread.join()
    for send in sends:
        send.wait()
    assert received == [*range(2000)]


def test_unused_memory_is_allocated_again(pair: Pair) -> None:
    _, target = pair
    first = target.allocate(10_000)
    address = first.data_ptr()
    assert target.allocate(10_000).data_ptr() != address
    view = first[5:]
    del first
    assert target.allocate(10_000).data_ptr() != address
    del view
    assert target.allocate(10_100).data_ptr() == address


def test_gaps_between_used_ranges_are_allocated_again(pair: Pair) -> None:
    _, target = pair
    count = 2000
    used = [target.allocate(4000) for _ in range(count)]
    addresses = {block.data_ptr() for block in used}
    assert len(addresses) == count
    del used[::2]
    later = [target.allocate(4000) for _ in range(count // 2)]
    assert {block.data_ptr() for block in later} <= addresses  # no new memory


def test_the_cost_of_an_allocation_does_not_depend_on_the_number_of_used_ranges(pair: Pair) -> None:
    _, target = pair

    def calls() -> int:
        count = 0

        def note(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(note)
        try:
            used.append(target.allocate(4000))
        finally:
            sys.setprofile(None)
        return count

    used = [target.allocate(4000) for _ in range(10)]
    few = calls()
    used += [target.allocate(4000) for _ in range(4000)]
    del used[::2]
    used.append(target.allocate(4000))  # frees the ranges just dropped
    assert 0 < calls() < few + 10


def test_memory_returns_to_the_system_when_sizes_change(pair: Pair) -> None:
    source, target = pair
    chance = random.Random(1)
    gc.collect()
    before, arenas_before = shared_memory(), mappings()
    most = 0
    for step in range(15):
        buffers = []
        for _ in range(6):
            got = buffer(target, chance.randint(10_000, 500_000))
            receive = target.receive([got], 0)[0]
            source.send(torch.full_like(got, float(step)), 0).wait()
            receive.wait()
            buffers.append(got)
        most = max(most, sum(b.nbytes for b in buffers))
        assert all(bool((b == step).all()) for b in buffers)
        del got, receive
        assert most // 3 < shared_memory() - before < 1.2 * most
    arenas = mappings() - arenas_before
    assert 0 < len(arenas) < 4
    assert {*arenas.values()} == {2}  # each is mapped by both ends, which are in this process


def test_gaps_between_used_ranges_return_to_the_system(pair: Pair) -> None:
    _, target = pair
    gc.collect()
    before = shared_memory()
    used = [buffer(target, 25_000).fill_(number) for number in range(100)]
    del used[1::2]
    used += [buffer(target, 30_000).fill_(number) for number in range(100, 140)]  # fit in no gap
    assert all(bool((b == b[0]).all()) for b in used)
    assert [int(b[0]) for b in used] == [*range(0, 100, 2), *range(100, 140)]
    most = 100 * 100_000
    assert most * 0.9 < shared_memory() - before < 1.2 * most


@slow
def test_memory_has_no_name_and_few_descriptors(pair: Pair) -> None:
    source, target = pair
    buffers = []
    before = descriptors()
    for size in range(1, 200):
        buffers.append(buffer(target, 5000 * size))
        receive = target.receive([buffers[-1]], 0)[0]
        source.send(torch.full((5000 * size,), float(size)), 0).wait()
        receive.wait()
    assert [b[-1].item() for b in buffers] == list(range(1, 200))  # none overlaps another
    assert descriptors() - before < 2 * 12  # both ends are in this process
    assert not [path for path in Path("/dev/shm").iterdir() if "pipeworker" in path.name]


def test_other_memory_receives_only_small_messages(pair: Pair) -> None:
    with pytest.raises(ValueError, match="need memory from allocate"):
        pair[1].receive([torch.empty(10_000)], 0)


def test_a_receiver_that_is_gone_fails_sends(pair: Pair) -> None:
    source, target = pair
    pending = source.send(torch.ones(3), 0)
    target.close()
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
        [(0, 0, 0, -(1 << 62)), (0, 0, 0, 4)],  # given up, and posted nonetheless
        [(0, 7, 0, 4)],
        [(0, -2, 0, 4)],
        [(0, -1, 0, 1 << 20)],
        [(0, -1, 0, -1)],
    ],
)
@pytest.mark.parametrize("queued", [True, False], ids=["by the thread", "by the caller"])
def test_the_sender_writes_only_into_the_arenas_of_the_receiver(
    sockets: Sockets, posts: list[tuple[int, ...]], queued: bool
) -> None:
    own, receiver = sockets
    source = SendingLink(FORTH, own)
    memory = share_arena(receiver, 1 << 20)
    pending = [source.send(torch.ones(3), 2)] if queued else []
    receiver.send(b"".join(POST.pack(*post) for post in posts))
    with pytest.raises(ProtocolError, match="0>1/activation: the receiver posted"):
        (pending or [source.send(torch.ones(3), 0)])[0].wait()
    assert not any(memory[:])
    source.close()


def test_posted_memory_stays_mapped_though_the_receiver_gives_it_up(sockets: Sockets) -> None:
    own, receiver = sockets
    source = SendingLink(FORTH, own)
    before = mappings()
    memory = share_arena(receiver)
    posts = ((0, 0, 0, 4), (0, 0, 0, -1), (0, -1, 0, 4))
    receiver.send(b"".join(POST.pack(*post) for post in posts))
    for number in range(2):
        assert source.send(torch.full((1,), 1.5 + number), 0) is COMPLETE
    assert struct.unpack_from("<f", memory) == (1.5,)
    assert receiver.recv(100) == NOTICE.pack(0)
    assert receiver.recv(100) == NOTICE.pack(0) + struct.pack("<f", 2.5)
    assert [*(mappings() - before).values()] == [1]  # only the test's own


@pytest.mark.parametrize("length", [4096, 0, -1, 1 << 40])
@pytest.mark.parametrize("sealed", [True, False])
def test_the_sender_maps_no_memory_that_may_shrink(
    sockets: Sockets, length: int, sealed: bool
) -> None:
    own, receiver = sockets
    source = SendingLink(FORTH, own)
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    if sealed:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    socket.send_fds(receiver, [POST.pack(-1, -1, 0, length)], [descriptor])
    os.close(descriptor)
    before = descriptors()
    receiver.send(POST.pack(0, -1, 0, 12))
    if sealed and 0 <= length <= 4096:
        assert source.send(torch.ones(3), 0) is COMPLETE
        return
    with pytest.raises(ProtocolError, match="the receiver posted memory"):
        source.send(torch.ones(3), 0)
    assert descriptors() == before


def test_the_sender_reports_that_it_lacks_memory_for_every_send(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later posts, which refer to the arena that was not mapped, are no error of the receiver."""
    own, receiver = sockets
    source = SendingLink(FORTH, own)
    pending = source.send(torch.ones(3), 0)
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    socket.send_fds(receiver, [POST.pack(-1, -1, 0, 4096)], [descriptor])
    os.close(descriptor)
    text = "0>1/activation: no shared memory: Cannot allocate memory; free memory"
    with pytest.raises(PipeworkerError, match=text):
        pending.wait()
    receiver.send(POST.pack(1, 0, 0, 12))
    with pytest.raises(PipeworkerError, match=text):
        source.send(torch.ones(3), 1)
    source.close()


def test_the_sender_maps_no_file(sockets: Sockets) -> None:
    own, receiver = sockets
    source = SendingLink(FORTH, own)
    # It has no seals on any host; a file in a tmpfs, as /tmp may be, has those of a memory.
    with Path("/proc/self/status").open("rb") as file:
        socket.send_fds(receiver, [POST.pack(-1, -1, 0, 4096)], [file.fileno()])
    with pytest.raises(ProtocolError, match=r"the receiver posted memory: .*Invalid argument"):
        source.send(torch.ones(3), 0)


@pytest.mark.parametrize(
    ("tag", "count"), [(0, 13), (0, 32 << 10), (1, 12), (-1, 0), (2, 1)], ids=str
)
def test_the_receiver_accepts_no_more_than_it_has_posted(
    sockets: Sockets, tag: int, count: int
) -> None:
    own, sender = sockets
    target = ReceivingLink(FORTH, own)
    got = torch.zeros(8)
    pending = target.receive([got[:3]], 0)
    target.receive([buffer(target, 10_000)], 2)
    sender.send(NOTICE.pack(tag) + b"\1" * count)
    with pytest.raises(ProtocolError, match="bytes for which no buffer was posted"):
        pending[0].wait()
    assert not got.any()


def test_a_record_that_is_too_short_is_an_error(sockets: Sockets) -> None:
    own, other = sockets
    target = ReceivingLink(FORTH, own)
    pending = target.receive([torch.zeros(3)], 0)
    assert other.recv(100) == POST.pack(0, -1, 0, 12)
    other.send(b"short")
    with pytest.raises(ProtocolError, match="received 5 bytes for which no buffer was posted"):
        pending[0].wait()
    source = SendingLink(FORTH, own)
    other.send(POST.pack(0, -1, 0, 12))
    other.send(b"short")
    source.send(torch.ones(3), 0).wait()  # the valid record comes first
    with pytest.raises(ProtocolError, match="the receiver posted 5 bytes"):
        source.send(torch.ones(3), 0)


def test_close_ends_the_thread_and_closes_the_socket(sockets: Sockets) -> None:
    own, other = sockets
    before = threading.active_count()
    source, target = SendingLink(FORTH, own), ReceivingLink(FORTH, other)
    assert threading.active_count() == before + 1  # in the middle of a step it may be refused
    pending = source.send(torch.ones(3), 0)  # no buffer is ever posted
    assert threading.active_count() == before + 1
    source.close()
    assert threading.active_count() == before
    with pytest.raises(PeerLost):
        pending.wait()
    target.close()
    assert own.fileno() == other.fileno() == -1


def test_a_delivered_tensor_is_dropped_before_it_is_waited_for(pair: Pair) -> None:
    source, target = pair
    tensor = torch.ones(3)
    alive = weakref.ref(tensor)
    pending = source.send(tensor, 0)  # no buffer is posted yet
    del tensor
    assert alive() is not None
    got = buffer(target, 3)
    target.receive([got], 0)[0].wait()
    until(lambda: alive() is None)
    pending.wait()


def test_the_time_limit_of_connecting_is_none_of_later_sends() -> None:
    store, deadline = LocalStore(), time.monotonic() + 20
    with ThreadPoolExecutor() as pool:
        points = [RendezvousPoint(store.store(), "link", deadline) for _ in range(2)]
        ends = [
            pool.submit(unix.connect_unix, FORTH, bytes(32), point, sends=sends)
            for point, sends in zip(points, (True, False), strict=True)
        ]
        for end in ends:
            with end.result() as connection:
                limit = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16)
                assert (limit, connection.gettimeout()) == (bytes(16), None)


def test_processes_that_cannot_share_memory_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    own = unix.host_identity()
    assert unix.host_identity() == own
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert unix.host_identity() != own


def test_buffers_posted_together_are_filled_in_order(pair: Pair) -> None:
    source, target = pair
    buffers = [buffer(target, 3) for _ in range(3 * POSTS_AT_ONCE + 1)]
    pending = target.receive(buffers, 0)
    for number in range(len(buffers)):
        source.send(torch.full((3,), float(number)), 0).wait()
    for receive in pending:
        receive.wait()
    assert [b[2].item() for b in buffers] == list(range(len(buffers)))


def test_a_message_is_written_where_the_tensor_begins(pair: Pair) -> None:
    source, target = pair
    memory = target.allocate(64).fill_(7)
    (pending,) = target.receive([memory[20:32].view(torch.float32)], 0)
    source.send(torch.ones(3), 0).wait()
    pending.wait()
    assert memory[20:32].view(torch.float32).tolist() == [1.0] * 3
    assert {*memory[:20].tolist(), *memory[32:].tolist()} == {7}


def test_a_send_whose_buffer_is_posted_passes_a_queued_one_of_another_tag(pair: Pair) -> None:
    source, target = pair
    queued = source.send(torch.ones(3), 0)
    got = [torch.zeros(3), torch.zeros(3)]
    (first,) = target.receive(got[:1], 1)
    until(lambda: source._posts.get(1))  # the thread has read of it, and waits again
    assert source.send(torch.full((3,), 2.0), 1) is COMPLETE
    first.wait()
    (second,) = target.receive(got[1:], 0)
    second.wait()
    queued.wait()
    assert [one.tolist() for one in got] == [[2.0] * 3, [1.0] * 3]


class Pins:
    """The pinned ranges: bytes by address."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def pin(self, address: int, size: int) -> Callable[[], None]:
        self.sizes[address] = size
        return lambda: self.sizes.__delitem__(address)


def test_pinned_memory_is_unpinned_when_its_arena_goes(sockets: Sockets) -> None:
    pins = Pins()
    link = ReceivingLink(FORTH, sockets[0], pins.pin)
    block = link.allocate(100_000)
    (first,) = pins.sizes
    assert pins.sizes[first] >= 100_000
    del block
    larger = link.allocate(3 << 20)
    assert [*pins.sizes] == [larger.data_ptr()]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_device_keeps_the_pages_of_a_cleared_range(pinned: bool) -> None:
    """It would go on using the pages that it had."""
    arena = Arena(0, 100_000, Pins().pin if pinned else None)
    os.close(arena.descriptor)
    arena.use(0, arena.size)[:] = b"\7" * arena.size
    arena.clear(0, arena.size)
    assert arena.resident == (arena.size if pinned else 0)
    assert {*arena.memory[:]} == ({7} if pinned else {0})
