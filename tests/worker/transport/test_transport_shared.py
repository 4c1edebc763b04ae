"""Links through shared memory; what all links do is in test_transport_distributed.py."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from pipeworker.errors import PeerLost
from pipeworker.worker.transport import shared
from pipeworker.worker.transport.shared import ReceivingLink, SendingLink
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
