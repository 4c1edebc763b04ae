"""Between devices that map each other's memory: what waits for what, and what does not map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipeworker.errors import PeerLost
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.links import shared
from pipeworker.worker.transport.links.link import Link, Pending
from pipeworker.worker.transport.links.mapped import ReceivingLane, SendingLane
from support.device import EAGER
from support.jobs import Jobs
from support.mapped import MappedDevice, between_processes
from support.transport import FORTH, connect_all

MICROBATCHES = 6


@contextmanager
def linked(devices: Sequence[MappedDevice]) -> Iterator[tuple[Link, Link]]:
    source, target = connect_all((FORTH,), 2, devices=devices)
    try:
        yield source[FORTH], target[FORTH]
    finally:
        source[FORTH].close()
        target[FORTH].close()
        for device in devices:
            device.stop()


class Channel:
    """From one device to another, which multiplies by two."""

    def __init__(self, ends: tuple[Link, Link], devices: Sequence[MappedDevice]) -> None:
        self._here, self._there = devices
        self.sender = Sender(ends[0], None, Courier(), accelerator=self._here)
        self.receiver = Receiver(ends[1], 4, accelerator=self._there)

    def step(self, values: Sequence[Any], signature: int = 0) -> list[torch.Tensor]:
        """What the values are on the device; the second of a pair stays on the host."""
        self.sender.begin(signature)
        self.receiver.begin(signature, range(len(values)))
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


def travelled(eager: tuple[str, ...], others: tuple[str, ...], without: str = "") -> bool:
    """Whether what arrives is right, when both hosts have gone on without waiting."""
    devices = [MappedDevice(eager, without), MappedDevice(others, without)]
    with linked(devices) as ends:
        channel = Channel(ends, devices)
        results = [channel.step(values(step)) for step in range(3)]
        for device in devices:
            device.start()
        read = [[devices[1].read(result) for result in some] for some in results]
        wanted = [[value * 2.0 for value in values(step)] for step in range(3)]
        return all(
            torch.equal(torch.stack(a), torch.stack(b)) for a, b in zip(read, wanted, strict=True)
        )


@pytest.mark.parametrize(("eager", "others"), [*zip(EAGER, reversed(EAGER), strict=True)])
def test_every_bit_arrives_whatever_is_late(
    eager: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert travelled(eager, others)


@pytest.mark.parametrize(
    ("without", "eager", "others"),
    [
        ("compute>sends", ("sends",), ()),
        ("other>compute", (), ("compute",)),  # what is written
        ("other>sends", ("compute", "sends"), ()),  # what is free
        ("used by sends", ("compute",), ()),
    ],
)
def test_each_order_that_does_not_hold_gives_wrong_bytes(
    without: str, eager: tuple[str, ...], others: tuple[str, ...]
) -> None:
    assert not travelled(eager, others, without)
    assert travelled(eager, others)


@pytest.mark.parametrize("without", ["", "sends>compute"])
def test_what_was_sent_may_be_changed_behind_a_flush(without: str) -> None:
    devices = [MappedDevice(["compute"], without), MappedDevice()]
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


def test_tensors_of_the_host_pass_between_devices_too() -> None:
    devices = [MappedDevice(["compute", "sends"]), MappedDevice(EAGER[-1])]
    with linked(devices) as ends:
        channel = Channel(ends, devices)
        pairs = [[(value, value + 1.0) for value in values(step)] for step in range(2)]
        results = [channel.step(some) for some in pairs]
        for device in devices:
            device.start()
        for some, got in zip(pairs, results, strict=True):
            for (one, other), result in zip(some, got, strict=True):
                assert torch.equal(devices[1].read(result), one * 2.0 + other)


def test_what_is_not_expected_passes_through_the_host(devices: list[MappedDevice]) -> None:
    """And is right all the same."""
    with linked(devices) as ends:
        channel = Channel(ends, devices)
        first = [torch.ones(4), torch.ones(4)]
        for sent in (first, first, [torch.ones(4), torch.full((2, 3), 5.0)], first):
            read = [devices[1].read(got) for got in channel.step(sent)]
            assert all(torch.equal(a, b * 2.0) for a, b in zip(read, sent, strict=True))


def test_few_bytes_pass_through_the_host(
    devices: list[MappedDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    with linked(devices) as ends:
        channel = Channel(ends, devices)
        channel.step(values(0))
        sent: list[int] = []
        plain = ends[0].control.send

        def send(tensor: torch.Tensor, tag: int) -> Pending:
            sent.append(tensor.nbytes)
            return plain(tensor, tag)

        monkeypatch.setattr(ends[0].control, "send", send)
        channel.step(values(1))
        assert sent == [1] * MICROBATCHES  # that it is as expected


def test_devices_that_do_not_share_say_why(capsys: pytest.CaptureFixture[str]) -> None:
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
        assert devices[1].pins  # what the device copies from
    said = "0>1/activation: tensors pass through the host, since devices cannot share: peer access"
    assert capsys.readouterr().err.count(said) == 2


def test_the_other_end_gone(devices: list[MappedDevice]) -> None:
    with linked(devices) as (source, target):
        with devices[1].active():
            (pending,) = target.bulk.receive([target.bulk.allocate(8)], 0)
        source.close()
        with devices[1].active(), pytest.raises(PeerLost, match="0>1/activation closed"):
            pending.wait()


def test_memory_that_nobody_has_is_forgotten_at_both_ends(devices: list[MappedDevice]) -> None:
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
        assert len(receive._buffers) == len(send._mapped_buffers) == 1


def test_between_two_processes(jobs: Jobs) -> None:
    between_processes(jobs, "late")
