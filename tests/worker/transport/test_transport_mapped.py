"""Between devices that map each other's memory: what waits for what, and what does not map."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.link import Link
from support.device import EAGER
from support.mapped import MappedDevice
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
        """Values are of the host; only those that are tensors lie on the device."""
        self.sender.begin(signature)
        self.receiver.begin(signature, range(len(values)))
        results = []
        for m, value in enumerate(values):
            with self._here.active():
                on_device = isinstance(value, torch.Tensor)
                self.sender.send(m, self._here.put(value) * 1.0 if on_device else value)
            with self._there.active():
                results.append(self.receiver.receive(m) * 2.0)
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
