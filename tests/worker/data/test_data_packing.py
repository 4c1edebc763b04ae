"""Values that pass between a worker and the process that reads its data."""

from __future__ import annotations

import enum
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pipeworker.worker.data.packing import CannotPass, Packed, receive, send
from pipeworker.worker.internals import version_of

Pair = tuple[socket.socket, socket.socket]


class Kind(enum.Enum):
    TRAIN = "train"


class Named(NamedTuple):
    x: Any
    kind: Kind


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def passed(pair: Pair, value: Any) -> Any:
    send(pair[0], value)
    return receive(pair[1])


@pytest.mark.parametrize("rows", [1, 3, 70_000], ids=["inline", "inline, more", "in a file"])
def test_a_value_passes_with_its_bits_layout_and_structure(pair: Pair, rows: int) -> None:
    whole = torch.randn(rows + 1, 5)
    x = whole[1:]
    value = {
        "named": Named(x, Kind.TRAIN),
        "transposed": torch.randn(4, rows).t(),
        "numbers": [1, 2.5, "text", None, True],
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.randn(3, dtype=torch.bfloat16).requires_grad_(),
        "again": x,
    }
    found = passed(pair, value)
    assert found.keys() == value.keys()
    assert found["named"].kind is Kind.TRAIN
    assert found["again"] is found["named"].x
    assert found["numbers"] == value["numbers"]
    for name in ("again", "transposed", "empty", "flags", "half"):
        tensor, expected = found[name], value[name]
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(tensor, expected)
        assert (tensor.dtype, tensor.stride()) == (expected.dtype, expected.stride())
        assert tensor.requires_grad is expected.requires_grad
    assert found["again"].data_ptr() % 64 == x.data_ptr() % 64


def test_parts_of_one_tensor_pass_as_parts_of_one(pair: Pair) -> None:
    parts = [part.data for part in torch.split(torch.randn(9, 4), 3)]
    found = passed(pair, parts)
    assert all(torch.equal(*both) for both in zip(found, parts, strict=True))
    assert len({part.untyped_storage().data_ptr() for part in found}) == 1
    found[0].add_(1)
    assert [version_of(part) for part in found] == [1, 0, 0]


def test_a_message_can_be_sent_again_and_a_receiver_changes_only_its_own(pair: Pair) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    value = torch.randn(50_000)
    packed = Packed(value)
    for _ in range(2):
        packed.send(pair[0])
        found = receive(pair[1])
        assert torch.equal(found, value)
        found.zero_()
        del found
    packed.close()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_message_that_is_sent_once_leaves_no_descriptor(pair: Pair) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    value = torch.randn(50_000)
    assert torch.equal(passed(pair, value), value)
    pair[1].close()
    with pytest.raises(BrokenPipeError):
        send(pair[0], value)
    assert len([*Path("/proc/self/fd").iterdir()]) == before - 1


def test_a_message_for_which_there_is_no_memory_keeps_none() -> None:
    """The reader drops what it has sent, and tries once more."""
    before = len([*Path("/proc/self/fd").iterdir()])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Packed(torch.randn(50_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_a_message_for_which_no_descriptor_is_left_cannot_be_received(pair: Pair) -> None:
    send(pair[0], torch.randn(50_000))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            receive(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "value",
    [
        lambda: None,
        torch.randn(2).as_subclass(Sub),
        torch.randn(2, 2).to_sparse(),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.randn(2, dtype=torch.complex64).conj().imag,
        torch.empty(2, device="meta"),
    ],
    ids=["a function", "a subclass", "sparse", "conjugated", "negated", "another device"],
)
def test_what_cannot_pass_is_rejected(value: Any) -> None:
    with pytest.raises(CannotPass):
        Packed([value])


def test_the_end_of_the_sender_is_seen(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(EOFError):
        receive(pair[1])
