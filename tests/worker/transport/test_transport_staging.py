"""Tensors of a device that works late, on their way through the host: what waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.courier import Courier
from pipeworker.worker.transport.links.link import MemoryLink, Pending
from support.device import EAGER, ORDERS, LateDevice

MICROBATCHES = 6
Make = Callable[[torch.Tensor], Any]


def bare(tensor: torch.Tensor) -> Any:
    return tensor


def nested(tensor: torch.Tensor) -> Any:
    """Other strides, the same tensor twice, an offset, and one that lies on the host."""
    return [tensor.t(), (tensor[1:], tensor.t()), {"here": torch.ones(3)}, None]


@contextmanager
def courier() -> Iterator[Courier]:
    made = Courier()
    try:
        yield made
    finally:
        made.close()


def behind(gate: threading.Event) -> list[Pending]:
    gate.wait(20)
    return []


def travelled(device: LateDevice, make: Make, steps: int = 3) -> list[tuple[Any, Any]]:
    """What one device computes, and what another makes of what arrives there: both, in pairs."""
    other = LateDevice([s.name for s in device._eager], device.without)
    link = MemoryLink(limit=20.0)
    found: list[tuple[Any, Any]] = []
    with courier() as thread:
        sender = Sender(link, None, thread, accelerator=device)
        receiver = Receiver(link, 4, accelerator=other)
        with device.active():
            weight = device.put(torch.arange(12.0).reshape(3, 4))
        for step in range(steps):
            sender.begin(0)
            receiver.begin(0, range(MICROBATCHES))
            late = threading.Event()
            thread.submit(partial(behind, late))
            for m in range(MICROBATCHES):
                with device.active():
                    sender.send(m, make(weight * (1.0 + m) + step))
            late.set()
            results = []
            for m in range(MICROBATCHES):
                with other.active():
                    value = receiver.receive(m)
                    tensors = torch.utils._pytree.tree_leaves(value)
                    results.append([t * 2.0 if t is not None else t for t in tensors])
                    del value, tensors
                    receiver.release(m)
            sender.flush()
            for m, got in enumerate(results):
                want = make(torch.arange(12.0).reshape(3, 4) * (1.0 + m) + step)
                expected = [
                    t if t is None else t * 2.0 for t in torch.utils._pytree.tree_leaves(want)
                ]
                found.append(([t if t is None else other.read(t) for t in got], expected))
    assert "MainThread" not in device.waits + other.waits
    return found


def right(found: list[tuple[Any, Any]]) -> bool:
    pairs = [pair for got, want in found for pair in zip(got, want, strict=True)]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("make", [bare, nested])
@pytest.mark.parametrize("eager", EAGER)
def test_every_bit_arrives_whatever_is_late(eager: tuple[str, ...], make: Make) -> None:
    assert right(travelled(LateDevice(eager), make))


@pytest.mark.parametrize("order", ORDERS)
def test_each_order_that_does_not_hold_gives_wrong_bytes(order: str) -> None:
    assert not all(right(travelled(LateDevice(eager, order), bare, 2)) for eager in EAGER)
