"""Channels: which frames move with headers, and that every value arrives."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeworker.errors import PeerLost, PipeworkerError
from pipeworker.host.task_thread import TaskThread
from pipeworker.worker.transport.channel import Receiver, Sender
from pipeworker.worker.transport.frame import MAX_POSTED, MAX_TENSORS
from support.in_process.channels import HEADER, LINKS, Channel
from support.slow import slow


@pytest.fixture(autouse=True, params=LINKS)
def _link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test over every kind of link in memory."""
    monkeypatch.setattr(Channel, "make", staticmethod(LINKS[request.param]))


def x(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and all(map(equal, left, right))
    return type(left) is type(right) and left == right


def test_only_the_first_step_has_headers() -> None:
    channel = Channel()
    for step, messages in enumerate((4, 2, 2)):
        values = [x(step, 1), x(step, 2)]
        arrived, sent = channel.step(values)
        assert equal(arrived, values)
        assert sent == messages


def test_a_new_signature_is_described_once_and_earlier_ones_stay_known() -> None:
    channel = Channel()
    for signature, messages in ((0, 2), (1, 2), (0, 1), (1, 1), (0, 1)):
        value = torch.full((signature + 2,), float(messages))
        arrived, sent = channel.step([value], signature)
        assert equal(arrived, [value])
        assert sent == messages


def test_values_without_tensors_always_move_as_headers() -> None:
    channel = Channel()
    assert channel.step([None, [1, "a"]]) == ([None, [1, "a"]], 2)
    assert channel.step([None, [1, "a"]]) == ([None, [1, "a"]], 2)


def test_empty_tensors_arrive() -> None:
    channel = Channel()
    value = (torch.zeros(0, 3), x(1.0))
    for messages in (2, 1):
        arrived, sent = channel.step([value])
        assert equal(arrived, [value])
        assert sent == messages


def test_strides_and_shared_tensors_arrive_without_a_header() -> None:
    channel = Channel()
    base = torch.arange(12.0).reshape(3, 4)
    value = [base.t(), base[:, ::2], base[:, :1].expand(3, 5), base]
    value.append(value[0])
    for _ in range(2):
        channel.begin([0])
        channel.sender.send(0, value)
        arrived = channel.receiver.receive(0)
        assert equal(arrived, value)
        assert [t.stride() for t in arrived] == [t.stride() for t in value]
        assert arrived[0] is arrived[4]
        channel.receiver.release(0)


def test_wants_grad_belongs_to_the_value_received_last() -> None:
    channel = Channel()
    weight = x(1.0).requires_grad_()
    for _ in range(2):
        channel.begin([0, 1])
        channel.sender.send(0, (weight * 2, x(3.0)))
        channel.sender.send(1, x(3.0))
        arrived = channel.receiver.receive(0)
        assert list(channel.receiver.wants_grad) == [True, False]
        assert not arrived[0].requires_grad
        channel.receiver.receive(1)
        assert list(channel.receiver.wants_grad) == [False]
        for m in (0, 1):
            channel.receiver.release(m)


@pytest.mark.parametrize("size", [900, 1100, 5000])
def test_headers_of_any_length_arrive(size: int) -> None:
    channel = Channel()
    value = {"text": "a" * size, "x": x(1.0)}
    for _ in range(2):
        arrived, _ = channel.step([value])
        assert arrived[0]["text"] == value["text"]
        assert equal(arrived[0]["x"], value["x"])


# Buffers.


def pointers(channel: Channel, count: int) -> list[int]:
    channel.begin(range(count))
    found = []
    for m in range(count):
        channel.sender.send(m, torch.full((64,), float(m)))
        found.append(channel.receiver.receive(m).data_ptr())
    for m in range(count):
        channel.receiver.release(m)
    return found


def test_buffers_are_reused_from_step_to_step() -> None:
    channel = Channel()
    described = set(pointers(channel, 3))
    first = (
        described if channel.one else set(pointers(channel, 3))
    )  # else the bulk lane has its own
    assert len(described) == len(first) == 3
    assert set(pointers(channel, 3)) == first
    assert set(pointers(channel, 3)) == first


@pytest.mark.parametrize(
    "keep",
    [
        lambda t: t,
        lambda t: t[3:5],
        lambda t: t.view(8, 8).t(),
        lambda t: t.detach(),
        lambda t: t.numpy(),
    ],
    ids=["itself", "slice", "view", "detached", "numpy"],
)
def test_a_view_of_a_received_tensor_does_not_change(keep: Callable[..., Any]) -> None:
    channel = Channel()
    kept = []
    for step in range(6):
        channel.begin([0])
        channel.sender.send(0, torch.full((64,), float(step)))
        kept.append(keep(channel.receiver.receive(0)))
        channel.receiver.release(0)
    for step, view in enumerate(kept):
        assert bool((view == step).all())


def test_a_buffer_that_the_user_keeps_is_not_reused() -> None:
    channel = Channel()
    channel.begin([0])
    channel.sender.send(0, torch.zeros(64))
    kept = channel.receiver.receive(0)
    channel.receiver.release(0)
    assert kept.data_ptr() not in pointers(channel, 2)


# Values that differ from their expected frames.


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "all at once"])
def test_shapes_may_change_within_a_step(depth: int, together: bool) -> None:
    channel = Channel(depth=depth)
    sizes = [(2, 2, 2, 2), (2, 3, 2, 4), (5, 2, 2, 2), (2, 2, 2, 2), (2, 2, 2, 2)]
    for step, shapes in enumerate(sizes):
        values = [torch.full((n,), 10.0 * step + m) for m, n in enumerate(shapes)]
        if together:
            channel.begin(range(4))
            for m, value in enumerate(values):
                channel.sender.send(m, value)
            arrived = [channel.receiver.receive(m).clone() for m in range(4)]
            for m in range(4):
                channel.receiver.release(m)
        else:
            arrived, _ = channel.step(values)
        assert equal(arrived, values), step


def test_after_a_surprise_every_frame_is_described() -> None:
    channel = Channel()
    sent = [channel.step([x(*range(n)), x(1.0)])[1] for n in (2, 2, 3, 2, 2)]
    # Described; known; two fillers with the surprise and its follower; described ever after.
    assert sent == [4, 2, 6, 4, 4]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (x(1.0), x(1.0).double()),
        (torch.ones(2, 3), torch.ones(3, 2).t()),
        (x(1.0), x(1.0).requires_grad_()),
        (x(1.0), (x(1.0),)),
        ((x(1.0), 2), (x(1.0), 3)),
        ((x(1.0), x(2.0)), (x(3.0), None)),
        ({"a": x(1.0)}, {"b": x(1.0)}),
        ((x(1.0), 2), (x(1.0), 2.0)),
        ((x(1.0), 1), (x(1.0), True)),
        (x(1.0), None),
        (x(1.0), torch.zeros(0)),
    ],
)
def test_any_difference_from_the_expected_frame_arrives(first: Any, then: Any) -> None:
    channel = Channel()
    for value in (first, first, then, first):
        arrived, _ = channel.step([value, value])
        assert equal(arrived, [value, value])


@pytest.mark.parametrize(
    ("first", "then"),
    [(1, 2), (None, x(5.0)), ([None], [x(5.0)]), (torch.zeros(0, 2), torch.ones(2, 2))],
    ids=["plain", "from None", "from None inside", "from empty"],
)
def test_a_receiver_waits_for_a_value_without_elements(first: Any, then: Any) -> None:
    channel = Channel(limit=10.0)
    channel.step([first])
    channel.begin([0])
    started = threading.Event()

    def receive() -> Any:
        started.set()
        return channel.receiver.receive(0)

    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(receive)
        started.wait()
        wait([arrived], timeout=0.05)
        channel.sender.send(0, then)
        assert equal(arrived.result(), then)


def test_receives_posted_for_a_surprise_are_completed() -> None:
    """Fillers complete them, so that their buffers can be reused."""
    channel = Channel(depth=4)
    values = [x(1.0, 2.0)] * 4
    channel.step(values)
    channel.step(values)
    arrived, _ = channel.step([x(1.0), *values[1:]])
    assert equal(arrived, [x(1.0), *values[1:]])
    assert channel.unmatched() == ({}, {HEADER: 1})  # the receive of the next header


shapes = st.sampled_from([(), (2,), (2, 3), (3, 2), (0, 2)])
leaf = st.builds(lambda shape, k: torch.full(shape, float(k)), shapes, st.integers(0, 9))
values = st.one_of(leaf, st.tuples(leaf, leaf), st.tuples(leaf, st.integers(0, 2)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(values, min_size=3, max_size=3)), max_size=6),
    st.integers(1, 4),
)
def test_every_value_arrives(steps: list[tuple[int, list[Any]]], depth: int) -> None:
    channel = Channel(depth=depth)
    for signature, step in steps:
        arrived, _ = channel.step(step, signature)
        assert equal(arrived, step)


# Two threads.


@pytest.mark.parametrize("capacity", [1, 2, None])
def test_values_arrive_between_two_threads_with_a_send_thread(capacity: int | None) -> None:
    send_thread = TaskThread("send")
    link = Channel.make(10.0)
    sender, receiver = Sender(link, capacity, send_thread), Receiver(link, 2)
    large = 1 << 17  # too large for the calling thread
    steps = [
        [torch.full((large if m % 2 else 3,), float(m + s)) for m in range(4)] for s in range(3)
    ]

    def send() -> None:
        for step in steps:
            sender.begin(0)
            for m, value in enumerate(step):
                sender.send(m, value)
        sender.flush()

    thread = threading.Thread(target=send)
    thread.start()
    for step in steps:
        receiver.begin(0, range(4))
        for m, value in enumerate(step):
            assert torch.equal(receiver.receive(m), value)
            receiver.release(m)
    thread.join()
    send_thread.close()


def test_the_sender_waits_at_its_capacity() -> None:
    channel = Channel(capacity=2, limit=0.05)
    channel.sender.begin(0)
    channel.sender.send(0, x(0.0))
    channel.sender.send(1, x(1.0))
    with pytest.raises(PeerLost):  # nothing receives: the link's limit ends the wait
        channel.sender.send(2, x(2.0))


def test_receiving_makes_room_for_the_sender() -> None:
    channel = Channel(capacity=2, limit=0.05)
    channel.begin(range(4))
    for m in range(4):
        channel.sender.send(m, x(float(m)))
        assert channel.receiver.receive(m).item() == m
    channel.sender.flush()


def test_the_sender_does_not_wait_without_a_capacity() -> None:
    channel = Channel(capacity=None, limit=0.05)
    channel.begin(range(100))
    for m in range(100):
        channel.sender.send(m, x(float(m)))
    assert [channel.receiver.receive(m).item() for m in range(100)] == list(range(100))


def test_send_refuses_values_that_cannot_pass() -> None:
    channel = Channel()
    channel.begin([0])
    with pytest.raises(PipeworkerError, match="a set cannot pass"):
        channel.sender.send(0, {1, 2})


def test_both_ends_notice_a_lost_peer() -> None:
    channel = Channel(limit=0.02)
    channel.receiver.begin(0, [0])
    with pytest.raises(PeerLost):
        channel.receiver.receive(0)
    channel = Channel(limit=0.02)
    channel.step([x(1.0)])
    channel.sender.begin(0)
    channel.sender.send(0, x(1.0))
    with pytest.raises(PeerLost):
        channel.sender.flush()


def test_more_tensors_than_a_frame_has_are_refused() -> None:
    many = [torch.full((1,), float(i)) for i in range(MAX_TENSORS)]
    channel = Channel()
    with pytest.raises(PipeworkerError, match=f"{MAX_TENSORS + 1} tensors cannot pass .* at once"):
        channel.step([[*many, torch.zeros(1)]])


@pytest.mark.parametrize(
    ("_link", "count"),
    [
        pytest.param(link, count, marks=slow if number and count == MAX_TENSORS else ())
        for number, link in enumerate(LINKS)
        for count in (MAX_POSTED, MAX_POSTED + 1, MAX_TENSORS)
    ],
    indirect=["_link"],
)
def test_all_tensors_of_a_frame_arrive(count: int) -> None:
    """A large frame is described each time, and its receives are posted some at a time."""
    channel = Channel()
    many = [torch.full((1,), float(i)) for i in range(count)]
    messages = []
    for _ in range(2):
        arrived, sent = channel.step([many])
        assert [t.item() for t in arrived[0]] == list(range(count))
        messages.append(sent)
    assert messages[0] > count
    assert (messages[1] == count) == (count <= MAX_POSTED)


@pytest.mark.parametrize("threaded", [False, True])
def test_sent_tensors_are_dropped(threaded: bool) -> None:
    thread = TaskThread("send") if threaded else None
    link = Channel.make(10.0)
    sender, receiver = Sender(link, 4, thread), Receiver(link, 2)
    for _ in range(2):
        sender.begin(0)
        receiver.begin(0, range(3))
        alive = []
        for m in range(3):
            value = torch.full((1 << 17,), float(m))  # too large for the calling thread
            alive.append(weakref.ref(value.untyped_storage()))
            sender.send(m, value)
            del value
        for m in range(3):
            assert receiver.receive(m)[0].item() == m
            receiver.release(m)
        sender.flush()
        gc.collect()
        assert [tensor() for tensor in alive] == [None] * 3
    if thread is not None:
        thread.close()
