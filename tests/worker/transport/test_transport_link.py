"""The properties that all links have in common; and the links in memory of these tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import PeerLost
from pipeworker.worker.transport.links.link import Lane, Link, Pending, TwoLanes
from support.devices.mapped import HostTensors, MappedDevice
from support.devices.nccl import NcclDevice
from support.in_process.transport import FORTH, MemoryLink, StrictLane, connect_all, two_lanes
from support.slow import mostly_slow

Ends = tuple[Link, Link]


def in_memory(make: Callable[[], Link]) -> Callable[[], Ends]:
    def ends() -> Ends:
        link = make()
        return link, link

    return ends


def connected(backend: str) -> Callable[[], Ends]:
    def ends() -> Ends:
        source, target = connect_all((FORTH,), 2, backend)
        return source[FORTH], target[FORTH]

    return ends


def of_devices() -> Ends:
    devices = [MappedDevice().start(), MappedDevice(["compute", "receives"]).start()]
    source, target = connect_all((FORTH,), 2, devices=devices)
    return HostTensors(source[FORTH], devices[0]), HostTensors(target[FORTH], devices[1])


def of_devices_by_nccl() -> Ends:
    devices = [NcclDevice().start(), NcclDevice(["compute", "nccl"]).start()]
    source, target = connect_all((FORTH,), 2, devices=devices, apart=True)
    return HostTensors(source[FORTH], devices[0]), HostTensors(target[FORTH], devices[1])


LINKS: dict[str, Callable[[], Ends]] = {
    "memory": in_memory(MemoryLink),
    "two lanes in memory": in_memory(lambda: TwoLanes(MemoryLink(), MemoryLink())),
    "a strict bulk lane": in_memory(two_lanes),
    "shared memory": connected("auto"),
    "gloo": connected("gloo"),
    "tls": connected("tls"),
    "devices": of_devices,
    "devices by nccl": of_devices_by_nccl,
}


@pytest.fixture(params=LINKS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = LINKS[request.param]()
    yield made
    for link in made:
        if isinstance(link, HostTensors):
            link.stop()


@pytest.fixture(params=["control", "bulk"])
def lanes(request: pytest.FixtureRequest, ends: Ends) -> tuple[Lane, Lane]:
    """Both ends of one lane."""
    source, target = ends
    return getattr(source, request.param), getattr(target, request.param)


def number(value: float = 0.0) -> torch.Tensor:
    return torch.tensor([value])


def buffer(lane: Lane, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return lane.allocate(4 * count)[: 4 * count].view(torch.float32).view(shape)


def test_lanes_are_the_same_objects_each_time(ends: Ends) -> None:
    """A channel compares them to find whether they are one."""
    for link in ends:
        assert link.control is link.control
        assert link.bulk is link.bulk
        for lane in (link.control, link.bulk):
            assert lane.device == torch.device("cpu")
            assert lane.allocate(100).numel() >= 100
            assert lane.allocate(100).dtype is torch.uint8
    one = [link.control is link.bulk for link in ends]
    assert one[0] is one[1]


@pytest.mark.parametrize(
    "dtype",
    mostly_slow([torch.bool, torch.int64, torch.bfloat16, torch.float64, torch.complex64], 2),
)
def test_every_bit_arrives(lanes: tuple[Lane, Lane], dtype: torch.dtype) -> None:
    source, target = lanes
    sent = torch.arange(6).reshape(2, 3).to(dtype)
    got = torch.empty(2, 3, dtype=dtype)
    receive = target.receive([got], 0)[0]
    source.send(sent, 0).wait()
    receive.wait()
    assert torch.equal(got, sent)


@pytest.mark.parametrize("first", ["send", "receive"])
def test_messages_of_a_tag_arrive_in_order(lanes: tuple[Lane, Lane], first: str) -> None:
    source, target = lanes
    got = [buffer(target, 7) for _ in range(5)]
    pending: list[Pending] = []
    if first == "receive":
        pending += target.receive(got, 0)
    pending += [source.send(torch.full((7,), float(n)), 0) for n in range(5)]
    if first == "send":
        pending += target.receive(got, 0)
    for one in pending:
        one.wait()
    assert [tensor[6].item() for tensor in got] == [0, 1, 2, 3, 4]


def test_tags_of_the_control_lane_are_separate_queues(ends: Ends) -> None:
    """The bulk lane has one queue."""
    source, target = (link.control for link in ends)
    messages = ((2, 1.0), (1, 2.0), (2, 3.0))
    sends = [source.send(torch.full((5,), value), tag) for tag, value in messages]
    got = [torch.empty(5) for _ in range(3)]
    for tensor, tag in zip(got, (1, 2, 2), strict=True):
        target.receive([tensor], tag)[0].wait()
    for pending in sends:
        pending.wait()
    assert [tensor[0].item() for tensor in got] == [2.0, 1.0, 3.0]


def test_large_tensors_and_single_elements_arrive(lanes: tuple[Lane, Lane]) -> None:
    source, target = lanes
    for shape in ((1 << 20,), (1,), (300, 500)):
        got, sent = buffer(target, *shape), torch.randn(shape)
        receive = target.receive([got], 0)[0]
        source.send(sent, 0).wait()
        receive.wait()
        assert torch.equal(got, sent)


def test_a_posted_receive_is_filled_from_another_thread(lanes: tuple[Lane, Lane]) -> None:
    source, target = lanes
    got = number()
    pending = target.receive([got], 0)[0]
    thread = threading.Thread(target=lambda: source.send(number(7.0), 0).wait())
    thread.start()
    pending.wait()
    thread.join()
    assert got.item() == 7.0


def test_hundreds_of_messages_may_be_under_way(lanes: tuple[Lane, Lane]) -> None:
    source, target = lanes
    got = [buffer(target, 3) for _ in range(256)]
    receives = target.receive(got, 0)
    sends = [source.send(torch.full((3,), float(n)), 0) for n in range(256)]
    for pending in [*sends, *receives]:
        pending.wait()
    assert [tensor[2].item() for tensor in got] == list(range(256))


def test_the_lanes_do_not_mix_messages(ends: Ends) -> None:
    """Each has tags of its own, as in channels."""
    source, target = ends
    bulk, control = number(), number()
    pending = [*target.bulk.receive([bulk], 0), *target.control.receive([control], 1)]
    pending += [source.control.send(number(1.0), 1), source.bulk.send(number(2.0), 0)]
    for one in pending:
        one.wait()
    assert (control.item(), bulk.item()) == (1.0, 2.0)


def test_a_link_may_be_closed_with_a_posted_control_receive(ends: Ends) -> None:
    source, target = ends
    target.control.receive([number()], 1)
    target.close()
    if source is not target:
        source.close()


# In memory.


@given(st.permutations(["send"] * 3 + ["receive"] * 3), st.integers(0, 2), st.booleans())
def test_messages_arrive_in_any_order_of_sends_and_receives(
    order: list[str], tag: int, strict: bool
) -> None:
    lane = StrictLane() if strict else MemoryLink()
    targets: list[torch.Tensor] = []
    pending: list[Pending] = []
    sent = 0
    for word in order:
        if word == "send":
            sent += 1
            pending.append(lane.send(number(float(sent)), tag))
        else:
            targets.append(number())
            pending.append(lane.receive([targets[-1]], tag)[0])
    for item in pending:
        item.wait()
    assert [target.item() for target in targets] == [1, 2, 3]
    assert sum(lane.sent.values()) == 3


def test_a_longer_buffer_receives_a_shorter_message() -> None:
    link = MemoryLink()
    target = torch.zeros(4)
    link.receive([target], 0)
    link.send(torch.ones(2), 0).wait()
    assert target.tolist() == [1, 1, 0, 0]


def test_a_wait_without_a_peer_raises_peer_lost() -> None:
    link = MemoryLink(limit=0.01)
    with pytest.raises(PeerLost, match=r"within 0\.01 s"):
        link.send(number(), 0).wait()
    with pytest.raises(PeerLost, match=r"within 0\.01 s"):
        link.receive([number()], 1)[0].wait()


def test_a_strict_lane_fails_where_nccl_would_hang() -> None:
    lane = StrictLane(limit=0.01)
    (pending,) = lane.receive([number()], 0)
    with pytest.raises(AssertionError, match="nothing was ever sent"):
        pending.wait()
    with pytest.raises(AssertionError, match="closed with 1 receives"):
        lane.close()
    with pytest.raises(AssertionError, match="other sizes"):
        lane.send(torch.ones(2), 0)


def test_closing_two_lanes_closes_both_connections() -> None:
    host, bulk = mock.Mock(), mock.Mock()
    bulk.close.side_effect = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        TwoLanes(host, bulk).close()
    host.close.assert_called_once_with()
