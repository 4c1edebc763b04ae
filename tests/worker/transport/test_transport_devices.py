"""Links between devices that map each other's memory or have NCCL: order of work, errors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from pipeworker.errors import PeerLost, UsageError
from pipeworker.host.task_thread import TaskThread
from pipeworker.plan.actions import Edge, Payload
from pipeworker.worker.internals import Store
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.links import nccl, shared
from pipeworker.worker.transport.links.gloo import GroupLink
from pipeworker.worker.transport.links.link import Link, Pending
from pipeworker.worker.transport.links.mapped import ReceivingLane, SendingLane
from pipeworker.worker.transport.links.nccl import NcclLane
from support.devices.device import EAGER, LateDevice
from support.devices.mapped import MappedDevice, between_processes
from support.devices.nccl import LateCommunicators, LateGroup, NcclDevice
from support.in_process.transport import BACK, FORTH, connect_all
from support.real_jobs.jobs import Jobs
from support.slow import slow

MICROBATCHES = 6


@contextmanager
def linked(devices: Sequence[MappedDevice]) -> Iterator[tuple[Link, Link]]:
    """Connect two devices; those with NCCL are on two hosts."""
    with chained(devices) as (ends,):
        yield ends


@contextmanager
def chained(devices: Sequence[MappedDevice]) -> Iterator[list[tuple[Link, Link]]]:
    """Connect each device with the next one."""
    apart = isinstance(devices[0], NcclDevice)
    connected = [
        connect_all((FORTH,), 2, devices=two, apart=apart) for two in itertools.pairwise(devices)
    ]
    try:
        yield [(source[FORTH], target[FORTH]) for source, target in connected]
    finally:
        for links in itertools.chain.from_iterable(connected):
            links[FORTH].close()
        for device in devices:
            device.stop()


class Channel:
    """A channel from one device to another, which doubles what it receives."""

    def __init__(self, ends: tuple[Link, Link], devices: Sequence[MappedDevice]) -> None:
        self._here, self._there = devices
        self.send_thread = TaskThread("send")
        self.sender = Sender(ends[0], None, self.send_thread, accelerator=self._here)
        self.receiver = Receiver(ends[1], 4, accelerator=self._there)

    def begin(self, signature: int = 0, count: int = MICROBATCHES) -> None:
        self.sender.begin(signature)
        self.receiver.begin(signature, range(count))

    def send(self, m: int, value: torch.Tensor) -> None:
        """Send the result of an operation of the device."""
        with self._here.active():
            self.sender.send(m, self._here.put(value) * 1.0)

    def pass_on(self, m: int, other: Channel) -> None:
        """Send what was received over another channel, as it is, and release it."""
        with self._there.active():
            other.sender.send(m, self.receiver.receive(m))
            self.receiver.release(m)

    def step(self, values: Sequence[Any], signature: int = 0) -> list[torch.Tensor]:
        """Send values from the device, the second of a pair from the host; return the results."""
        self.begin(signature, len(values))
        results = []
        for m, value in enumerate(values):
            with self._here.active():
                pair = isinstance(value, tuple)
                made = self._here.put(value[0] if pair else value) * 1.0
                self.sender.send(m, (made, value[1]) if pair else made)
            with self._there.active():
                got = self.receiver.receive(m)
                results.append(got[0] * 2.0 + got[1] if pair else got * 2.0)
                del got
                self.receiver.release(m)
        return results


def values(step: int) -> list[torch.Tensor]:
    return [torch.full((300,), float(100 * step + m)) for m in range(MICROBATCHES)]


def arrives_intact(
    kind: type[MappedDevice], eager: Sequence[str], others: Sequence[str], without: str = ""
) -> bool:
    """Return whether the bytes that arrive are right though neither host waits for its device."""
    devices = [kind(eager, without), kind(others, without)]
    with linked(devices) as ends:
        channel = Channel(ends, devices)
        results = [channel.step(values(0))]
        for device in devices:
            device.drain()  # described frames pass through the host, and would delay the rest
        results += [channel.step(values(step)) for step in range(1, 3)]
        for device in devices:
            device.start()
        read = [[devices[1].read(result) for result in some] for some in results]
        wanted = [[value * 2.0 for value in values(step)] for step in range(3)]
        return all(
            torch.equal(torch.stack(a), torch.stack(b)) for a, b in zip(read, wanted, strict=True)
        )


ENDS = [
    pytest.param(*both, marks=slow if number % 2 else ())
    for number, both in enumerate(zip(EAGER, reversed(EAGER), strict=True))
]
"""By default half of them; the test of each missing wait also has the case that it needs."""


@pytest.mark.parametrize(("eager", "others"), ENDS)
def test_every_bit_arrives_with_any_stream_late(
    eager: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert arrives_intact(MappedDevice, eager, others)


@pytest.mark.parametrize(("eager", "others"), ENDS)
def test_every_bit_arrives_by_nccl_with_any_stream_late(
    eager: tuple[str, ...], others: tuple[str, ...]
) -> None:
    """NCCL's stream is eager at one end and late at the other."""
    own, other = (["nccl" if n == "sends" else n for n in some] for some in (eager, others))
    assert arrives_intact(NcclDevice, own, other)


@pytest.mark.parametrize(
    ("kind", "without", "eager", "others"),
    [
        (MappedDevice, "compute>sends", ("sends",), ()),
        (MappedDevice, "other>compute", (), ("compute",)),  # the buffer is written
        (MappedDevice, "other>sends", ("compute", "sends"), ()),  # the buffer is free
        (MappedDevice, "used by sends", ("compute",), ()),
        (NcclDevice, "compute>nccl", ("nccl",), ()),
        (
            NcclDevice,
            "compute>receives",
            ("compute", "nccl"),
            ("receives", "nccl"),
        ),  # the buffer is free
        (NcclDevice, "receives>nccl", ("compute", "nccl"), ("nccl",)),
        (NcclDevice, "nccl>compute", (), ("compute",)),
    ],
)
def test_each_missing_wait_gives_wrong_bytes(
    kind: type[MappedDevice], without: str, eager: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert not arrives_intact(kind, eager, others, without)
    assert arrives_intact(kind, eager, others)


@pytest.mark.parametrize("kind", [MappedDevice, NcclDevice])
def test_what_a_stage_passes_on_is_sent_before_its_buffer_is_written_again(
    kind: type[MappedDevice],
) -> None:
    """The stage in the middle has no work of its own, and its copies to the next one are late."""
    devices = [kind(EAGER[-1]), kind(["compute", "receives"]), kind(EAGER[-1])]
    with chained(devices) as (first, second):
        one, two = Channel(first, devices[:2]), Channel(second, devices[1:])
        results: list[torch.Tensor] = []
        for step in range(3):
            for channel in (one, two):
                channel.begin()
            for m, value in enumerate(values(step)):
                one.send(m, value)
                one.pass_on(m, two)
                with devices[2].active():
                    results.append(two.receiver.receive(m) * 1.0)
                    two.receiver.release(m)
            for device in devices if step == 0 else ():
                device.drain()
        for device in devices:
            device.start()
        wanted = [value for step in range(3) for value in values(step)]
        for got, value in zip(results, wanted, strict=True):
            assert torch.equal(devices[2].read(got), value)


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


def test_what_a_stage_passes_on_through_the_host_is_sent_before_its_buffer_is_written() -> None:
    """The stage in the middle receives from a device, and its copies to the host are late."""
    refusing = MappedDevice(["compute", "receives"], refuses="it sends through the host")
    devices = [MappedDevice(EAGER[-1]).start(), refusing, MappedDevice(EAGER[-1])]
    with chained(devices) as (first, second):
        one, two = Channel(first, devices[:2]), Channel(second, devices[1:])
        for step in range(3):
            for channel in (one, two):
                channel.begin()
            passed_on = threading.Event()
            two.send_thread.submit(partial(_wait, passed_on))
            for m, value in enumerate(values(step)):
                one.send(m, value)
                one.pass_on(m, two)
            passed_on.set()
            for m, value in enumerate(values(step)):
                with devices[2].active():
                    got = two.receiver.receive(m) * 1.0
                    two.receiver.release(m)
                assert torch.equal(devices[2].read(got), value), (step, m)


@pytest.mark.parametrize(
    ("kind", "without"),
    [
        *((MappedDevice, ""), (MappedDevice, "sends>compute")),
        *((NcclDevice, ""), (NcclDevice, "nccl>compute")),
    ],
)
def test_a_sent_tensor_may_be_changed_after_a_flush(kind: type[MappedDevice], without: str) -> None:
    devices = [kind(["compute"], without), kind()]
    with linked(devices) as ends:
        channel = Channel(ends, devices)
        channel.step(values(0))
        channel.sender.begin(0)
        channel.receiver.begin(0, range(1))
        with devices[0].active():
            sent = devices[0].put(torch.ones(300))
            channel.sender.send(0, sent)
            channel.sender.flush()
            sent.fill_(7.0)
        with devices[1].active():
            got = channel.receiver.receive(0) * 1.0
        for device in devices:
            device.start()
        assert torch.equal(devices[1].read(got), torch.ones(300)) is not bool(without)


@pytest.fixture
def devices() -> list[MappedDevice]:
    return [MappedDevice().start(), MappedDevice(["compute"]).start()]


@pytest.fixture(params=[MappedDevice, NcclDevice])
def pair(request: pytest.FixtureRequest) -> list[MappedDevice]:
    return [request.param().start(), request.param(["compute"]).start()]


@pytest.mark.parametrize("kind", [MappedDevice, NcclDevice])
def test_tensors_of_the_host_pass_between_devices(kind: type[MappedDevice]) -> None:
    devices = [kind(["compute", "sends"]), kind(EAGER[-1])]
    with linked(devices) as ends:
        channel = Channel(ends, devices)
        pairs = [[(value, value + 1.0) for value in values(step)] for step in range(2)]
        results = [channel.step(some) for some in pairs]
        for device in devices:
            device.start()
        for some, got in zip(pairs, results, strict=True):
            for (one, other), result in zip(some, got, strict=True):
                assert torch.equal(devices[1].read(result), one * 2.0 + other)


def test_unexpected_frames_pass_through_the_host(pair: list[MappedDevice]) -> None:
    with linked(pair) as ends:
        channel = Channel(ends, pair)
        first = [torch.ones(4), torch.ones(4)]
        for sent in (first, first, [torch.ones(4), torch.full((2, 3), 5.0)], first):
            read = [pair[1].read(got) for got in channel.step(sent)]
            assert all(torch.equal(a, b * 2.0) for a, b in zip(read, sent, strict=True))


def test_expected_frames_send_one_byte_each_through_the_host(
    pair: list[MappedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(pair) as ends:
        channel = Channel(ends, pair)
        channel.step(values(0))
        sent: list[int] = []
        control: Any = ends[0].control
        plain = type(control).send

        def send(self: Any, tensor: torch.Tensor, tag: int) -> Pending:
            if self is control:
                sent.append(tensor.nbytes)
            pending: Pending = plain(self, tensor, tag)
            return pending

        monkeypatch.setattr(type(control), "send", send)
        channel.step(values(1))
        assert sent == [1] * MICROBATCHES  # the notice


def test_devices_that_cannot_share_log_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [MappedDevice(refuses="peer access is not supported"), MappedDevice()]
    with linked(devices) as ends:
        for device in devices:
            device.start()
        assert isinstance(ends[0], shared.SendingLink)
        assert isinstance(ends[1], shared.ReceivingLink)
        channel = Channel(ends, devices)
        for step in range(2):
            read = [devices[1].read(got) for got in channel.step(values(step))]
            assert all(torch.equal(a, b * 2.0) for a, b in zip(read, values(step), strict=True))
        assert devices[1].pins  # the device copies from shared memory
    message = (
        "0>1/activation: tensors pass through the host, since devices cannot share: peer access"
    )
    assert capsys.readouterr().err.count(message) == 2


def test_a_sender_that_is_gone_fails_receives(devices: list[MappedDevice]) -> None:
    with linked(devices) as (source, target):
        with devices[1].active():
            (pending,) = target.bulk.receive([target.bulk.allocate(8)], 0)
        source.close()
        with devices[1].active(), pytest.raises(PeerLost, match="0>1/activation closed"):
            pending.wait()


def test_freed_buffers_are_given_up_at_both_ends(devices: list[MappedDevice]) -> None:
    with linked(devices) as (source, target):
        send, receive = source.bulk, target.bulk
        assert isinstance(send, SendingLane)
        assert isinstance(receive, ReceivingLane)
        for _ in range(5):
            with devices[1].active():
                (pending,) = receive.receive([receive.allocate(8)], 0)
            with devices[0].active():
                send.send(devices[0].put(torch.ones(2)), 0).wait()
            with devices[1].active():
                pending.wait()
            del pending
        assert len(receive._buffers) == len(send._buffers) == 1


def test_between_two_processes(jobs: Jobs) -> None:
    between_processes(jobs, "late")


# By NCCL.


def test_a_channel_has_a_group_of_its_own_and_aborts_it() -> None:
    devices = [NcclDevice(), NcclDevice()]
    source, target = connect_all((FORTH, BACK), 2, devices=devices, apart=True)
    for links, device in ((source, devices[0]), (target, devices[1])):
        assert len(device.made.groups) == 2
        assert device.made.interfaces == ["lo", "lo"]  # the coordinator is on this host
        for link in links.values():
            assert isinstance(link.bulk, NcclLane)
            assert isinstance(link.control, GroupLink)
            link.close()
        assert all(group.aborted for group in device.made.groups)
        device.stop()


@pytest.mark.parametrize("payload", [Payload.TARGET, Payload.DATA])
def test_data_and_targets_pass_through_the_host(payload: Payload) -> None:
    devices = [NcclDevice(), NcclDevice()]
    edge = Edge(0, 1, payload)
    for links in connect_all((edge,), 2, devices=devices, apart=True):
        assert isinstance(links[edge], GroupLink)
        links[edge].close()


def test_a_worker_on_the_cpu_and_one_on_a_device_use_gloo() -> None:
    source, target = connect_all((FORTH,), 2, devices=[NcclDevice(), MappedDevice()], apart=True)
    for links in (source, target):
        assert isinstance(links[FORTH], GroupLink)
        links[FORTH].close()


def test_backend_nccl_has_its_control_lanes_in_shared_memory() -> None:
    devices = [NcclDevice().start(), NcclDevice().start()]
    source, target = connect_all((FORTH,), 2, "nccl", devices=devices)
    assert isinstance(source[FORTH].control, shared.SendingLink)
    channel = Channel((source[FORTH], target[FORTH]), devices)
    for step in range(2):
        read = [devices[1].read(got) for got in channel.step(values(step))]
        assert all(torch.equal(a, b * 2.0) for a, b in zip(read, values(step), strict=True))
    for end, device in ((source, devices[0]), (target, devices[1])):
        end[FORTH].close()
        device.stop()


def test_workers_that_share_a_device_cannot_use_nccl() -> None:
    devices = [NcclDevice(unit="cuda:3"), NcclDevice(unit="cuda:3")]
    message = r"stages of 0>1/activation share one \(cuda:3\); use fewer stages, or --backend auto"
    with pytest.raises(UsageError, match=message):
        connect_all((FORTH,), 2, "nccl", devices=devices)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("NCCL error in: x.cpp:1, unhandled system error\nmore"), "unhandled system"),
        (
            RuntimeError(
                "NCCL error in: x.cpp:1, invalid usage, NCCL version 2.28.9\n"
                "ncclInvalidUsage: This usually reflects more.\n"
                "Last error:\nBootstrap : no socket interface found\n"
            ),
            "NCCL version 2.28.9: Bootstrap : no socket interface found; --backend gloo",
        ),
        (None, "no answer within 0 s"),
    ],
)
def test_the_error_of_devices_that_cannot_be_connected_names_the_peer(
    error: RuntimeError | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def group(self: object, store: object, rank: int, interface: str) -> LateGroup:
        if error is not None:
            raise error
        over.wait()
        raise AssertionError

    monkeypatch.setattr(LateCommunicators, "group", group)
    devices = [NcclDevice(), NcclDevice()]
    with ExitStack() as stack:
        stack.callback(over.set)
        if error is None:
            monkeypatch.setattr(nccl, "REACH_FACTOR", 0.01)
        with pytest.raises(PeerLost) as raised:
            connect_all((FORTH,), 2, devices=devices, apart=True)
    text = str(raised.value)
    assert "the channel 0>1/activation could not be connected to the worker of stage" in text
    assert reason in text
    assert "; --backend gloo does without NCCL" in text
    assert "more" not in text


class _Group:
    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None: ...

    class Gone:
        def wait(self) -> None:
            raise RuntimeError("NCCL communicator was aborted")

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        return self.Gone()


def test_a_connected_group_can_no_longer_use_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads would wait for the answer of a coordinator that has ended."""
    stores: list[Store] = []
    plain = LateCommunicators.group

    def group(self: LateCommunicators, store: Any, rank: int, interface: str) -> LateGroup:
        stores.append(store.underlying_store)
        return plain(self, store, rank, interface)

    monkeypatch.setattr(LateCommunicators, "group", group)
    for links in connect_all((FORTH,), 2, devices=[NcclDevice(), NcclDevice()], apart=True):
        links[FORTH].close()
    assert len(stores) == 2
    for store in stores:
        with pytest.raises(ConnectionError, match="have met"):
            store.set("exception_dump", "")
        with pytest.raises(ConnectionError, match="have met"):
            store.check(["exception_dump"])


def test_errors_of_nccl_name_the_channel() -> None:
    lane = NcclLane(FORTH, _Group(), LateDevice())
    with pytest.raises(PeerLost, match="channel 0>1/activation closed: NCCL communicator was"):
        lane.send(torch.ones(1), 0)
    (pending,) = lane.receive([torch.ones(1)], 0)
    with pytest.raises(PeerLost, match="channel 0>1/activation closed: NCCL communicator was"):
        pending.wait()
