"""Tensors of a late device that pass through the host: the order of copies and work."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pipeworker.errors import PipeworkerError
from pipeworker.host.task_thread import TaskThread
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.layout import ALIGNMENT, Layout, layout_of
from pipeworker.worker.transport.links.link import Pending
from pipeworker.worker.transport.send_thread import SendTask
from pipeworker.worker.transport.staging import BufferPool
from pipeworker.worker.transport.unchanged import Unchanged
from support.devices.device import EAGER, ORDERS, LateDevice
from support.draws import draws
from support.in_process.transport import MemoryLink
from support.slow import mostly_slow

MICROBATCHES = 6
Make = Callable[[torch.Tensor], Any]


def bare(tensor: torch.Tensor) -> Any:
    return tensor


def nested(tensor: torch.Tensor) -> Any:
    """Return a value with strides, a tensor twice, an offset, and a tensor of the host."""
    return [tensor.t(), (tensor[1:], tensor.t()), {"here": torch.ones(3)}, None]


@contextmanager
def send_thread() -> Iterator[TaskThread]:
    made = TaskThread("send")
    try:
        yield made
    finally:
        made.close()


def wait_for(gate: threading.Event) -> list[Pending]:
    gate.wait(20)
    return []


def sent_and_received(device: LateDevice, make: Make, steps: int = 3) -> list[tuple[Any, Any]]:
    """Send what one device computes to another; return the results there with those expected."""
    other = LateDevice([s.name for s in device.eager], device.without)
    link = MemoryLink(limit=20.0)
    found: list[tuple[Any, Any]] = []
    with send_thread() as thread:
        sender = Sender(link, None, thread, accelerator=device)
        receiver = Receiver(link, 4, accelerator=other)
        with device.active():
            weight = device.put(torch.arange(12.0).reshape(3, 4))
        for step in range(steps):
            sender.begin(0)
            receiver.begin(0, range(MICROBATCHES))
            late = threading.Event()
            SendTask(partial(wait_for, late), thread)
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


@pytest.mark.parametrize("make", mostly_slow([nested, bare], 2))
@pytest.mark.parametrize("eager", mostly_slow([*EAGER[1:], EAGER[0]], 2))
def test_every_bit_arrives_with_any_stream_late(eager: tuple[str, ...], make: Make) -> None:
    assert right(sent_and_received(LateDevice(eager), make))


@pytest.mark.parametrize("order", ORDERS)
def test_each_missing_wait_gives_wrong_bytes(order: str) -> None:
    """One of the choices of an ordinary run shows it."""
    devices = [LateDevice(eager, order) for eager in EAGER[1::2]]
    assert not all(right(sent_and_received(device, bare, 2)) for device in devices)


allocate = MemoryLink().allocate


def test_buffers_of_a_shape_are_reused_last_in_first_out() -> None:
    pool = BufferPool(allocate)
    layout = layout_of(torch.zeros(2, 3))
    buffers = [pool.acquire(layout) for _ in range(3)]
    pool.reclaim([layout] * 3, buffers)
    for buffer in reversed(buffers):
        assert pool.acquire(layout) is buffer
    assert all(pool.acquire(layout) is not buffer for buffer in buffers)


class PoolModel(RuleBasedStateMachine):
    """Buffers that are out, or kept by the user, share no memory; and little else is free."""

    acquired, kept = Bundle("acquired"), Bundle("kept")

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[torch.UntypedStorage]] = []
        self.pool = BufferPool(self.allocate)
        self.out: dict[int, torch.Tensor] = {}
        self.user: dict[int, torch.Tensor] = {}
        self.number = 0
        self.most = 0

    def allocate(self, count: int) -> torch.Tensor:
        memory = allocate(count)
        self.made.append(weakref.ref(memory.untyped_storage()))
        return memory

    @rule()
    def begin_step(self) -> None:
        self.pool.begin_step()

    @rule(
        target=acquired,
        shape=st.sampled_from([(40, 5), (50, 4), (300,), (7, 90), (2000,), (0, 3)]),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def acquire(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, Layout]:
        layout = layout_of(torch.empty(shape, dtype=dtype))
        buffer = self.pool.acquire(layout)
        assert (buffer.shape, buffer.dtype) == (shape, dtype)
        self.number += 1
        buffer.fill_(self.number)
        self.out[self.number] = buffer
        self.most = max(self.most, sum(b.nbytes for b in self.out.values()))
        return self.number, layout

    @rule(one=consumes(acquired), target=kept, keeps=st.booleans())
    def give_back(self, one: tuple[int, Layout], keeps: bool) -> int:
        number, layout = one
        buffer = self.out.pop(number)
        if keeps:
            self.user[number] = buffer[1:]
        self.pool.reclaim([layout], [buffer])
        return number

    @rule(number=consumes(kept))
    def forget(self, number: int) -> None:
        self.user.pop(number, None)

    @invariant()
    def buffers_in_use_do_not_change(self) -> None:
        for number, tensor in [*self.out.items(), *self.user.items()]:
            assert bool((tensor == number).all())

    @invariant()
    def few_bytes_are_free(self) -> None:
        kept = {t.untyped_storage().data_ptr() for t in self.user.values()}
        alive = [storage for ref in self.made if (storage := ref()) is not None]
        held = sum(s.nbytes() - ALIGNMENT for s in alive if s.data_ptr() not in kept)
        assert held <= 1.25 * self.most


TestPool = PoolModel.TestCase
TestPool.settings = settings(max_examples=draws(25), stateful_step_count=40, deadline=None)


def test_what_is_received_into_a_reused_buffer_counts_its_own_changes() -> None:
    pool = BufferPool(partial(torch.empty, dtype=torch.uint8))
    layout = layout_of(torch.zeros(4))
    first = [pool.acquire(layout)]
    (received,) = pool.tensors_in([layout], first)
    sent = Unchanged("the tensor", [received.add_(1)])  # its send may complete late
    del received
    pool.release([layout], first)
    second = [pool.acquire(layout)]
    assert second[0] is first[0]
    (received,) = pool.tensors_in([layout], second)
    received.add_(1)
    sent.check()
    sent = Unchanged("the tensor", [received])
    received.add_(1)
    with pytest.raises(PipeworkerError, match="changed in place"):
        sent.check()
