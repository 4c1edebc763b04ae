"""A link in memory: order, pairing and the end of waiting."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import PeerLost
from pipeworker.worker.transport.link import MemoryLink, Pending


def number(value: float = 0.0) -> torch.Tensor:
    return torch.tensor([value])


@given(st.permutations(["send"] * 3 + ["receive"] * 3), st.integers(0, 2))
def test_messages_arrive_in_order_whoever_comes_first(order: list[str], tag: int) -> None:
    link = MemoryLink()
    targets: list[torch.Tensor] = []
    pending: list[Pending] = []
    sent = 0
    for word in order:
        if word == "send":
            sent += 1
            pending.append(link.send(number(float(sent)), tag))
        else:
            targets.append(number())
            pending.append(link.receive([targets[-1]], tag)[0])
    for item in pending:
        item.wait()
    assert [target.item() for target in targets] == [1, 2, 3]
    assert link.sent == 3


def test_tags_are_separate_queues() -> None:
    link = MemoryLink()
    for tag, value in ((5, 1.0), (6, 2.0), (5, 3.0)):
        link.send(number(value), tag)
    got = {}
    for name, tag in (("six", 6), ("five", 5), ("five again", 5)):
        got[name] = number()
        link.receive([got[name]], tag)[0].wait()
    assert {name: tensor.item() for name, tensor in got.items()} == {
        "six": 2.0,
        "five": 1.0,
        "five again": 3.0,
    }


def test_a_posted_receive_is_filled_from_another_thread() -> None:
    link = MemoryLink()
    target = number()
    pending = link.receive([target], 0)[0]
    thread = threading.Thread(target=lambda: link.send(number(7.0), 0).wait())
    thread.start()
    pending.wait()
    thread.join()
    assert target.item() == 7.0


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.int64])
def test_every_bit_of_a_message_is_copied(dtype: torch.dtype) -> None:
    source = torch.arange(6).reshape(2, 3).to(dtype)
    target = torch.empty(3, 2, dtype=dtype)
    link = MemoryLink()
    link.send(source, 0)
    link.receive([target], 0)[0].wait()
    assert torch.equal(target.view(2, 3), source)


def test_a_longer_buffer_takes_a_shorter_message() -> None:
    link = MemoryLink()
    target = torch.zeros(4)
    link.receive([target], 0)
    link.send(torch.ones(2), 0).wait()
    assert target.tolist() == [1, 1, 0, 0]


def test_without_a_peer_both_ends_are_lost() -> None:
    link = MemoryLink(limit=0.01)
    with pytest.raises(PeerLost, match=r"within 0\.01 s"):
        link.send(number(), 0).wait()
    with pytest.raises(PeerLost, match=r"within 0\.01 s"):
        link.receive([number()], 1)[0].wait()
